"""The kernels' C entries in Python. They take device addresses and a stream, copy nothing and import no GPU library.

    kernels = open_kernels()                                   # build/plugins/libredraft_kernels.so
    args = AttentionArgs(dtype=FLOAT16, batch=1, nodes=13, ..., q=q.data_ptr(), out=out.data_ptr())
    scratch = torch.empty(kernels.workspace_bytes(args), dtype=torch.uint8, device="cuda")
    kernels.attend(args, scratch.data_ptr(), scratch.nbytes, torch.cuda.current_stream().cuda_stream)

plugins/tree_attention/tree_attention.h describes the fields. Addresses must stay valid until the stream has run the
call. The CPU build takes host addresses and returns after the call has run.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.errors import KernelError

FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2
DTYPES: Mapping[str, int] = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}
HEAD_DIMS = (64, 80, 96, 128, 256)

BUILD = Path(__file__).resolve().parents[1] / "build" / "plugins"
LIBRARY_VARIABLE = "REDRAFT_KERNELS"
CUDA_LIBRARY = "libredraft_kernels.so"
CPU_LIBRARY = "libredraft_kernels_cpu.so"
_ABI = 2

_int32, _float, _address = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


def _fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names)


class _Args(ctypes.Structure):
    """A struct with fields set by name. Other fields are 0 or null."""

    def __init__(self, **values: int | float | None) -> None:
        known = {field[0] for field in self._fields_}
        if unknown := sorted(set(values) - known):  # ctypes would accept them silently
            raise TypeError(f"{type(self).__name__} has no field {', '.join(unknown)}")
        super().__init__(**values)


class AttentionArgs(_Args):
    """`redraft_tree_attention_args`: sizes, then addresses."""

    _fields_ = (
        *_fields(_int32, "dtype", "batch", "nodes", "q_heads", "kv_heads", "head_dim", "capacity", "window"),
        *_fields(_float, "scale", "softcap"),
        *_fields(_int32, "ctas"),
        *_fields(_address, "q", "k", "v", "key_cache", "value_cache", "mask_bits", "mask_bools", "positions"),
        *_fields(_address, "cache_len", "node_counts", "out"),
    )


class CompactArgs(_Args):
    """`redraft_compact_args`: sizes, then addresses."""

    _fields_ = (
        *_fields(_int32, "dtype", "cache_count", "batch", "kv_heads", "head_dim", "capacity", "max_path"),
        *_fields(_address, "caches", "cache_len", "paths", "path_lengths"),
    )


class AttentionPlan(ctypes.Structure):
    """`redraft_attention_plan`: tiles, blocks and scratch memory of a call."""

    _fields_ = (
        *_fields(_int32, "rows", "tile", "ctas", "threads"),
        *_fields(ctypes.c_int64, "shared_bytes", "partial_bytes"),
    )


class Kernels:
    """A loaded library of kernels. Raises KernelError with the library's message if it refuses a call."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"{path} does not load: {error}") from error
        try:
            found = self._library.redraft_kernels_abi()
        except AttributeError:
            raise KernelError(f"{path} is not a library of redraft's kernels; build one with `make plugins`") from None
        if found != _ABI:
            raise KernelError(f"{path}: expected kernels of interface {_ABI}, found {found}; rebuild: make plugins")
        self._library.redraft_last_error.restype = ctypes.c_char_p

    @property
    def on_cpu(self) -> bool:
        """True for the CPU build, which takes host addresses."""
        return hasattr(self._library, "redraft_cpu_set_order")

    def workspace_bytes(self, args: AttentionArgs) -> int:
        """Return the bytes of scratch memory that `attend` needs for these sizes."""
        found = ctypes.c_size_t()
        self._check(self._library.redraft_tree_attention_workspace(ctypes.byref(args), ctypes.byref(found)))
        return found.value

    def plan(self, args: AttentionArgs) -> AttentionPlan:
        """Return the plan of `attend` for these sizes."""
        found = AttentionPlan()
        self._check(self._library.redraft_tree_attention_plan(ctypes.byref(args), ctypes.byref(found)))
        return found

    def attend(self, args: AttentionArgs, workspace: int, workspace_bytes: int, stream: int = 0) -> None:
        """Write new rows and attend. `workspace` and `stream` are addresses."""
        size = ctypes.c_size_t(workspace_bytes)
        self._check(
            self._library.redraft_tree_attention(ctypes.byref(args), _address(workspace), size, _address(stream))
        )

    def compact(self, args: CompactArgs, stream: int = 0) -> None:
        """Make the rows of accepted nodes contiguous in all caches."""
        self._check(self._library.redraft_compact(ctypes.byref(args), _address(stream)))

    def set_order(self, order: int) -> None:
        """Set the order in which threads take turns: 0 ascending, 1 descending, else a seed. CPU build only."""
        self._library.redraft_cpu_set_order(ctypes.c_uint(order))

    def truncate_sums(self, truncate: bool) -> None:
        """Truncate sums of matrix products towards zero, like tensor cores, if true. CPU build only."""
        self._library.redraft_cpu_truncate_sums(ctypes.c_int(truncate))

    def _check(self, status: int) -> None:
        if status:
            raise KernelError(self._library.redraft_last_error().decode())


def missing_kernels(name: str = CUDA_LIBRARY, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why no library can be loaded, or None if its file exists."""
    path = _library_path(name, environment)
    if path.exists():
        return None
    return f"no kernels at {path}; build them with `make plugins`, or name them in {LIBRARY_VARIABLE}"


def open_kernels(name: str = CUDA_LIBRARY, environment: Mapping[str, str] = os.environ) -> Kernels:
    """Load the library that REDRAFT_KERNELS names, else `name` from build/plugins. Raises KernelError."""
    if reason := missing_kernels(name, environment):
        raise KernelError(reason)
    return Kernels(_library_path(name, environment))


def find_kernels(name: str = CUDA_LIBRARY, environment: Mapping[str, str] = os.environ) -> Kernels | None:
    """Return the kernels for the GPU, or None if they were not built. Raises KernelError for an unusable library."""
    if not environment.get(LIBRARY_VARIABLE) and not (BUILD / name).exists():
        return None
    kernels = open_kernels(name, environment)
    return None if kernels.on_cpu else kernels


def _library_path(name: str, environment: Mapping[str, str]) -> Path:
    return Path(environment.get(LIBRARY_VARIABLE) or BUILD / name)
