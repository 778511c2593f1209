"""Operators refuse malformed models and calls with an error, and compute the others; random calls of the C entries.

`python -m tests.plugins.fuzz` (`make fuzz`) runs the same for minutes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException

from redraft.engines.onnxruntime_backend import register_operators, session_options
from redraft.plugins.library import BUILD
from redraft.plugins.operators import OPERATORS_LIBRARY, OPERATORS_VARIABLE, Operators, find_operators

from . import fuzz
from .builds import find_compiler

Arrays = dict[str, NDArray[Any]]
PRODUCT_INPUTS = ("A", "B", "scales", "zero_points", "g_idx", "bias")
ATTENTION_INPUTS = (
    *("q", "k", "v", "key_cache", "value_cache", "tree_mask", "positions", "cache_len", "kv_len", "sinks"),
    *("packed_rows", "cosines", "sines"),
)
ATTENTION_OUTPUTS = ("out", "present_key", "present_value")
ATTENTION = ("CpuTreeAttention", "redraft", ATTENTION_INPUTS, ATTENTION_OUTPUTS)
PRODUCT = ("MatMulNBits", "com.microsoft", PRODUCT_INPUTS, ("Y",))
GATE = ("SiluGate", "redraft", ("x", "factors"), ("y",))
EXTREMES = st.sampled_from([-(2**63), -1, -1, 0, 1, 3, 16, 48, 2**31, 2**62, 2**63 - 1])
SIZES = st.integers(0, 4) | st.sampled_from([15, 16, 32])
MOST_ELEMENTS = 1 << 16


def compute(
    op: str, domain: str, inputs: tuple[str, ...], outputs: tuple[str, ...], arrays: Arrays,
    attributes: dict[str, float], constants: set[str],
) -> list[NDArray[Any]]:  # fmt: skip
    """Return the outputs of a model of one node. Inputs without an array are absent."""
    given_inputs = [name if name in arrays else "" for name in inputs]
    node = helper.make_node(op, given_inputs, outputs, domain=domain, **attributes)
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
        for name, array in arrays.items()
        if name not in constants
    ]
    results = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items() if name in constants]
    graph = helper.make_graph([node], "fuzz", values, results, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    options = session_options(1, "error")
    options.log_severity_level = 4
    library = find_operators({OPERATORS_VARIABLE: str(BUILD / OPERATORS_LIBRARY)})
    assert library is not None
    register_operators(options, library)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[NDArray[Any]] = session.run(None, {value.name: arrays[value.name] for value in values})
    return found


def damage(data: st.DataObject, arrays: Arrays, attributes: dict[str, float]) -> int:
    """Change some attributes and arrays. Returns how many changes it made."""
    count = data.draw(st.integers(0, 2))
    for _ in range(count):
        if not arrays:
            break
        values = ["value", "value"] if attributes else []
        change = data.draw(st.sampled_from([*values, "numbers", "numbers", "size", "shape", "type", "absent"]))
        integers = [name for name, array in arrays.items() if array.dtype == np.int64] or [*arrays]
        names = {"value": [*attributes], "numbers": integers, "absent": [*arrays, *attributes]}
        name = data.draw(st.sampled_from(names.get(change, [*arrays])))
        if change == "absent":
            (arrays if name in arrays else attributes).pop(name)
        elif change == "value":
            attributes[name] = data.draw(EXTREMES)
        elif change == "type":
            dtype = data.draw(st.sampled_from([np.float32, np.float16, np.uint8, np.int32, np.int64, bool]))
            arrays[name] = arrays[name].astype(dtype)
        elif change == "numbers":
            arrays[name] = np.full(arrays[name].shape, data.draw(EXTREMES)).astype(arrays[name].dtype)
        else:
            shape = data.draw(st.lists(SIZES, max_size=5)) if change == "shape" else [*arrays[name].shape]
            if change == "size" and shape:
                shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(SIZES)
            if np.prod(shape) < MOST_ELEMENTS:
                arrays[name] = np.resize(arrays[name], shape)
    return count


def check(data: st.DataObject, op: str, domain: str, inputs: tuple[str, ...], outputs: tuple[str, ...],
          arrays: Arrays, attributes: dict[str, float], constants: set[str]) -> None:  # fmt: skip
    """Damage a node or not, and compute it. Without damage it has results.

    Damage may change nothing. But negative sizes, and lengths past the cache, are refused.
    """
    damaged = damage(data, arrays, attributes)
    for name in data.draw(st.lists(st.sampled_from(inputs), max_size=1)) if damaged else ():
        constants = constants ^ {name}
    try:
        found = compute(op, domain, inputs, outputs, arrays, attributes, constants)
    except (Fail, InvalidArgument, InvalidGraph, RuntimeException):
        if not damaged:
            raise
    else:
        assert damaged or all(np.isfinite(array).all() for array in found)
        places = [arrays[name] for name in ("cache_len", "packed_rows") if name in arrays]
        sizes = [value for name, value in attributes.items() if name != "interleaved"]
        assert min([0, *sizes, *(each.min(initial=0) for each in places)]) >= 0
        assert max(each.max(initial=0) for each in [*places, np.zeros(0)]) < 1 << 10


def check_product(data: st.DataObject) -> None:
    rng, n, k = np.random.default_rng(0), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 100))
    bits, block = data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from([16, 32, 64]))
    blocks = -(-k // block)
    arrays: Arrays = {
        "A": rng.standard_normal((*data.draw(st.lists(SIZES, max_size=2)), k), np.float32),
        "B": rng.integers(0, 256, (n, blocks, block * bits // 8), np.uint8),
        "scales": rng.standard_normal((n, blocks), np.float32),
        "zero_points": rng.integers(0, 256, (n, -(-blocks * bits // 8)), np.uint8),
        "bias": rng.standard_normal(n, np.float32),
    }
    for name in data.draw(st.sets(st.sampled_from(["zero_points", "bias"]))):
        del arrays[name]
    attributes: dict[str, float] = {"N": n, "K": k, "bits": bits, "block_size": block}
    check(data, *PRODUCT, arrays, attributes, {*PRODUCT_INPUTS[1:]})


def attention_node(
    batch: int = 1, nodes: int = 2, past: int = 3, kv_heads: int = 1, groups: int = 2, size: int = 16,
    joined: bool = False, packed: bool = False,
) -> tuple[Arrays, dict[str, float]]:  # fmt: skip
    """Return all inputs and attributes. packed: the last node of the batch has no row."""
    rng, q_heads, capacity = np.random.default_rng(0), kv_heads * groups, past + nodes
    widths = {"q": q_heads * size, "k": kv_heads * size, "v": kv_heads * size}
    if joined:
        widths = {"q": sum(widths.values())}
    places, rows = np.arange(batch * nodes), (batch, nodes)
    if packed:
        places, rows = places[:-1], (1, len(places) - 1)
    arrays: Arrays = {name: rng.standard_normal((*rows, width), np.float32) for name, width in widths.items()}
    caches = rng.standard_normal((2, batch, kv_heads, capacity, size), np.float32)
    tables = rng.standard_normal((2, capacity, size // 2), np.float32)
    arrays |= {
        "key_cache": caches[0], "value_cache": caches[1],
        "tree_mask": np.broadcast_to(np.tri(nodes, dtype=bool), (batch, nodes, nodes)),
        "positions": (past + places % nodes).reshape(rows), "cache_len": np.full(batch, past),
        "kv_len": np.array([capacity]), "sinks": rng.standard_normal(q_heads, np.float32), "packed_rows": places,
        "cosines": tables[0], "sines": tables[1],
    }  # fmt: skip
    if not packed:
        del arrays["packed_rows"]
    integers = dict.fromkeys(("window", "chunk", "interleaved"), 0)
    return arrays, {"q_heads": q_heads, "kv_heads": kv_heads, **integers, "scale": 0.25, "softcap": 0.0}


def check_attention(data: st.DataObject) -> None:
    names = ("batch", "nodes", "past", "kv_heads", "groups", "joined", "packed")
    ranges = ((1, 2), (1, 4), (0, 20), (1, 2), (1, 3), (0, 1), (0, 1))
    drawn = [data.draw(st.integers(*each)) for each in ranges]
    arrays, attributes = attention_node(
        **dict(zip(names, drawn, strict=True)), size=data.draw(st.sampled_from([16, 32]))
    )
    for absent in data.draw(st.sets(st.sampled_from([("sinks",), ("cosines", "sines")]))):
        for name in absent:
            del arrays[name]
    attributes |= {name: data.draw(st.integers(0, 9)) for name in ("window", "chunk", "interleaved")}
    attributes["softcap"] = data.draw(st.sampled_from([0.0, 2.0]))
    check(data, *ATTENTION, arrays, attributes, set())


def check_gate(data: st.DataObject) -> None:
    rng, n, rows = np.random.default_rng(0), data.draw(st.integers(0, 40)), data.draw(st.lists(SIZES, max_size=2))
    arrays: Arrays = {"x": rng.standard_normal((*rows, 2 * n), np.float32)}
    if data.draw(st.booleans()):
        arrays["factors"] = rng.standard_normal(n, np.float32)
    check(data, *GATE, arrays, {}, set())


@pytest.mark.parametrize("check_one", [check_product, check_attention, check_gate])
def test_malformed_models_and_calls_are_refused(operators_library: Operators, check_one: Any) -> None:
    settings(max_examples=40, deadline=None, derandomize=True)(given(st.data())(check_one))()


@pytest.mark.parametrize("absent", ["k", "v", "cosines", "sines"])
def test_one_input_of_a_pair_is_refused(operators_library: Operators, absent: str) -> None:
    arrays, attributes = attention_node()
    compute(*ATTENTION, arrays, attributes, set())
    del arrays[absent]
    with pytest.raises(InvalidArgument, match=f"redraft: {absent}: expected a tensor"):
        compute(*ATTENTION, arrays, attributes, set())


def test_random_calls_of_the_entries(operators_library: Operators, tmp_path: Path) -> None:
    """Of the built library: bits and refusals."""
    compiler = find_compiler() or pytest.skip("no C++ compiler here")
    program = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", fuzz.PROGRAM, operators_library.path]
    subprocess.run([*program, f"-Wl,-rpath,{BUILD}", "-o", tmp_path / "fuzz"], check=True)
    run(tmp_path / "fuzz", 500)


def run(program: Path, calls: int) -> None:
    done = subprocess.run([program, str(calls)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
