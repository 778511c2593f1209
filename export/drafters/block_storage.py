"""Matrices of a drafter stored in 8 bits: codes int8 [out, in], and one fp16 scale for each block of 32 along a row.

    w ≈ code * scale,   scale = largest |w| of the block / 127

NAME holds the codes and NAME.scales [out, blocks] the scales; the last block of a row may be shorter. 8-bit products of
a graph use these codes as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.export.checkpoint.base import TensorEntry, row_slices
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.stored_grid import Coded, Grid, StoredGrid
from redraft.export.quantization.rounding import BLOCK, blocks_of

CODES = "I8"
"""Stored type of the codes."""
SCALES = ".scales"
"""Suffix of the scales' name."""
_LARGEST = 127
_ZERO = 128
"""Code of the number zero in `MatMulNBits`, whose codes are unsigned."""


def encode(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors to store: matrices as codes and scales, others in bf16."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            stored[name], stored[f"{name}{SCALES}"] = coded(tensor.detach().cpu().float())
        else:
            stored[name] = tensor.detach().cpu().to(torch.bfloat16).contiguous()
    return stored


def coded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes int8 [..., n] and scales fp16 [..., blocks] of rows fp32 [..., n]."""
    columns = rows.shape[-1]
    padded = torch.nn.functional.pad(rows, (0, blocks_of(columns) * BLOCK - columns)).unflatten(-1, (-1, BLOCK))
    scales = (padded.abs().amax(-1) / _LARGEST).half()
    steps = torch.where(scales > 0, scales, 1).float()[..., None]
    codes = (padded / steps).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return codes.flatten(-2)[..., :columns].contiguous(), scales


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the rows fp32 [..., n] of codes and scales."""
    return codes * scales.float().repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]


def scale_shapes(
    entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the scales that a file must have: of every parameter of `shapes` that it holds as codes."""
    return {
        f"{name}{SCALES}": (shape[0], blocks_of(shape[1]))
        for name, shape in shapes.items()
        if name in entries and entries[name].dtype == CODES and len(shape) == 2
    }


def readable(entry: TensorEntry) -> bool:
    """Return True if a drafter's parameter may be stored so: as numbers, or a matrix as codes."""
    return entry.dtype in ("F32", "F16", "BF16") or (entry.dtype == CODES and len(entry.shape) == 2)


@dataclass(frozen=True)
class BlockCheckpoint(Checkpoint):
    """A drafter's file, whose matrices may be codes."""

    @property
    def readable(self) -> tuple[str, ...]:
        """The stored types that `slabs` reads."""
        return (*super().readable, CODES)

    def is_finite(self, entry: TensorEntry) -> bool:
        """Return True if a tensor has finite numbers only; of codes, if its scales are finite."""
        return super().is_finite(self._scales(entry) if entry.dtype == CODES else entry)

    def slabs(self, entry: TensorEntry) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor, or a contiguous part, in fp32, a few rows at a time."""
        if entry.dtype != CODES:
            yield from super().slabs(entry)
            return
        for codes, scales in self._coded_rows(entry):
            yield codes * np.repeat(scales, BLOCK, -1)[:, : codes.shape[1]]

    def grid(self, entry: TensorEntry) -> StoredGrid | None:
        """Return the grid of codes; None for numbers, and for codes whose rows do not end with a whole block."""
        if entry.dtype != CODES or entry.shape[1] % BLOCK:
            return None
        return StoredGrid(8, BLOCK, True, lambda: map(_as_grid, self._coded_rows(entry)))

    def _scales(self, entry: TensorEntry) -> TensorEntry:
        return self.tensors[f"{entry.name}{SCALES}"]

    def _coded_rows(self, entry: TensorEntry) -> Iterator[tuple[NDArray[np.int8], NDArray[np.float32]]]:
        """Yield codes [rows, in] and scales [rows, blocks], a few rows at a time."""
        first = (entry.offset - self.tensors[entry.name].offset) // entry.shape[1]
        codes, scales = self._map(entry), self._map(self._scales(entry))[first : first + entry.shape[0]]
        for rows in row_slices(codes.shape, 4):
            yield codes[rows], scales[rows].astype(np.float32)


def _as_grid(part: tuple[NDArray[np.int8], NDArray[np.float32]]) -> Coded:
    codes, scales = part
    return (codes.astype(np.int16) + _ZERO).astype(np.uint8), Grid(scales, np.full(scales.shape, _ZERO, np.uint8))
