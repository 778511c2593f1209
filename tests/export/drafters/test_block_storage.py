"""A drafter's matrices in 8 bits: their error, their grids, and damaged files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from redraft.errors import CheckpointError
from redraft.export.drafters.block_storage import SCALES, encode
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.layer import DrafterConfig

CONFIG = DrafterConfig(hidden_size=48, vocab_size=97)
BLOCK = 32


class Small(nn.Module):
    """A matrix of whole blocks, one whose rows end with half a block, and a gain."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.whole, self.ragged, self.norm = nn.Linear(64, 5, bias=False), nn.Linear(48, 7, bias=False), nn.RMSNorm(48)
        with torch.no_grad():
            self.whole.weight[0, 32:] *= 50  # blocks of a row have scales of their own
            self.whole.weight[1, :32] = 0
            self.ragged.weight[2, 33] = 1e-9  # less than the least scale
            self.norm.weight.normal_()


def save(folder, module=None, **options):
    identity = Identity(("weights",), "tokenizer")
    save_drafter(folder, "lyanna", CONFIG, identity, module or Small(), torch.arange(97), {}, **options)
    return folder


def load(folder):
    module = Small()
    nn.init.zeros_(module.whole.weight)
    return module, DrafterCheckpoint.open(folder).load(module)


def in_blocks(matrix):
    padding = -matrix.shape[1] % BLOCK
    return nn.functional.pad(matrix, (0, padding)).unflatten(1, (-1, BLOCK))


def test_round_trip_is_within_half_a_step_of_every_block(tmp_path):
    saved, (loaded, data) = Small(), load(save(tmp_path, storage="int8"))
    assert torch.equal(data.counts, torch.arange(97))
    for name in ("whole", "ragged"):
        before, after = (in_blocks(getattr(module, name).weight.detach()) for module in (saved, loaded))
        steps = before.abs().amax(-1, keepdim=True) / 127
        assert ((after - before).abs() <= 0.501 * steps + 1e-7).all()
        assert ((after - before).abs() > 0.3 * steps).any()  # 8 bits, not more
    assert not loaded.whole.weight[1, :32].any()
    assert torch.equal(loaded.norm.weight, saved.norm.weight.bfloat16().float())


def test_a_matrix_takes_a_byte_a_number_and_two_a_block():
    stored = encode(Small().state_dict())
    sizes = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in stored.items()}
    assert sizes == {
        "whole.weight": ("torch.int8", (5, 64)),
        f"whole.weight{SCALES}": ("torch.float16", (5, 2)),
        "ragged.weight": ("torch.int8", (7, 48)),
        f"ragged.weight{SCALES}": ("torch.float16", (7, 2)),
        "norm.weight": ("torch.bfloat16", (48,)),
    }


def test_a_graph_gets_the_stored_codes(tmp_path):
    """An 8-bit product must not round a second time."""
    save(tmp_path, storage="int8")
    shapes = {name: tuple(tensor.shape) for name, tensor in Small().state_dict().items()}
    source, _ = DrafterCheckpoint.open(tmp_path).open_weights(shapes, "student.")
    found = source.of_names(source.checkpoint, {f"student.{name}": shape for name, shape in shapes.items()}, "student.")
    grid = found.grid("student.whole.weight")
    assert (grid.bits, grid.block) == (8, BLOCK)
    parts = [
        (codes.reshape(len(codes), -1, BLOCK).astype(np.float32) - scale.zeros[..., None]) * scale.scales[..., None]
        for codes, scale in grid.slabs()
    ]
    values = np.concatenate(list(found.slabs("student.whole.weight")))
    assert np.array_equal(np.concatenate(parts).reshape(5, 64), values)
    assert found.grid("student.ragged.weight") is None  # its last blocks are not whole
    assert found.grid("student.norm.weight") is None


def change(folder, **tensors):
    """Rewrite the folder's tensors; None drops one."""
    found = load_file(str(folder / "model.safetensors")) | {
        name.replace("__", "."): t for name, t in tensors.items() if t is not None
    }
    gone = {name.replace("__", ".") for name, tensor in tensors.items() if tensor is None}
    save_file({n: t for n, t in found.items() if n not in gone}, str(folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"whole__weight__scales": None}, r"missing whole\.weight\.scales"),
        ({"whole__weight__scales": torch.ones(5, 3).half()}, r"whole\.weight\.scales is \[5, 3\], expected \[5, 2\]"),
        (
            {"whole__weight__scales": torch.full((5, 2), torch.inf).half()},
            r"whole\.weight holds a number that is not finite",
        ),
        ({"norm__weight": torch.ones(48).char()}, r"norm\.weight is stored as I8"),
        ({"ragged__weight": torch.zeros(7, 48)}, r"surplus ragged\.weight\.scales"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, changes, message):
    change(save(tmp_path, storage="int8"), **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
