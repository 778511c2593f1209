"""One initializer in place of weights that a graph concatenates, as it does for merged projections.

TensorRT's parser turns a Concat of weights into a layer, and nothing promises that the builder folds it. If it does
not, every call reads and writes these weights once more (vicuna-7b: 8.4 GiB of 12.6). Parts that follow one another in
a file stay there, as `gate_proj` and `up_proj` in safetensors do. Other parts are copied, which costs disk space, and
so are parts of which the first is also read alone: TensorRT refuses two weights of different sizes at one place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import onnx_ir as ir
from onnx_ir.convenience import replace_all_uses_with

_BLOCK_BYTES = 1 << 24


def copied_bytes(model: ir.Model) -> int:
    """Return the bytes of the weights that `merge_weights` would copy."""
    return sum(_bytes(merge.parts) for merge in _merges(model) if not merge.stays)


def merge_weights(model: ir.Model, folder: Path, file: str) -> int:
    """Replace every Concat of stored weights along their first axis, in place.

    folder: that of the graph and its weights.   file: the file in it for copies; it is written only if it is needed.
    Returns the bytes of the copies. Raises OSError.
    """
    copies: list[ir.ExternalTensor] = []
    for node, parts, stays in _merges(model):
        first = parts[0]
        place = str(first.location), first.offset or 0
        if not stays:
            place = file, _bytes(copies)
            copies += parts
        _replace(model.graph, node, ir.ExternalTensor(
            *place, _bytes(parts), first.dtype, name=f"{node.outputs[0].name}.merged", base_dir=folder,
            shape=ir.Shape([sum(_rows(part) for part in parts), *first.shape[1:]]),
        ))  # fmt: skip
    if copies:
        with (folder / file).open("wb") as out:
            for part in copies:
                _copy(part, out)
    return _bytes(copies)


class _Merge(NamedTuple):
    """A node that is replaced, the weights that it concatenates, and whether they stay in their file."""

    node: ir.Node
    parts: list[ir.ExternalTensor]
    stays: bool


def _merges(model: ir.Model) -> list[_Merge]:
    """Return every merge of the graph."""
    readers: dict[tuple[str, int], set[ir.Node]] = {}
    for value in model.graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            readers.setdefault(_place(tensor), set()).update(use.node for use in value.uses())
    return [
        _Merge(node, parts, _adjacent(parts) and readers[_place(parts[0])] == {node})
        for node in model.graph
        if (parts := _parts(node))
    ]


def _place(tensor: ir.ExternalTensor) -> tuple[str, int]:
    return str(tensor.path), tensor.offset or 0


def _parts(node: ir.Node) -> list[ir.ExternalTensor]:
    """Return the stored weights that a node concatenates along their first axis; none if it does anything else.

    None also for an output of the graph, which must stay the output of a node.
    """
    if node.op_type != "Concat" or node.outputs[0].is_graph_output():
        return []
    tensors = [value.const_value for value in node.inputs if value is not None and value.is_initializer()]
    stored = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    if len(stored) < len(node.inputs):
        return []
    return stored if node.attributes["axis"].as_int() in (0, -len(stored[0].shape)) else []


def _adjacent(parts: Sequence[ir.ExternalTensor]) -> bool:
    """Return True if the parts follow one another in one file."""
    return all(a.path == b.path and (a.offset or 0) + a.nbytes == b.offset for a, b in itertools.pairwise(parts))


def _copy(part: ir.ExternalTensor, out: BinaryIO) -> None:
    """Copy the bytes of a tensor. onnx_ir's `tofile` refuses files with hard links, which a bundle's weights are."""
    left = part.nbytes
    with Path(part.path).open("rb") as source:
        source.seek(part.offset or 0)
        while left:
            block = source.read(min(left, _BLOCK_BYTES))
            if not block:
                raise OSError(f"{part.path} ends within {part.name}")
            out.write(block)
            left -= len(block)


def _bytes(parts: Sequence[ir.ExternalTensor]) -> int:
    return sum(part.nbytes for part in parts)


def _rows(tensor: ir.ExternalTensor) -> int:
    return int(tensor.shape[0])  # type: ignore[arg-type]


def _replace(graph: ir.Graph, node: ir.Node, merged: ir.ExternalTensor) -> None:
    value = ir.Value(name=merged.name, shape=merged.shape, type=ir.TensorType(merged.dtype), const_value=merged)
    graph.register_initializer(value)
    replace_all_uses_with(node.outputs[0], value)
    graph.remove(node, safe=True)
