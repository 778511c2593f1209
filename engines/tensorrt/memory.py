"""How much GPU memory building and running engines takes, part by part, and the refusal where there is less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from redraft.engines.tensorrt.builder import WORKSPACE_BYTES
from redraft.engines.tensorrt.records import Profile
from redraft.errors import BackendError
from redraft.names import TensorSpec

CONTEXT_BYTES = 1 << 29
"""What a CUDA context and TensorRT's own kernels take, about."""
_ITEM_BYTES = {"int64": 8, "int32": 4, "bool": 1, "int8": 1, "uint8": 1, "float32": 4, "float16": 2, "bfloat16": 2}
_HALF_BYTE = 0.5
_INT4 = onnx.TensorProto.INT4
_GIB = 1 << 30


@dataclass(frozen=True)
class Needs:
    """Bytes of one engine by part. Buffers are inputs and outputs at their largest; one in place counts once."""

    weights: int
    buffers: int
    workspace: int = WORKSPACE_BYTES


def needs_of(
    model: onnx.ModelProto, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], profiles: Sequence[Profile]
) -> Needs:
    """What an engine of this prepared graph takes under these profiles."""
    weights = sum(_tensor_bytes(tensor) for tensor in model.graph.initializer)
    own = [spec for spec in (*inputs, *outputs) if spec.in_place_of is None]
    buffers = max(sum(_spec_bytes(spec, _sizes(inputs, profile)) for spec in own) for profile in profiles)
    return Needs(weights, buffers)


def check_memory(needs: Mapping[str, Needs], free_bytes: int, gpu: str) -> None:
    """Raise BackendError where the engines do not fit the free memory, saying what each part needs.

    Building holds an engine's weights twice, as the parser read them and as the engine has them; running holds all
    engines and their buffers.
    """
    running = sum(need.weights + need.buffers + need.workspace for need in needs.values()) + CONTEXT_BYTES
    building = max(2 * need.weights + need.workspace for need in needs.values()) + CONTEXT_BYTES
    needed = max(running, building)
    if needed <= free_bytes:
        return
    parts = "; ".join(
        f"{graph}: weights {_gib(need.weights)}, buffers {_gib(need.buffers)}, workspace {_gib(need.workspace)}"
        for graph, need in needs.items()
    )
    raise BackendError(
        f"{_gib(needed)} GiB of GPU memory needed, {_gib(free_bytes)} free on {gpu} (GiB: {parts}; "
        f"CUDA {_gib(CONTEXT_BYTES)}; while building, weights count twice)",
        "lower --context, --batch or --precision, or free memory",
    )


def _sizes(inputs: Sequence[TensorSpec], profile: Profile) -> dict[str, int]:
    """The largest value of every symbol."""
    known = {spec.name: spec for spec in inputs}
    return {
        dim: size
        for name, found in profile.inputs.items()
        for dim, size in zip(known[name].shape, found.max, strict=True)
        if isinstance(dim, str)
    }


def _spec_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    shape = [sizes.get(dim, 1) if isinstance(dim, str) else dim for dim in spec.shape]  # a sum of symbols is small
    elements: int = math.prod(shape)
    return elements * _ITEM_BYTES[spec.dtype]


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    item = _HALF_BYTE if tensor.data_type == _INT4 else float(dtype.itemsize)
    elements: int = math.prod(tensor.dims)
    return math.ceil(elements * item)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
