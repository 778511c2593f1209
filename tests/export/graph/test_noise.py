"""The operator of noise: its torch form, its portable ONNX body, the CPU's and TensorRT's, against the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from redraft import names
from redraft.engines.lowering import lower_noise
from redraft.engines.tensorrt.operators import problems
from redraft.engines.tensorrt.prepare import graph_file, prepare
from redraft.export.graph import noise, tracing
from redraft.export.graph.noise import add_noise
from redraft.runtime.sampling.noise import RowKey, gumbel, hashes
from tests.noise import keys_of

IDS = np.sort(np.random.default_rng(0).choice(150_000, 700, replace=False))
LARGEST = 2**32 - 1
KEYS = np.concatenate([keys_of((3, 4), 17, 3), np.array([[[0, 0], [LARGEST, 0], [LARGEST, LARGEST]]])])
HASHES = np.stack([np.stack([hashes(RowKey(*key.tolist()), IDS.astype(np.uint32)) for key in row]) for row in KEYS])
NOISE = np.stack([np.stack([gumbel(row) for row in rows]) for rows in HASHES])
FORMS = ("portable", "cpu", "tensorrt")


class _Noise(torch.nn.Module):
    def forward(self, logits: torch.Tensor, scale: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return add_noise(logits, scale, keys, ids)


def traced() -> ir.Model:
    b = torch.export.Dim("B", min=1)
    args = torch.zeros(2, 3, len(IDS)), torch.zeros(2), torch.ones(2, 3, 2, dtype=torch.long), torch.from_numpy(IDS)
    specs = (
        names.TensorSpec("logits", "float32", ("B", 3, len(IDS))), names.TensorSpec("scale", "float32", ("B",)),
        names.TensorSpec("keys", "int64", ("B", 3, 2)), names.TensorSpec("ids", "int64", (len(IDS),)),
    )  # fmt: skip
    out = (names.TensorSpec("noisy", "float32", ("B", 3, len(IDS))),)
    model = tracing.trace_graph(_Noise(), args, ({0: b}, {0: b}, {0: b}, {}), specs, out)
    noise.add_bodies(model)
    model.ir_version = 11
    return model


@pytest.fixture(scope="module")
def sessions(tmp_path_factory) -> dict[str, ort.InferenceSession]:
    folder: Path = tmp_path_factory.mktemp("noise")
    ir.save(traced(), folder / "noise.onnx")
    lowered = ir.load(folder / "noise.onnx")
    assert lower_noise(lowered)
    assert names.QUADRATIC not in {function.name for function in lowered.functions.values()}
    ir.passes.common.TopologicalSortPass()(lowered)
    ir.save(lowered, folder / "cpu.onnx")
    prepared = prepare(folder, "noise.onnx", "noise", (10, 9), "plugin")
    assert not prepared.functions
    assert not list(problems(prepared, (10, 9)))
    files = zip(FORMS, ("noise.onnx", "cpu.onnx", graph_file("noise")), strict=True)
    return {form: ort.InferenceSession(folder / file) for form, file in files}


def run(session: ort.InferenceSession, logits: np.ndarray, scale: np.ndarray, keys: np.ndarray = KEYS) -> np.ndarray:
    (found,) = session.run(None, {"logits": logits, "scale": scale, "keys": keys, "ids": IDS})
    return found


def assert_same_noise(found: np.ndarray) -> None:
    """The last bits of the inner logarithm count as much where noise is 0 as where it is 1."""
    assert (np.abs(found - NOISE) <= 3 * np.spacing(np.maximum(np.abs(NOISE), 1))).all()


@pytest.mark.parametrize("form", FORMS)
def test_noise_is_that_of_the_definition(sessions: dict[str, ort.InferenceSession], form: str) -> None:
    assert_same_noise(run(sessions[form], np.zeros(HASHES.shape, np.float32), np.ones(3, np.float32)))


def test_torch_computes_the_same() -> None:
    logits = torch.zeros(HASHES.shape)
    assert_same_noise(add_noise(logits, torch.ones(3), torch.from_numpy(KEYS), torch.from_numpy(IDS)).numpy())


@pytest.mark.parametrize("form", FORMS)
def test_scales_are_each_sequences_own_and_0_keeps_logits_to_the_bit(
    sessions: dict[str, ort.InferenceSession], form: str
) -> None:
    logits = np.random.default_rng(1).standard_normal(HASHES.shape).astype(np.float32)
    scale = np.array([0, 2, 0.5], np.float32)
    found = run(sessions[form], logits, scale)
    np.testing.assert_array_equal(found[0], logits[0])
    np.testing.assert_allclose(found, logits + scale[:, None, None] * NOISE, atol=1e-5)
    np.testing.assert_array_equal(run(sessions[form], logits, np.zeros(3, np.float32), KEYS * 0), logits)
