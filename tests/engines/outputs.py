"""Compares the outputs of a bundle's graphs on two devices, and the buffer rows that they write.

`compare_outputs` knows devices by their protocol only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.device import Buffer, Device, Program, sized
from redraft.engines.manifest import GraphRecord
from redraft.names import Dtype, TensorSpec
from tests.engines.drafters import LYANNA_COPY_SLOT, LYANNA_DRAFT, LYANNA_RESAMPLE

from .calls import Array, Call, Calls, as_float, from_float

TOLERANCES: Mapping[Dtype, float] = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 5e-2}
"""Largest error of an output, relative to its largest value, by the graph's element type.

The reference computes in fp32 with the stored weights (`exact`), so the error is the device's rounding.
Rounding every value of the embedded model's 12 layers and of its drafter moves outputs by at most 1.8e-3 in fp16 and
1.5e-2 in bf16 (`exact` with `rounded`), 3.8 of the types' unit roundoffs u = 4.9e-4 and 3.9e-3. Three times that allows
deeper models, other orders of sums, and fp16 or bf16 inside attention. In fp32 (u = 6e-8), the order of sums over K up
to 11008 products counts, sqrt(K) u = 6e-6, with a large margin. TF32's products (u = 4.9e-4) exceed it, as they should:
a bundle in fp32 requires fp32.

Weights in fewer bits have the tolerance of `compute_dtype`: both sides have the same codes and scales. Their products
code * scale have more digits than fp16, so a device may round each once, like other values. int8, int4 and fp8 in fp16
move outputs by 1.8e-3 too. ONNX Runtime computes them in fp32, without rounding.
"""
NATS = 20.0
"""Scale of errors of log-probabilities, instead of the largest one. They depend on the logits, up to 50 in these calls,
not on a tree's differences. Rounded as above they move by 0.02 in fp16, 0.35 in bf16."""
GRAPHS = (
    names.VERIFIER, LYANNA_DRAFT, LYANNA_RESAMPLE, names.STEP_PREPARE_TREE, names.STEP_ACCEPT,
    names.STEP_ACCEPT_SAMPLED, names.STEP_COMPACT_KV,
    names.STEP_GATHER_FEATURES, names.STEP_STORE_TREES, names.STEP_COPY_SLOT, LYANNA_COPY_SLOT,
)  # fmt: skip
_TREE = (names.TREE_TOKENS, names.TREE_PARENTS, names.TREE_LOG_PROBS)


def compare_outputs(
    device: Device, reference: Device, bundle: Bundle, graphs: Sequence[str] = GRAPHS, left: bool = True
) -> dict[str, float]:
    """The largest error by graph and call, for the graphs that the bundle has.

    left: both leave the same in rows that do not count (`Call.left`); native attention writes no row of a chain there.
    `device` runs over buffers whose stale rows are poisoned, `reference` over clean ones. Raises AssertionError for an
    output beyond TOLERANCES, for another integer, and for a row changed that the call does not write.
    """
    made, most = Calls(bundle), TOLERANCES[bundle.manifest.shape.dtype]
    errors: dict[str, float] = {}
    for graph in graphs:
        if graph not in bundle.manifest.all_graphs:
            continue
        record, ours, theirs = bundle.graph(graph), device.program(graph), reference.program(graph)
        for call in made.of(graph):
            if left:
                call = replace(call, left=())
            found = run(device, ours, record, call.values, call.sizes)
            expected = run(reference, theirs, record, {**call.values, **call.clean}, call.sizes)
            where = f"{graph}, {call.kind}, B={call.sizes['B']}"
            errors[where] = _compare(where, record.outputs, call, found, expected, most)
    return errors


def run(
    device: Device, program: Program, record: GraphRecord, values: Mapping[str, Array], sizes: Mapping[str, int]
) -> dict[str, Array]:
    """Every output of a call. For an in-place output, the whole buffer with unused slots.

    Values have the element types of the bundle's `record`; the program may take and give others (`exact`).
    """
    types = {spec.name: spec.dtype for spec in (*record.inputs, *record.outputs)}
    whole: dict[str, Buffer] = {}
    bound: dict[str, Buffer] = {}
    sent = {name: values[name] for name in (names.KV_LEN, names.SOURCE_SLOT, names.TARGET_SLOT) if name in values}
    host_inputs = device.host_inputs(**{name: given.shape for name, given in sent.items()})
    for name, given in sent.items():
        host_inputs.open()[name][:] = given
    host_inputs.send()
    whole.update(host_inputs.buffers)
    for spec in program.inputs:
        if spec.name not in sent:
            whole[spec.name] = device.empty(spec.dtype, *values[spec.name].shape)
            whole[spec.name].write(_converted(values[spec.name], types[spec.name], spec.dtype))
        leading = (sizes["B"],) if spec.shape[0] == "B" else values[spec.name].shape[:1]
        bound[spec.name] = whole[spec.name].part(*leading, *values[spec.name].shape[1:])
    for spec in program.outputs:
        if spec.in_place_of:
            whole[spec.name], bound[spec.name] = whole[spec.in_place_of], bound[spec.in_place_of]
        else:
            whole[spec.name] = bound[spec.name] = device.empty(spec.dtype, *sized(spec.shape, sizes))
    program.bind(bound)()
    return {
        spec.name: _converted(whole[spec.name].read(), spec.dtype, types[spec.name])
        for spec in program.outputs
        if spec.name in types  # a chain's steps update the buffers by more names
    }


def _converted(values: Array, dtype: Dtype, wanted: Dtype) -> Array:
    """Numbers of one element type in another."""
    return values if dtype == wanted else from_float(as_float(values, dtype), wanted)


def _compare(
    where: str, specs: Sequence[TensorSpec], call: Call, found: Mapping[str, Array], expected: Mapping[str, Array],
    most: float,
) -> float:  # fmt: skip
    """The largest error of a call's outputs, at most `most`."""
    errors = [0.0]
    count = expected.get(names.TREE_COUNT, np.array(0))
    for spec in specs:
        ours, theirs, name = found[spec.name], expected[spec.name], f"{where}: {spec.name}"
        if spec.name in _TREE[:2]:
            continue  # with the log-probabilities, which order the nodes
        if spec.in_place_of in call.clean:
            assert spec.in_place_of is not None
            counting = ~_marked(call.left, ours)
            changed = counting & _changed_rows(name, call, ours, call.values[spec.in_place_of])
            wanted = counting & _changed_rows(f"{name} of the reference", call, theirs, call.clean[spec.in_place_of])
            np.testing.assert_array_equal(changed, wanted, f"{name}: other rows were written")
            ours, theirs = (as_float(rows, spec.dtype).swapaxes(1, 2)[changed] for rows in (ours, theirs))
            errors.append(_error(name, ours, theirs, most))
        elif spec.in_place_of or not spec.dtype.startswith(("float", "bfloat")):
            np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8), f"{name}: expected the same bits")
        elif spec.name == names.TREE_LOG_PROBS:
            for slot in range(len(ours)):
                nodes = int(count[slot]) if count.ndim else ours.shape[1]
                trees = [[given[part][slot, :nodes] for part in _TREE] for given in (found, expected)]
                compare_trees(f"{name}[{slot}]", *trees, most)
                errors.append(_error(name, ours[slot, :nodes], theirs[slot, :nodes], most, NATS))
        else:
            errors.append(_error(name, as_float(ours, spec.dtype), as_float(theirs, spec.dtype), most))
    return max(errors)


def _error(name: str, ours: Array, theirs: Array, most: float, scale: float | None = None) -> float:
    """The largest difference over `scale`, or over the largest value."""
    assert np.isfinite(theirs).all(), f"{name}: the reference is not finite"
    scale = scale or float(np.abs(theirs).max(initial=0.0)) or 1.0
    error = float(np.abs(ours - theirs).max(initial=0.0)) / scale
    assert error <= most, f"{name}: off by {error:.2g} of {scale:.2g}, at most {most:.2g} is rounding"
    return error


def _changed_rows(name: str, call: Call, after: Array, before: Array) -> Array:
    """Rows of a KV buffer [slots, H, C, D] with changed bits, bool [slots, C]. Only the call's rows may change."""
    bits = f"u{after.dtype.itemsize}"
    changed: Array = (after.view(bits) != before.view(bits)).any(axis=(1, 3))
    wrong = np.argwhere(changed & ~_marked(call.rows, after))
    assert not len(wrong), f"{name}: row {wrong[0][1]} of slot {wrong[0][0]} changed, which the call does not write"
    return changed


def _marked(rows: Sequence[range], buffer: Array) -> Array:
    """Rows of a KV buffer [slots, H, C, D] within the range of their slot, bool [slots, C]."""
    marked = np.zeros((buffer.shape[0], buffer.shape[2]), np.bool_)
    for slot, some in enumerate(rows):
        marked[slot, some.start : some.stop] = True
    return marked


def compare_trees(name: str, ours: Sequence[Array], theirs: Sequence[Array], most: float) -> None:
    """Compare nodes and their probabilities, except at a cut between nodes that rounding may have swapped.

    A tree is its tokens, parents and log-probabilities, likeliest first.
    """
    near = most * NATS
    assert (np.diff(ours[2]) <= 0).all(), f"{name}: the likeliest nodes do not come first"
    found, expected = (_likelihoods(name, *tree) for tree in (ours, theirs))
    for path in found.keys() & expected.keys():
        assert abs(found[path] - expected[path]) <= near, f"{name}: {path} is {found[path]}, expected {expected[path]}"
    for has, other, what in ((found, expected, "should not be"), (expected, found, "should be")):
        for path in has.keys() - other.keys():
            assert _lost(path, has, other, near), f"{name}: {path}, which is {has[path]}, {what} in the tree"


_Likelihoods = dict[tuple[int, ...], float]


def _likelihoods(name: str, tokens: Array, parents: Array, log_probs: Array) -> _Likelihoods:
    """Log-probabilities by the tokens from the root to a node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths), f"{name}: a node is there twice"
    return dict(zip(paths, log_probs.tolist(), strict=True))


def _lost(path: tuple[int, ...], has: _Likelihoods, other: _Likelihoods, near: float) -> bool:
    """Return True if nodes of only one tree are as improbable, up to rounding, as the other tree's.

    That is the last of its siblings, as a node has so many children; where there are none the last node of all, or that
    of the level above which is the last to have any, as so many go on. What hangs from a lost node went with it.
    """
    parent = path[:-1]
    if parent not in other:
        return True
    siblings = [prob for each, prob in other.items() if each[:-1] == parent]
    gone_on = [other[each[:-1]] for each in other if len(each) == len(path)]
    if not siblings and gone_on and has[parent] - min(gone_on) <= near:
        return True
    return has[path] - min(siblings or other.values()) <= near
