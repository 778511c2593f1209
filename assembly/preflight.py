"""Checks before a build does anything slow: a file that can be exported, free disk and free memory.

None of them imports PyTorch. Estimates are what a build needs at least, so that they refuse no build that works.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redraft.config import BuildConfig, Precision
from redraft.engines.host_memory import available_bytes
from redraft.errors import BackendError, BundleError
from redraft.export.checkpoint.base import ITEM_BYTES, AnyCheckpoint
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.gguf.checkpoint import GgufCheckpoint

WEIGHT_BYTES: Mapping[Precision, float] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int4": 0.5, "fp8": 1}
"""Bytes of a weight in a bundle, without scales."""
LINKED: Mapping[Precision, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Precisions whose bundles may hold hard links of the checkpoint's files, if its tensors have this type."""
LIBRARIES = ("torch", "transformers", "safetensors", "onnx", "onnxscript", "onnx_ir", "ml_dtypes", "gguf")
LIBRARY_BYTES = 700 << 20
"""Memory of PyTorch, transformers, ONNX and ONNX Runtime, loaded and without a model."""
MB, GIB = 1_000_000, 1 << 30


@dataclass(frozen=True)
class Needs:
    """Bytes of disk and of memory that a build needs at least."""

    disk: int
    memory: int


def check_libraries() -> None:
    """Raise BackendError if a library that every build needs is not installed, as after `pip install redraft` alone."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise BackendError(
            f"building needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            "run `pip install 'redraft[export]'`",
        )


def check_file(checkpoint: AnyCheckpoint) -> None:
    """Read the header of a GGUF file, which `open_checkpoint` leaves for later. A folder's are read already.

    Raises CheckpointError for a damaged file, UnsupportedModelError for an architecture or type without support.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        from redraft.export.gguf.file import check_architecture

        check_architecture(checkpoint.header)


def needs_of(checkpoint: AnyCheckpoint, config: BuildConfig, out: Path, measured: int) -> Needs:
    """Return the needs of a build of `out`. measured: tokens of held-out text whose logits are compared.

    Only weights of the checkpoint count. Builds for TensorRT have checks of memory of their own.
    """
    numbers = [math.prod(tensor.shape) for tensor in _tensors(checkpoint)]
    if config.random_weights or not numbers:
        return Needs(0, 0)
    weights = disk = int(sum(numbers) * WEIGHT_BYTES[config.precision])
    if config.precision in LINKED and isinstance(checkpoint, Checkpoint):
        device, dtype = _folder(out).stat().st_dev, LINKED[config.precision]
        linked = {name for name in checkpoint.files if (checkpoint.path / name).stat().st_dev == device}
        copied = [each for each in checkpoint.tensors.values() if each.dtype != dtype or each.file not in linked]
        disk = sum(ITEM_BYTES[dtype] * math.prod(each.shape) for each in copied)
    if config.for_tensorrt:
        return Needs(disk, 0)
    # Measuring holds the texts' logits, and later the engine's weights; a conversion holds a tensor in fp32.
    measuring = max(weights, 4 * measured * int(checkpoint.config.get("vocab_size") or 0)) if measured else 0
    return Needs(disk, LIBRARY_BYTES + measuring + 4 * max(numbers))


def check_room(checkpoint: AnyCheckpoint, config: BuildConfig, out: Path, measured: int) -> None:
    """Raise BundleError if the disk of `out` is too small for the bundle, BackendError if memory is for the build.

    measured: as in `needs_of`. Their logits are in the temporary folder for a while.
    """
    needs = needs_of(checkpoint, config, out, measured)
    free = shutil.disk_usage(_folder(out)).free
    if needs.disk > free:
        raise BundleError(
            f"no space for {out}: at least {needs.disk / MB:.0f} MB needed, {free / MB:.0f} MB free",
            "free space, or give an -o on another disk",
        )
    logits, scratch = 4 * measured * int(checkpoint.config.get("vocab_size") or 0), Path(tempfile.gettempdir())
    if logits > (free := shutil.disk_usage(scratch).free):
        raise BundleError(
            f"no space in {scratch}: {logits / MB:.0f} MB of logits to compare, {free / MB:.0f} MB free",
            "free space, or set TMPDIR to a folder on another disk",
        )
    available = available_bytes()
    if available is not None and needs.memory > available:
        smaller = "" if config.precision == "int4" else ", build with --precision int4"
        raise BackendError(
            f"building takes at least {needs.memory / GIB:.1f} GiB of memory; {available / GIB:.1f} are free",
            f"free memory{smaller}{', or do not measure: --eval-text none' if measured else ''}",
        )


def _folder(out: Path) -> Path:
    """Return the folder that exists and will hold `out`."""
    return next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())


def _tensors(checkpoint: AnyCheckpoint) -> Iterable[Any]:
    """Return the tensors. A GGUF file's are as it names them, since other names need PyTorch."""
    return checkpoint.header.tensors if isinstance(checkpoint, GgufCheckpoint) else checkpoint.tensors.values()
