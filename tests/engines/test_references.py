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
from redraft.errors import BundleError

from .bundles import build_tiny
from .calls import Array
from .outputs import GRAPHS, TOLERANCES, compare_outputs
from .references import exact

pytestmark = pytest.mark.slow
BUILDS: tuple[tuple[Backend, Precision], ...] = (
    ("onnxruntime", "bf16"), ("onnxruntime", "int8"), ("onnxruntime", "int4"),
    ("tensorrt", "int8"), ("tensorrt", "int4"), ("tensorrt", "fp8"),
)  # fmt: skip


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


def test_the_hosts_own_kernels_do_not_do(built: Built) -> None:
    """ONNX Runtime's CPU has no kernels for bf16, and rounds activations of products with 8-bit and 4-bit weights."""
    bundle, manifest = built.bundle, built.bundle.manifest
    if manifest.precision == "fp8":
        compare_outputs(HostDevice(bundle), HostDevice(built.reference), bundle, [names.VERIFIER])
        return
    with pytest.raises(BundleError if manifest.precision == "bf16" else AssertionError, match=r"bf16|off by"):
        compare_outputs(HostDevice(bundle), HostDevice(built.reference), bundle, [names.VERIFIER])


def test_quantized_weights_are_codes_times_scales(built: Built, tmp_path: Path) -> None:
    """Weights computed here from the stored bytes, and multiplied like any weights."""
    reference = built.reference
    record = reference.graph(names.VERIFIER)
    portable, model = (onnx.load(each.path / each.graph(names.VERIFIER).file) for each in (built.bundle, reference))
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in portable.graph.initializer}
    made = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in portable.graph.node:
        if node.op_type == "DequantizeLinear":
            np.testing.assert_array_equal(made[node.output[0]], dequantized(*(stored[name] for name in node.input)))
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            sizes = {each.name: each.i for each in node.attribute}
            weights = from_blocks(*(stored[name] for name in node.input[1:]), bits=sizes["bits"])[: sizes["K"]]
            model.graph.initializer.append(numpy_helper.from_array(weights, f"{node.output[0]}.weights"))
            node.CopyFrom(onnx.helper.make_node("MatMul", [node.input[0], f"{node.output[0]}.weights"], node.output))
    onnx.save(model, tmp_path / record.file)
    plain = Bundle(tmp_path, reference.manifest)
    compare_outputs(HostDevice(plain), HostDevice(reference), built.bundle, [names.VERIFIER])


def dequantized(codes: Array, scales: Array) -> Array:
    """[K, N] of codes and of scales, [N] or [blocks, N]."""
    rows = np.atleast_2d(scales).astype(np.float32)
    return codes.astype(np.float32) * np.repeat(rows, len(codes) // len(rows), axis=0)


def from_blocks(codes: Array, scales: Array, zeros: Array | None = None, *, bits: int) -> Array:
    """[K, N] of codes [N, blocks, bytes], with a scale and a zero point a block; of four bits the low ones first.

    zeros: without them, the codes' middle.
    """
    outputs, blocks, _ = codes.shape
    middle = np.full((outputs, -(-blocks * bits // 8)), 0x88 if bits == 4 else 0x80, np.uint8)
    zeros = middle if zeros is None else zeros.reshape(outputs, -1)
    if bits == 4:
        codes, zeros = (np.stack([each & 15, each >> 4], -1).reshape(*each.shape[:-1], -1) for each in (codes, zeros))
    zeros = zeros[:, :blocks, None].astype(np.float32)
    return ((codes - zeros) * scales.reshape(outputs, blocks, 1)).reshape(outputs, -1).T.copy()
