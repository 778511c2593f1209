"""Estimate the memory and the disk space of building and running engines, and refuse a build that does not fit.

Engines are built one after the other. The host holds an engine's weights twice: TensorRT's parser copies them out of
their files, and the builder returns the whole engine in memory. On the GPU the builder holds an engine's weights once,
its inputs and outputs, activations and scratch memory. Running holds all engines. Tensors that several of them read
and write (KV buffers, a tree, tables) count once. Each engine has scratch memory of its own, which all of its execution
contexts share.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper

from redraft.engines.device import byte_size
from redraft.engines.tensorrt import plugin
from redraft.engines.tensorrt.builder import WORKSPACE_BYTES
from redraft.engines.tensorrt_records import Profile
from redraft.errors import BackendError
from redraft.names import TensorSpec

CONTEXT_BYTES = 1 << 29
"""Approximate bytes of a CUDA context and TensorRT's own kernels."""
PARSED_COPIES = 2
"""Copies of an engine's weights in the host's memory at the end of its build: the parser's, and the engine itself."""
_HALF_BYTE = 0.5
_INT4 = onnx.TensorProto.INT4
_GIB = 1 << 30


@dataclass(frozen=True)
class Needs:
    """Bytes of one engine by part.

    buffers:      inputs and outputs at their largest, by owner and name; one in place counts once.
    activations:  tensors between its layers at one time.   workspace: scratch memory that a kernel may use.
    """

    weights: int
    buffers: Mapping[str, int]
    activations: int = 0
    workspace: int = WORKSPACE_BYTES


def needs_of(
    owner: str, model: onnx.ModelProto, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
) -> Needs:  # fmt: skip
    """Return memory of an engine of this prepared graph with these profiles. owner: that of the buffers it reads."""
    weights = sum(_tensor_bytes(tensor) for tensor in model.graph.initializer)
    own = [spec for spec in (*inputs, *outputs) if spec.in_place_of is None]
    sizes = [profile.sizes(inputs, "max") for profile in profiles]
    buffers = {f"{owner} {spec.name}": max(_spec_bytes(spec, each) for each in sizes) for spec in own}
    inferred = onnx.shape_inference.infer_shapes(model).graph
    return Needs(weights, buffers, max(activation_bytes(inferred, each) for each in sizes))


def activation_bytes(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> int:
    """Return the most bytes of tensors between a graph's nodes at one time, in their order, for these symbols' sizes.

    This is about an upper bound, since TensorRT fuses nodes. Weights and tensors computed from them alone, inputs,
    outputs, KV buffers that are updated in place, and values of unknown shape do not count.
    """
    known = {value.name: value.type.tensor_type for value in graph.value_info}
    constant = {tensor.name for tensor in graph.initializer} | {""}
    last = {name: place for place, node in enumerate(graph.node) for name in node.input}
    there: dict[str, int] = {}
    peak = 0
    for place, node in enumerate(graph.node):
        written = node.output[: 0 if node.op_type == "TensorScatter" else 1 if node.op_type == plugin.NAME else None]
        if constant.issuperset(node.input):
            constant.update(node.output)
        else:
            there |= {name: _value_bytes(known[name], sizes) for name in written if name in known}
        peak = max(peak, sum(there.values()))
        for name in (*node.input, *node.output):
            if last.get(name, place) == place:
                there.pop(name, None)
    return peak


def check_memory(needs: Mapping[str, Needs], free_bytes: int, gpu: str) -> None:
    """Raise BackendError if building or running the engines does not fit, with the bytes of each part."""
    building = CONTEXT_BYTES + max(
        need.weights + sum(need.buffers.values()) + need.activations + need.workspace for need in needs.values()
    )
    shared: dict[str, int] = {}
    for need in needs.values():
        shared |= {name: max(size, shared.get(name, 0)) for name, size in need.buffers.items()}
    running = CONTEXT_BYTES + sum(shared.values()) + sum(need.weights + need.activations for need in needs.values())
    if max(building, running) <= free_bytes:
        return
    parts = "; ".join(
        f"{graph}: weights {_gib(need.weights)}, buffers {_gib(sum(need.buffers.values()))}, "
        f"activations {_gib(need.activations)}, workspace {_gib(need.workspace)}"
        for graph, need in needs.items()
    )
    raise BackendError(
        f"{_gib(building)} GiB of GPU memory needed for building and {_gib(running)} for running, {_gib(free_bytes)} "
        f"free on {gpu} (GiB: {parts}; CUDA {_gib(CONTEXT_BYTES)}; shared buffers count once, and the workspace only "
        "while building)",
        "lower --max-model-len, --batch or --precision, free memory, or try anyway with --ignore-memory",
    )


def check_host(needs: Mapping[str, Needs], available_bytes: int | None) -> None:
    """Raise BackendError if the host has too little memory to build one of the engines. None: unknown."""
    for graph, need in needs.items():
        needed = PARSED_COPIES * need.weights
        if available_bytes is not None and needed > available_bytes:
            raise BackendError(
                f"building {graph} takes at least {_gib(needed)} GiB of the host's memory (the parser's weights and "
                f"the engine, {_gib(need.weights)} each), {_gib(available_bytes)} are free",
                "free memory, build with --precision int8, or try anyway with --ignore-memory",
            )


def _spec_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    shape = [sizes.get(dim, 1) if isinstance(dim, str) else dim for dim in spec.shape]  # a sum of symbols is small
    return byte_size(spec.dtype, shape)


def _value_bytes(kind: onnx.TypeProto.Tensor, sizes: Mapping[str, int]) -> int:
    shape = [dim.dim_value if dim.HasField("dim_value") else sizes.get(dim.dim_param, 0) for dim in kind.shape.dim]
    elements: int = math.prod(shape)
    return elements * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    item = _HALF_BYTE if tensor.data_type == _INT4 else float(dtype.itemsize)
    elements: int = math.prod(tensor.dims)
    return math.ceil(elements * item)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"


def check_disk(files: str, sizes: Mapping[str, int], folder: Path) -> None:
    """Raise BackendError if the disk of `folder` has less than these bytes by graph. `files` names the files."""
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if needed <= free:
        return
    parts = ", ".join(f"{graph} {size / _GIB:.2f}" for graph, size in sizes.items())
    raise BackendError(
        f"{files} take at least {needed / _GIB:.2f} GiB of disk, {free / _GIB:.2f} are free in {folder.parent} "
        f"(GiB: {parts})",
        "free some, or build with -o on another disk",
    )
