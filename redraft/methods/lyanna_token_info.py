"""Rows of Lyanna's token information, in NumPy (`redraft.methods.lyanna.token_info_tables` has the tables)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from redraft import names
from redraft.methods.lyanna import TOKEN_INFO_INDEX
from redraft.types import FloatArray


def lookup(tables: Mapping[str, Any], token: int) -> FloatArray:
    """Return the numbers that `token` adds to all logits, [H]."""
    values = {name: table for name, table in tables.items() if name.startswith(names.TOKEN_INFO)}
    index = values.pop(TOKEN_INFO_INDEX, None)
    return token_info(list(values.values()), token if index is None else int(index[token]))


def token_info(tables: Sequence[Any], row: int) -> FloatArray:
    """Return a row of token information, [H], from tables without the index."""
    tables = [np.asarray(table) for table in tables]
    values = tables[0][row]
    if len(tables) == 2 and tables[1].shape[1] > 1:
        values = values @ tables[1]
    elif len(tables) == 2:
        values = (FP8[values] if values.dtype == np.uint8 else values.astype(np.float32)) * tables[1][row]
    added: FloatArray = values.astype(np.float32)
    return added


def _fp8_values() -> FloatArray:
    """Return the numbers of the 256 codes of float8 E4M3 without infinities; the two codes of NaN are 0."""
    codes = np.arange(128)
    exponents, digits = codes >> 3, codes & 7
    sizes = np.where(exponents, (8 + digits) * 2.0 ** (exponents - 10), digits * 2.0**-9)
    sizes[127] = 0
    return np.concatenate([sizes, -sizes]).astype(np.float32)


FP8 = _fp8_values()
"""The number of each byte of a float8 table."""
