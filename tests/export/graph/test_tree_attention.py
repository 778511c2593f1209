"""The operator's ONNX body equals torch: ragged batches, windows, softcap, grouped heads, unused rows."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from redraft.export.graph import tree_attention
from redraft.export.graph.tree_attention import INPUTS, OUTPUTS, SINKS

BATCH, NODES, CAPACITY, HEAD = 3, 6, 40, 16
PAST = np.array([0, 7, 25])


def one_node_model(
    scale: float, softcap: float, window: int, chunk: int, q_heads: int, kv_heads: int,
    sinks: bool = False, kv: ir.DataType = ir.DataType.FLOAT,
) -> onnx.ModelProto:  # fmt: skip
    """A model of one TreeAttention node and its bodies."""
    floats, integers, booleans = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL
    types = dict.fromkeys(INPUTS, floats) | dict.fromkeys(("positions", "cache_len", "kv_len"), integers)
    types |= {"tree_mask": booleans, "key_cache": kv, "value_cache": kv}
    ranks = {"positions": 2, "cache_len": 1, "kv_len": 1, "key_cache": 4, "value_cache": 4}
    values = [
        ir.Value(name=n, type=ir.TensorType(types[n]), shape=ir.Shape([f"{n}{i}" for i in range(ranks.get(n, 3))]))
        for n in INPUTS
    ]
    if sinks:
        values.append(ir.Value(name=SINKS, type=ir.TensorType(floats), shape=ir.Shape([q_heads])))
    attributes = dict(scale=scale, softcap=softcap, window=window, chunk=chunk, q_heads=q_heads, kv_heads=kv_heads)
    node = ir.node("TreeAttention", values, attributes, domain="redraft", num_outputs=3)
    for output, name in zip(node.outputs, OUTPUTS, strict=True):
        output.name, output.type = name, ir.TensorType(floats if name == "out" else kv)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 24, "redraft": 1}, name="one")
    model = ir.Model(graph, ir_version=11)
    tree_attention.add_bodies(model)
    return ir.to_proto(model)


def run(inputs: dict[str, np.ndarray], *attributes: float) -> list[np.ndarray]:
    """Outputs of the ONNX body. attributes: as `one_node_model` takes them."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    kv = ir.DataType.from_numpy(inputs["key_cache"].dtype)
    model = one_node_model(*attributes, sinks=SINKS in inputs, kv=kv)
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(list(OUTPUTS), inputs)


def random_inputs(q_heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    mask = np.zeros((BATCH, NODES, NODES), bool)
    positions = np.zeros((BATCH, NODES), np.int64)
    for b in range(BATCH):
        for i in range(NODES):
            if i:
                parent = int(generator.integers(0, i))
                mask[b, i] = mask[b, parent]
                positions[b, i] = positions[b, parent] + 1
            mask[b, i, i] = True
    caches = [1e4 * normal(BATCH, kv_heads, CAPACITY, HEAD) for _ in range(2)]
    for cache in caches:
        for b, past in enumerate(PAST):
            cache[b, :, :past] = normal(kv_heads, past, HEAD)
    rows = [normal(BATCH, NODES, h * HEAD) for h in (q_heads, kv_heads, kv_heads)]
    return dict(
        zip(
            INPUTS, [*rows, *caches, mask, positions + PAST[:, None], PAST, np.array([PAST.max() + NODES])], strict=True
        )
    )


@pytest.mark.parametrize(
    ("softcap", "window", "chunk", "q_heads", "kv_heads", "sinks"),
    [
        (0.0, 0, 0, 4, 4, False),
        (2.0, 4, 0, 4, 2, False),
        (0.0, 0, 6, 3, 1, False),
        (2.0, 4, 6, 4, 2, False),
        (0.0, 0, 0, 4, 2, True),
        (0.0, 4, 0, 3, 1, True),
        (0.0, 0, 6, 4, 4, True),
        (0.0, 4, 6, 4, 2, True),
    ],
)
def test_body_equals_torch(softcap, window, chunk, q_heads, kv_heads, sinks):
    inputs = random_inputs(q_heads, kv_heads)
    attributes = (0.3, softcap, window, chunk, q_heads, kv_heads)
    added = {SINKS: np.linspace(-2, 3, q_heads).astype(np.float32)} if sinks else {}
    found = run(inputs | added, *attributes)
    sink = torch.tensor(added[SINKS]) if sinks else None
    expected = torch.ops.redraft.tree_attention(*map(torch.tensor, inputs.values()), sink, *attributes)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    for cache, reference in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(cache, reference)


def test_dead_rows_do_not_matter():
    """Other content of unused rows gives the same result to the last bit."""
    attributes = (0.3, 0.0, 0, 0, 4, 2)
    inputs = random_inputs(4, 2)
    other = {name: array.copy() for name, array in inputs.items()}
    for name in ("key_cache", "value_cache"):
        for b, past in enumerate(PAST):
            other[name][b, :, past:] = -3e5
    np.testing.assert_array_equal(run(inputs, *attributes)[0], run(other, *attributes)[0])


def test_keys_and_values_in_fp16_saturate():
    inputs = random_inputs(4, 2)
    inputs |= {name: inputs[name].astype(np.float16) for name in ("key_cache", "value_cache")}
    for name, (column, size) in itertools.product("kv", ((5, 1e9), (20, -1e9))):
        inputs[name][:, :, column] = size
    out, *caches = run(inputs, 0.3, 0.0, 0, 0, 4, 2)
    assert np.isfinite(out).all()
    for cache, name in zip(caches, "kv", strict=True):
        rows = np.clip(inputs[name], -65504, 65504).astype(np.float16).reshape(BATCH, NODES, 2, HEAD)
        for b, start in enumerate(PAST):
            np.testing.assert_array_equal(cache[b, :, start : start + NODES], rows[b].swapaxes(0, 1))
