"""The verifier's multi-token-prediction module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from redraft.errors import CheckpointError
from redraft.train.batches import Batch
from redraft.train.mtp import load_mtp

from .small_verifier import VerifierObjective, load_run


@pytest.fixture
def objective(recipe):
    torch.manual_seed(0)
    objective = VerifierObjective(recipe)
    for parameter in objective.parameters():  # no zeros, so that every path counts
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return objective


def test_it_is_causal_and_sees_only_the_next_token(objective):
    """State t may depend on h[..t] and x[..t+1]; a leak of x[t + 2] would make its loss and acceptance worthless."""
    hidden, following = torch.randn(1, 6, 32), torch.randn(1, 6, 32)
    before = objective.mtp(hidden, following)
    hidden[:, 4:] += 1
    following[:, 4:] += 1
    after = objective.mtp(hidden, following)
    assert torch.allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert not torch.allclose(before[:, 4], after[:, 4], atol=1e-3)


def test_losses_match_a_loop_over_positions(objective):
    """Computed by hand: it predicts x[t + 2] from the state at t and the embedding of x[t + 1]."""
    tokens = torch.randint(0, 400, (2, 10))
    main, mtp = objective.row_losses(tokens)
    assert mtp.shape == (1,)  # row 0
    embed = objective.model.get_input_embeddings()
    for row in range(2):
        hidden = objective.model.model(input_ids=tokens[row : row + 1, :8]).last_hidden_state[0]
        expected = [F.cross_entropy(hidden[t] @ embed.weight.T, tokens[row, t + 1]) for t in range(8)]
        assert main[row].item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)
        if row == 0:
            states = objective.mtp(hidden[None], embed.weight[tokens[row, 1:9]][None])[0]
            expected = [F.cross_entropy(states[t] @ embed.weight.T, tokens[row, t + 2]) for t in range(8)]
            assert mtp[0].item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)
    loss, metrics = objective.loss(Batch.whole(tokens, ("a", "b"), objective.lookahead))
    assert metrics == pytest.approx({"a": main[0].item(), "b": main[1].item(), "mtp": mtp[0].item()})
    assert loss.item() == pytest.approx((main.mean() + 0.3 * mtp.mean()).item(), rel=1e-5)


def test_a_checkpoints_module_is_the_trained_one_in_bf16(verifier_folder, run, tmp_path):
    objective, _ = load_run(run)
    for parameter in objective.parameters():
        parameter.data = parameter.data.bfloat16().float()
    hidden, following = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
    with torch.no_grad():
        found, expected = load_mtp(verifier_folder)(hidden, following), objective.mtp(hidden, following)
    assert torch.allclose(found, expected, atol=1e-5)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError):
        load_mtp(tmp_path)
