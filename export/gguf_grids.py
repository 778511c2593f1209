"""Codes, scales and zero points of GGUF's types without a minimum. Their numbers are codes times a scale."""

from __future__ import annotations

from collections.abc import Mapping

import gguf
import numpy as np
from numpy.typing import NDArray

from redraft.config import Precision
from redraft.export.gguf_file import PLAIN_TYPES
from redraft.export.gguf_names import Parameter
from redraft.export.quantize import Grid
from redraft.export.stored_grids import Coded

ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32}
"""The code of the number zero."""
BITS = {"Q4_0": 4}
"""Bits that the codes need; 8 for other types."""
BLOCKS = {"Q6_K": 16}
"""Numbers that share a scale; 32 for other types."""
VOCABULARY = ("token_embd.weight", "output.weight")
"""Tensors that keep 8 bits in every precision."""
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)


def decode(packed: NDArray[np.uint8], kind: str) -> Coded:
    """Return codes [rows, columns] and grids of uint8 [rows, bytes]. The library unpacks blocks of scale one."""
    number = gguf.GGMLQuantizationType[kind]
    blocks = packed.reshape(-1, gguf.GGML_QUANT_SIZES[number][1]).copy()
    scale = blocks[:, 208:210] if kind == "Q6_K" else blocks[:, :2]
    scales = np.ascontiguousarray(scale).view(np.float16).astype(np.float32)
    scale[:] = _ONE
    if kind == "Q6_K":  # 16 scales of one byte, times the block's scale
        scales = scales * blocks[:, 192:208].view(np.int8).astype(np.float32)
        blocks[:, 192:208] = 1
    values = gguf.dequantize(blocks.reshape(packed.shape), number) + ZEROS[kind]
    scales = scales.reshape(len(packed), -1)
    return values.astype(np.uint8).reshape(len(packed), -1), Grid(scales, np.full(scales.shape, ZEROS[kind], np.uint8))


def inexact_at_4_bits(parameters: Mapping[str, Parameter], precision: Precision) -> tuple[str, ...]:
    """Return a warning for int4 if quantized tensors have types that 4 bits with integer zero points cannot hold."""
    if precision != "int4":
        return ()
    of_products = [p for p in parameters.values() if len(p.shape) > 1 and p.source not in VOCABULARY]
    types = sorted({p.stored.type for p in of_products} - {*PLAIN_TYPES, *BITS})
    if not types:
        return ()
    return (f"int4 rounds the file's {', '.join(types)} weights a second time; --precision int8 loses less",)
