"""What engines need, part by part, and the refusal where the GPU has less."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from redraft.engines.tensorrt.memory import CONTEXT_BYTES, Needs, check_memory, needs_of
from redraft.engines.tensorrt.records import Profile, Range
from redraft.errors import BackendError
from redraft.names import TensorSpec

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
    needs = needs_of(graph(half, nibbles), inputs, outputs, (few, many))
    assert needs.weights == 4 * 8 * 2 + 3 * 8 // 2
    assert needs.buffers == 2 * 5 * 8 + 2 * 2 * 9 * 4 * 2 + 2 * 5 * 7 * 4


def test_what_fits_passes_and_what_does_not_says_each_part() -> None:
    needs = {"verifier": Needs(10 * GIB, 3 * GIB, GIB), "lyanna.draft": Needs(GIB, 0, GIB)}
    building = 2 * 10 * GIB + GIB + CONTEXT_BYTES  # the weights twice: more than running needs
    check_memory(needs, building, "NVIDIA L4")
    with pytest.raises(BackendError) as caught:
        check_memory(needs, building - 1, "NVIDIA L4")
    line = str(caught.value)
    assert line.startswith("21.50 GiB of GPU memory needed, 21.50 free on NVIDIA L4")
    assert "verifier: weights 10.00, buffers 3.00, workspace 1.00; lyanna.draft: weights 1.00" in line
    assert "lower --context, --batch or --precision" in line


def test_all_engines_and_their_buffers_must_fit_at_once() -> None:
    needs = {"verifier": Needs(GIB, 8 * GIB, GIB), "lyanna.draft": Needs(GIB, GIB, GIB)}
    with pytest.raises(BackendError, match=r"13\.50 GiB of GPU memory needed"):
        check_memory(needs, 13 * GIB, "NVIDIA L4")
