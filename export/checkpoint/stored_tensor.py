"""Symbolic tensors of a checkpoint: they record transformers' operations on the stored tensors, and read nothing.

transformers renames, merges, splits and transposes tensors while it loads them. A `StoredTensor` goes through that code
instead of the data. Afterwards it is either a tensor of the file or an expression over tensors of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import UnsupportedModelError
from redraft.export.checkpoint.base import AnyCheckpoint, TensorEntry, joined

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
"""The type of the symbolic tensor. Other stored types (GGUF's) count as fp32, in which they are read."""
_UNCHANGED = {"to", "detach", "contiguous", "clone", "requires_grad_", "cpu", "float"}
"""Operations that change no value here, since a tensor gets its type when it is written."""


class StoredTensor(torch.Tensor):
    """A tensor on the meta device that records the stored tensors that it is computed from.

    entry:  the equal stored tensor, or contiguous part of one; None for an expression.
    made:   the function of an expression, its arguments, and the item of its result, None for the whole.
    """

    entry: TensorEntry | None
    made: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], int | None] | None

    @classmethod
    def of(cls, entry: TensorEntry) -> StoredTensor:
        """Return the symbolic tensor of a stored one."""
        empty = torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.float32), device="meta")
        return _tagged(empty, entry, None)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _UNCHANGED or (name == "__getitem__" and args[1] is Ellipsis):
            return args[0]
        writes = name in ("__setitem__", "set_") or name.startswith(("__i", "empty", "new_empty")) or "out" in kwargs
        if writes or (name.endswith("_") and not name.endswith("__")):
            raise UnsupportedModelError(
                f"transformers changes stored tensors in place ({name}), which is not supported"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return _tagged(result, None, (func, args, kwargs, None))
        if isinstance(result, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in result):
            return type(result)(_tagged(x, None, (func, args, kwargs, i)) for i, x in enumerate(result))
        return result


def _tagged(tensor: torch.Tensor, entry: TensorEntry | None, made: Any) -> StoredTensor:
    tagged = tensor.as_subclass(StoredTensor)
    tagged.entry, tagged.made = entry, made
    return tagged


def select(tensor: torch.Tensor, index: int) -> StoredTensor:
    """Return `tensor[index]`: a stored tensor if `tensor` was stacked from those, or if it is a contiguous part."""
    stored = _stored(tensor)
    if stored.entry is not None:
        return StoredTensor.of(_part(stored.entry, index, index + 1, stored.entry.shape[1:]))
    operation, inputs, axis = _joined(stored)
    if operation == "stack" and axis == 0:
        return inputs[index]
    if operation == "cat" and axis > 0:
        return _stored(torch.cat([select(part, index) for part in inputs], dim=axis - 1))
    return _stored(tensor[index])


def narrow(tensor: torch.Tensor, begin: int, end: int) -> StoredTensor:
    """Return `tensor[begin:end]`: a stored tensor if `tensor` was concatenated from stored ones."""
    stored = _stored(tensor)
    if stored.entry is not None:
        return StoredTensor.of(_part(stored.entry, begin, end, (end - begin, *stored.entry.shape[1:])))
    operation, inputs, axis = _joined(stored)
    if operation == "cat" and axis == 0:
        start = 0
        for part in inputs:
            if (start, start + len(part)) == (begin, end):
                return part
            start += len(part)
    return _stored(tensor[begin:end])


def _stored(tensor: torch.Tensor) -> StoredTensor:
    assert isinstance(tensor, StoredTensor)
    return tensor


def _joined(tensor: StoredTensor) -> tuple[str, list[StoredTensor], int]:
    """Return `stack` or `cat`, its inputs and its axis, if the tensor is the result of one."""
    if tensor.made is None or tensor.made[0] not in (torch.stack, torch.cat):
        return "", [], 0
    func, args, kwargs, _ = tensor.made
    axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return func.__name__, list(args[0]), axis % tensor.dim()


def _part(entry: TensorEntry, begin: int, end: int, shape: tuple[int, ...]) -> TensorEntry:
    row_bytes = entry.length // entry.shape[0] if entry.shape[0] else 0
    return replace(entry, offset=entry.offset + begin * row_bytes, length=(end - begin) * row_bytes, shape=shape)


def entries(tensor: StoredTensor) -> tuple[TensorEntry, ...]:
    """Return the stored tensors that a tensor is computed from, each once."""
    if tensor.entry is not None:
        return (tensor.entry,)
    assert tensor.made is not None
    stored = [entry for value in _flat((*tensor.made[1], *tensor.made[2].values())) for entry in entries(value)]
    return tuple(dict.fromkeys(stored))


def _flat(values: Sequence[Any]) -> list[StoredTensor]:
    nested = [_flat(v) if isinstance(v, (tuple, list)) else [v] for v in values]
    return [v for part in nested for v in part if isinstance(v, StoredTensor)]


def evaluate(tensor: StoredTensor, checkpoint: AnyCheckpoint) -> NDArray[np.float32]:
    """Return the whole tensor in fp32. Memory holds it and its parts once."""
    value: NDArray[np.float32] = _value(tensor, checkpoint).numpy()
    return value


def _value(tensor: Any, checkpoint: AnyCheckpoint) -> Any:
    if isinstance(tensor, (tuple, list)):
        return type(tensor)(_value(item, checkpoint) for item in tensor)
    if not isinstance(tensor, StoredTensor):
        return tensor
    if tensor.entry is not None:
        return torch.from_numpy(joined(checkpoint.slabs(tensor.entry), tensor.entry.shape))
    assert tensor.made is not None
    func, args, kwargs, item = tensor.made
    result = func(*_value(tuple(args), checkpoint), **{key: _value(v, checkpoint) for key, v in kwargs.items()})
    return result if item is None else result[item]
