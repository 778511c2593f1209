"""Every method's specification agrees with itself: signatures, state, tables and profiles."""

from __future__ import annotations

import subprocess
import sys

import pytest

from redraft import names
from redraft.errors import UsageError
from redraft.methods import METHODS, ROWS, Method, built_methods, find_method
from redraft.methods.block import BlockShape
from redraft.methods.decoder import DecoderShape
from redraft.methods.feature_tree import FeatureTreeShape
from redraft.methods.lyanna import LyannaShape
from redraft.methods.mtp import MtpShape
from redraft.methods.multi_head import MultiHeadShape
from redraft.methods.static_tree import StaticTreeShape

TREES = ((0,),), ((0,), (0, 0), (1,), (0, 0, 0), (1, 0))
SHAPES = {
    "lyanna": [
        LyannaShape(32, 61, 2, 16, steps, 3, 7, 4, form, drafted, 8)
        for steps in (1, 4)
        for form in ("fp16", "int8", "fp8", "lowrank")
        for drafted in (20, 61)
    ],
    "mtp": [MtpShape(32, 61, 2, 16, steps, drafted) for steps in (1, 4) for drafted in (20, 61)],
    "draft_model": [
        DecoderShape(3, 32, 61, 2, 16, 24, width, nodes, drafted)
        for width, nodes in ((1, 25), (4, 33))
        for drafted in (20, 61)
    ],
    "medusa": [StaticTreeShape(32, 61, tree, drafted) for tree in TREES for drafted in (20, 61)],
    "multi_head": [
        MultiHeadShape(32, 61, tree, drafted, kv_heads=6, head_dim=16, hidden_states=("1",))
        for tree in TREES
        for drafted in (20, 61)
    ],
    "steered": [
        DecoderShape(3, 32, 61, 2, 16, 8, 1, 9, drafted, hidden_states=states, steering=144)
        for drafted in (20, 61)
        for states in (("2", "1", "0"), ("1", "0"))
    ],
    **{
        name: [
            FeatureTreeShape(32, 61, 2, 16, steps, width, nodes, drafted, row.static)
            for steps, width, nodes in ((1, 1, 2), (4, 1, 5), (1, 3, 4), (4, 3, 13))
            for drafted in (20, 61)
        ]
        for name, row in ROWS.items()
        if row.family == "feature_tree"
    },
    **{
        name: [
            BlockShape(32, 61, 2, 16, steps, layers, causal, width, nodes, drafted, ("1", "last"))
            for steps, width, nodes in ((1, 1, 2), (4, 1, 5), (4, 3, 13))
            for layers, causal in ((1, True), (2, False))
            for drafted in (20, 61)
        ]
        for name, row in ROWS.items()
        if row.family == "block"
    },
}
"""Shapes of each method that is built."""
CASES = [(find_method(name), shape) for name in built_methods() for shape in SHAPES[name]]


def case_id(value: object) -> str:
    """Return the same name in every process: a method's own text has addresses of its functions."""
    return value.id if isinstance(value, Method) else str(value)


def test_the_registry_finds_each_method_by_its_own_id() -> None:
    assert [find_method(name).id for name in METHODS] == list(METHODS)
    with pytest.raises(UsageError, match="unknown drafting method 'absent'; the methods are none, ngram"):
        find_method("absent")


@pytest.mark.parametrize(("method", "shape"), CASES, ids=case_id)
def test_a_specification_agrees_with_itself(method: Method, shape: object) -> None:
    """In-place outputs name inputs, tables are inputs, and each symbol has a size in every profile."""
    tables = {spec.name for spec in method.tables(shape)}
    state = {spec.name: spec for spec in method.state(shape)}
    read = set()
    for role in method.roles(shape):
        graph = method.graphs[role]
        inputs, outputs = graph.signature(shape)
        by_name = {spec.name: spec for spec in inputs}
        read |= set(by_name)
        for spec in outputs:
            if spec.in_place_of:
                assert by_name[spec.in_place_of].shape == spec.shape
                assert state[spec.in_place_of].shape == spec.shape
        assert set(graph.integers(shape)) & set(by_name) <= {spec.name for spec in inputs if spec.dtype == "int64"}
        assert set(graph.looked_up(shape)) & set(by_name) <= tables
        symbols = {dim for spec in inputs for dim in spec.shape if isinstance(dim, str)} - {"B", "C"}
        assert all(set(sizes) == symbols for sizes in graph.profiles.values())
    assert tables <= read
    assert all(spec.shape[0] == "B" for spec in state.values())
    assert names.COPY_SLOT in method.signatures(shape)
    limits = method.limits(shape)
    assert min(limits.depth, limits.width, limits.nodes) > 0


@pytest.mark.parametrize(("method", "shape"), CASES[:1], ids=case_id)
def test_a_shape_is_read_from_a_manifest(method: Method, shape: object) -> None:
    assert method.parse_shape(vars(shape)) == shape
    with pytest.raises(UsageError, match="unknown key colour"):
        method.parse_shape({**vars(shape), "colour": 1})
    with pytest.raises(UsageError, match="missing key hidden"):
        method.parse_shape({key: value for key, value in vars(shape).items() if key != "hidden"})


def test_specifications_need_no_engine_library_and_no_torch() -> None:
    """The command line reads specifications before it loads any library."""
    program = f"""
import sys
from redraft.methods import find_method
for name in {METHODS!r}:
    find_method(name)
print(*({{"torch", "onnx", "onnxruntime", "tensorrt", "numpy"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.stdout.strip(), found.returncode) == ("", 0), found.stderr
