"""States that are kept."""

from __future__ import annotations

import pytest
import torch

from redraft.train.states import States, stored_size


@pytest.mark.parametrize("width", [1, 31, 32, 33, 45, 96])
def test_kept_hidden_states_are_off_by_half_a_step_of_their_own_block(width):
    """A large number spoils no other block, and a row of zeros stays one."""
    rows = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
    rows[..., -1] = 1000.0
    rows[1, 4] = 0.0
    whole = States({"last": rows}, torch.zeros(2, 5, 3), torch.zeros(2, 5, 3), torch.zeros(2, 5))
    kept = whole.to_numpy()
    assert kept["hidden8.last"].nbytes == 10 * stored_size(width)
    found = States.of_tensors({name: torch.from_numpy(array) for name, array in kept.items()}).last.float()
    for block, read in zip(rows.split(32, -1), found.split(32, -1), strict=True):
        most = block.abs().amax(-1, keepdim=True) * (0.5 / 127 + 2**-10)
        assert ((block - read).abs() <= most).all()
