"""References of outputs in every precision of a GPU, on the embedded model.

A device that rounds all halves is within the tolerance, one whose weights are others is not: here both are ONNX
Runtime's CPU, over graphs that round as a device does (`exact` with `rounded`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from redraft import names
from redraft.config import Backend, Precision
from redraft.engines.bundle import Bundle
from redraft.engines.host_device import HostDevice

from .bundles import build_tiny
from .calls import Array
from .outputs import GRAPHS, TOLERANCES, compare_outputs
from .references import exact

pytestmark = pytest.mark.slow
BUILDS: tuple[tuple[Backend, Precision], ...] = (("onnxruntime", "bf16"), ("onnxruntime", "int4"), ("tensorrt", "fp8"))
"""Halves, MatMulNBits and DequantizeLinear."""


@dataclass(frozen=True)
class Built:
    """A bundle, the same bundle computed exactly, and rounded like a device."""

    bundle: Bundle
    reference: Bundle
    rounded: Bundle


@pytest.fixture(scope="module", params=BUILDS, ids="-".join)
def built(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The embedded model; for TensorRT without engines, which only TensorRT can build."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redraft.assembly.bundle.check_buildable", lambda config: None)
        bundle = build_tiny(root, folder / "tiny", *request.param, None)
    return Built(bundle, exact(bundle, folder / "exact"), exact(bundle, folder / "rounded", rounded=True))


def test_a_devices_rounding_is_within_the_tolerance(built: Built) -> None:
    """A third of the tolerance, by its choice. Weights in fp32 have no rounding."""
    bundle = built.bundle
    errors = compare_outputs(HostDevice(built.rounded), HostDevice(built.reference), bundle)
    assert {where.partition(",")[0] for where in errors} == set(GRAPHS)
    compute_dtype, worst = bundle.manifest.shape.dtype, max(errors.values())
    assert worst == 0 if compute_dtype == "float32" else 0.1 < worst / TOLERANCES[compute_dtype] < 0.4


def other_rows(values: Array) -> Array:
    """Exchange each row of a weight, or of its scales, with its neighbour."""
    return np.roll(values, 1, axis=0)


def test_weights_that_are_read_otherwise_are_seen(built: Built, tmp_path: Path) -> None:
    """One product of twelve layers uses the rows, or the scales, before its own."""
    spoiled = changed(built.rounded, tmp_path, "model.layers.6.mlp.down_proj.weight", other_rows)
    with pytest.raises(AssertionError, match=r"verifier, .*: off by"):
        compare_outputs(HostDevice(spoiled), HostDevice(built.reference), built.bundle, [names.VERIFIER])


def changed(bundle: Bundle, folder: Path, weight: str, change: Callable[[Array], Array]) -> Bundle:
    """The verifier with changed numbers of a weight, or of its scales."""
    record = bundle.graph(names.VERIFIER)
    model = onnx.load(bundle.path / record.file)
    (tensor,) = (
        each for each in model.graph.initializer
        if each.name.startswith(weight) and each.data_type == onnx.TensorProto.FLOAT
    )  # fmt: skip
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
    onnx.save(model, folder / "changed.onnx")
    records = {**bundle.manifest.graphs, names.VERIFIER: replace(record, file="changed.onnx")}
    return Bundle(folder, replace(bundle.manifest, graphs=records))
