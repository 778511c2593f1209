"""Memory of engines, part by part, and the refusal if the GPU has less."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from redraft import names, signatures
from redraft.engines.tensorrt.memory import CONTEXT_BYTES, Needs, activation_bytes, check_host, check_memory, needs_of
from redraft.engines.tensorrt.profiles import CallLimits, profiles_of, verifier_symbols
from redraft.engines.tensorrt_records import Profile, Range
from redraft.errors import BackendError
from redraft.names import TensorSpec
from redraft.signatures import VerifierShape

GIB = 1 << 30


def graph(*initializers: onnx.TensorProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([], "g", [], [], list(initializers)))


def test_weights_count_by_their_type_and_in_place_outputs_not_at_all() -> None:
    half = numpy_helper.from_array(np.zeros((4, 8), np.float16), "half")
    nibbles = helper.make_tensor("nibbles", TensorProto.INT4, [3, 8], b"\0" * 12, raw=True)
    inputs = (TensorSpec("x", "int64", ("B", "T")), TensorSpec("kv", "float16", ("B", 2, "C", 4)))
    outputs = (TensorSpec("y", "float32", ("B", "T", 7)), TensorSpec("kv.present", "float16", ("B", 2, "C", 4), "kv"))
    few = Profile("token", {"x": Range((1, 1), (1, 1), (2, 1)), "kv": Range((1, 2, 2, 4), (1, 2, 9, 4), (2, 2, 9, 4))})
    many = Profile("tree", {"x": Range((1, 1), (1, 5), (2, 5)), "kv": Range((1, 2, 2, 4), (1, 2, 9, 4), (2, 2, 9, 4))})
    needs = needs_of(names.VERIFIER, graph(half, nibbles), inputs, outputs, (few, many))
    assert needs.weights == 4 * 8 * 2 + 3 * 8 // 2
    assert needs.buffers == {
        "verifier x": 2 * 5 * 8, "verifier kv": 2 * 2 * 9 * 4 * 2, "verifier y": 2 * 5 * 7 * 4,
    }  # fmt: skip


def test_activations_are_the_tensors_between_layers_at_one_time() -> None:
    """Activations leave out weights, values computed from them, and buffers that are updated in place."""
    nodes = [
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node("MatMul", ["x", "turned"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("TensorScatter", ["kv", "c", "at"], ["kv.present"]),
        helper.make_node("TreeAttention", ["c", "kv.present"], ["d", "key", "value"]),
        helper.make_node("Relu", ["d"], ["unknown"]),
        helper.make_node("Relu", ["unknown"], ["y"]),
    ]
    values = {"turned": [900], "a": ["B", "T"], "b": ["B", "T", 3], "c": ["B", "T"], "kv.present": [900], "d": ["T"],
              "key": [900], "value": [900], "unknown": [None]}  # fmt: skip
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name, shape in values.items()]
    weight = helper.make_tensor("w", TensorProto.FLOAT16, [1], b"\0\0", raw=True)
    made = helper.make_graph(nodes, "g", [], [], [weight], value_info=infos)
    assert activation_bytes(made, {"B": 2, "T": 5}) == (2 * 5 + 2 * 5 * 3) * 2  # a and b, or b and c


def test_engines_that_do_not_fit_are_refused_with_each_part() -> None:
    needs = {
        "verifier": Needs(10 * GIB, {"verifier kv": 3 * GIB}, GIB // 4, GIB),
        "lyanna.draft": Needs(GIB, {"lyanna kv": GIB // 2}, GIB // 4, GIB),
    }
    running = (10 * GIB + 3 * GIB + GIB // 4) + (GIB + GIB // 2 + GIB // 4) + CONTEXT_BYTES
    check_memory(needs, running, "NVIDIA L4")
    with pytest.raises(BackendError) as caught:
        check_memory(needs, running - 1, "NVIDIA L4")
    line = str(caught.value)
    assert line.startswith("14.75 GiB of GPU memory needed for building and 15.50 for running, 15.50 free on NVIDIA L4")
    assert "verifier: weights 10.00, buffers 3.00, activations 0.25, workspace 1.00; lyanna.draft: weights 1.00" in line
    assert line.endswith(
        "lower --max-model-len, --batch or --precision, free memory, or try anyway with --ignore-memory"
    )


def test_building_is_of_one_engine_at_a_time() -> None:
    needs = {"verifier": Needs(GIB, {}, 0, 9 * GIB), "lyanna.draft": Needs(2 * GIB, {}, 0, 7 * GIB)}
    check_memory(needs, 10 * GIB + CONTEXT_BYTES, "NVIDIA L4")
    with pytest.raises(BackendError, match=r"^10\.50 GiB of GPU memory needed for building and 3\.50 for running"):
        check_memory(needs, 10 * GIB, "NVIDIA L4")


def test_shared_buffers_count_once() -> None:
    needs = {
        "verifier": Needs(GIB, {"verifier kv": 8 * GIB, "verifier logits": GIB}, 0, 0),
        "step.compact_kv": Needs(0, {"verifier kv": 7 * GIB}, 0, 0),
        "lyanna.draft": Needs(0, {"lyanna kv": 2 * GIB}, 0, 0),
    }
    with pytest.raises(BackendError, match=r"needed for building and 12\.50 for running"):
        check_memory(needs, 12 * GIB, "NVIDIA L4")


def test_the_host_holds_the_weights_of_a_build_twice() -> None:
    """The parser's copy of the weights and the engine, one engine at a time; the GPU's memory does not count."""
    needs = {
        "verifier": Needs(int(12.55 * GIB), {"verifier kv": 90 * GIB}),
        "lyanna.draft": Needs(GIB, {"lyanna kv": GIB}),
    }
    check_host(needs, int(25.11 * GIB))
    check_host(needs, None)  # a system that does not report it
    with pytest.raises(BackendError) as caught:
        check_host(needs, 24 * GIB)
    assert str(caught.value) == (
        "building verifier takes at least 25.10 GiB of the host's memory (the parser's weights and the engine, "
        "12.55 each), 24.00 are free; free memory, build with --precision int8, or try anyway with "
        "--ignore-memory"
    )


def test_seven_billion_halves_fit_a_gpu_of_24_gigabytes() -> None:
    """Vicuna-7B: 13.5 GB of weights, too many for a GPU of 12 GiB."""
    max_model_len = 4096
    shape = VerifierShape(32, 32, 128, 4096, 32000, max_model_len, "float16")
    sizes = [(32000, 4096)] * 2 + [(4096, 4096)] * 4 * 32 + [(4096, 11008)] * 3 * 32 + [(4096,)] * 65
    weights = [TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT16, dims=dims) for i, dims in enumerate(sizes)]
    rows = helper.make_tensor_value_info("gate", TensorProto.FLOAT16, ["B", "T", 22016])
    nodes = [helper.make_node("MatMul", ["features", "w"], ["gate"]), helper.make_node("Sigmoid", ["gate"], ["open"])]
    model = helper.make_model(helper.make_graph(nodes, "verifier", [], [], weights, value_info=[rows]))
    inputs, outputs = signatures.verifier_inputs(shape), signatures.verifier_outputs(shape, (names.LAST_HIDDEN_STATE,))
    limits = CallLimits(1, 64, 128, max_model_len)
    profiles = profiles_of(verifier_symbols(names.VERIFIER, limits), inputs, limits, kv_len_is_shape=False)
    needs = {names.VERIFIER: needs_of(names.VERIFIER, model, inputs, outputs, profiles)}
    check_memory(needs, int(23.5 * GIB), "NVIDIA L4")
    parts = r"verifier: weights 12\.55, buffers 2\.01, activations 0\.01, workspace 1"  # buffers: KV are 2.00
    with pytest.raises(BackendError, match=parts):
        check_memory(needs, 12 * GIB, "NVIDIA L4")
