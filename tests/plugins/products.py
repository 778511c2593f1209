"""The products with quantized weights in Python, their reference in NumPy, and checks of one against the other.

python -m tests.plugins.products LIBRARY                    # checks every instruction set that it has here
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ISAS = ("amx", "avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dot", "scalar")
BLOCKS = (16, 32, 64, 128, 256)
ABI = 2
_LINE = 64
_LIBC = ctypes.CDLL(None)
_int64, _pointer = ctypes.c_int64, ctypes.c_void_p

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class _Matrix(ctypes.Structure):
    """`redraft_block_matrix`."""

    _fields_ = (
        *((name, _int64) for name in ("n", "k")),
        *((name, ctypes.c_int32) for name in ("bits", "block")),
        *((name, _pointer) for name in ("codes", "scales", "zero_points")),
    )


@dataclass(frozen=True)
class BlockMatrix:
    """Weights of n outputs and k inputs: codes [n, blocks, block], scales and zero points [n, blocks]."""

    k: int
    bits: int
    codes: Bytes
    scales: Floats
    zero_points: Bytes | None

    @classmethod
    def random(
        cls, rng: np.random.Generator, n: int, k: int, bits: int, block: int, zero_points: bool = True
    ) -> BlockMatrix:
        blocks = -(-k // block)
        codes = rng.integers(0, 1 << bits, (n, blocks, block), np.uint8)
        zeros = rng.integers(0, 1 << bits, (n, blocks), np.uint8) if zero_points else None
        return cls(k, bits, codes, rng.standard_normal((n, blocks), np.float32), zeros)

    def stored(self) -> tuple[Bytes, Floats, Bytes | None]:
        """Return the arrays that MatMulNBits takes."""
        zeros = None if self.zero_points is None else _joined(self.zero_points, self.bits)
        return _joined(self.codes, self.bits), self.scales, zeros


def _joined(codes: Bytes, bits: int) -> Bytes:
    """Join pairs of codes of 4 bits, the first in the low bits."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)


class Products:
    """The C entries of a library."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name in ("packed_bytes", "scratch_bytes", "tiles"):
            getattr(self.library, f"redraft_products_{name}").restype = _int64
        self.library.redraft_products_isa.restype = ctypes.c_char_p
        assert self.library.redraft_products_abi() == ABI

    @property
    def isa(self) -> str:
        found: bytes = self.library.redraft_products_isa()
        return found.decode()

    def use(self, isa: str) -> bool:
        """Choose an instruction set; False if it is not there."""
        return bool(self.library.redraft_products_use(isa.encode()) == 0)

    def isas(self) -> list[str]:
        """Return the instruction sets of this library and CPU, the best first."""
        before = self.isa
        found = [isa for isa in ISAS if self.use(isa)]
        self.use(before)
        return found

    def pack(self, matrix: BlockMatrix) -> Packed | None:
        """Return the packed form, or None if the matrix is refused."""
        codes, scales, zeros = matrix.stored()
        n, _, block = matrix.codes.shape
        pointers = (None if array is None else array.ctypes.data for array in (codes, scales, zeros))
        given = ctypes.byref(_Matrix(n, matrix.k, matrix.bits, block, *pointers))
        size = self.library.redraft_products_packed_bytes(given)
        assert size % _LINE == 0
        memory = aligned(size)
        if self.library.redraft_products_pack(given, _address(memory)):
            assert size == 0
            return None
        return Packed(self.library, memory, n, matrix.k)


class Packed:
    """A packed matrix."""

    def __init__(self, library: ctypes.CDLL, memory: Bytes, n: int, k: int) -> None:
        self.library, self.memory, self.n, self.k = library, memory, n, k
        self.tiles: int = library.redraft_products_tiles(_address(memory))

    def scratch(self, rows: int) -> Bytes:
        return aligned(self.library.redraft_products_scratch_bytes(_address(self.memory), _int64(rows)))

    def quantize(self, x: Floats, first: int, last: int, scratch: Bytes) -> None:
        rows = tuple(map(_int64, (len(x), first, last)))
        self.library.redraft_products_quantize(_address(self.memory), _address(x), *rows, _address(scratch))

    def multiply(self, scratch: Bytes, bias: Floats | None, y: Floats, first: int, last: int) -> None:
        given = (_address(self.memory), _address(scratch), _int64(len(y)), _address(bias), _address(y))
        self.library.redraft_products_multiply(*given, _int64(first), _int64(last))

    def product(self, x: Floats, bias: Floats | None = None) -> Floats:
        """Return the product with x [rows, k]."""
        scratch, y = self.scratch(len(x)), np.full((len(x), self.n), np.nan, np.float32)
        self.quantize(x, 0, len(x), scratch)
        self.multiply(scratch, bias, y, 0, self.tiles)
        return y


def aligned(size: int) -> Bytes:
    """Return `size` bytes at a multiple of 64, and no byte more, so that a sanitizer finds accesses past them."""
    address = _pointer()
    assert _LIBC.posix_memalign(ctypes.byref(address), ctypes.c_size_t(_LINE), ctypes.c_size_t(size)) == 0
    memory = (ctypes.c_uint8 * size).from_address(address.value or 0)
    weakref.finalize(memory, _LIBC.free, address)
    found: Bytes = np.frombuffer(memoryview(memory), np.uint8)
    found[:] = 0xA5
    return found


def _address(array: NDArray[np.generic] | None) -> ctypes.c_void_p:
    return _pointer(None if array is None else array.ctypes.data)


def reference(matrix: BlockMatrix, x: Floats, bias: Floats | None = None) -> Floats:
    """Return the product with x [rows, k] as products.h defines it."""
    n, blocks, block = matrix.codes.shape
    padded = np.pad(x, ((0, 0), (0, blocks * block - matrix.k))).reshape(len(x), blocks, block)
    zeros: int | NDArray[np.float64] = 1 << (matrix.bits - 1)
    if matrix.zero_points is not None:
        zeros = matrix.zero_points[:, :, None].astype(np.float64)
    weights = matrix.codes.astype(np.float64) - zeros
    y = np.zeros((len(x), n), np.float32)
    with np.errstate(all="ignore"):
        for number in range(blocks):
            values = padded[:, number]
            scale = np.abs(values).max(axis=1) / np.float32(127)  # [rows]
            scale[~np.isfinite(scale)] = np.nan
            q = np.rint(values / np.where(scale > 0, scale, np.float32(1))[:, None])
            q = np.clip(np.nan_to_num(q), -127, 127).astype(np.float64)
            sums = q @ weights[:, number].T  # exact: integers below 2^24
            scales = scale[:, None] * matrix.scales[None, :, number]
            y = _fused(scales.astype(np.float64) * sums, y)
        return y if bias is None else y + bias


def _fused(products: NDArray[np.float64], y: Floats) -> Floats:
    """Return products + y, rounded once: `products` has at most 48 bits, so is exact.

    The sum in double is made odd if it is not exact, so that rounding it to fp32 is as rounding the exact sum.
    """
    wide = y.astype(np.float64)
    total = products + wide
    rest = total - products
    error = (products - (total - rest)) + (wide - rest)
    bits = total.view(np.int64)
    even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    odd: NDArray[np.int64] = np.where(even, bits + towards, bits)
    return odd.view(np.float64).astype(np.float32)


def check_equal(found: Floats, expected: Floats) -> None:
    """Compare to the bit, NaN with any NaN."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    there, bits = ~np.isnan(expected), f"u{expected.itemsize}"
    np.testing.assert_array_equal(found.view(bits)[there], expected.view(bits)[there])


def check_rows(products: Products, bits: int, block: int, counts: Sequence[int], n: int = 37) -> None:
    """Compare batches of `counts` rows: a row has the same outputs in each."""
    rng = np.random.default_rng(block + bits)
    for zero_points, k in ((True, 2 * block + 7), (False, 3 * block)):
        matrix = BlockMatrix.random(rng, n, k, bits, block, zero_points)
        x, bias = rng.standard_normal((max(counts), k), np.float32), rng.standard_normal(n, np.float32)
        packed, expected = products.pack(matrix), reference(matrix, x, bias)
        assert packed is not None
        for count in counts:
            check_equal(packed.product(x[:count].copy(), bias), expected[:count])
            check_equal(packed.product(x[-1:].copy(), bias), expected[-1:])


def check_splits(products: Products, bits: int) -> None:
    """Quantize rows in parts and multiply tiles in parts, in any order; no part writes columns of another."""
    rng = np.random.default_rng(bits)
    matrix = BlockMatrix.random(rng, 75, 96, bits, 32)
    packed = products.pack(matrix)
    assert packed is not None
    for rows in (1, 7, 13, 40):
        x = rng.standard_normal((rows, 96), np.float32)
        expected, scratch = reference(matrix, x), packed.scratch(rows)
        for first, last in _parts(rng, rows):
            packed.quantize(x, first, last, scratch)
        y = np.full((rows, 75), 3, np.float32)
        for first, last in _parts(rng, packed.tiles):
            before, columns = y.copy(), slice(16 * first, 16 * last)
            packed.multiply(scratch, None, y, first, last)
            check_equal(y[:, columns], expected[:, columns])
            before[:, columns] = y[:, columns]
            check_equal(y, before)


def _parts(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    cuts = sorted({0, count, *rng.integers(0, count + 1, 3).tolist()})
    parts = list(pairwise(cuts))
    return [parts[number] for number in rng.permutation(len(parts))]


def extremes(bits: int) -> Iterator[tuple[BlockMatrix, Floats]]:
    """Yield matrices and inputs of extreme values. Every kind of row is next to ordinary ones."""
    rng, most = np.random.default_rng(bits), np.float32(np.finfo(np.float32).max)
    kinds = (0.0, -0.0, most, -most, np.inf, -np.inf, np.nan, 1e-45, 1e-40, 3e-38, 1e30)
    for block in (16, 256):
        k, n = 2 * block + 1, 17
        rows = [rng.standard_normal(k, np.float32) for _ in range(4)]
        for kind in kinds:
            for places in (slice(None), slice(1), slice(k - 1, k), slice(block // 2, block + 2)):
                rows.append(rng.standard_normal(k, np.float32))
                rows[-1][places] = kind
        rows += [np.where(rng.integers(0, 2, k), most, -most).astype(np.float32)]
        rows += [np.arange(k, dtype=np.float32) * np.float32(1e-45), np.full(k, 0.5, np.float32)]
        rows += [(np.arange(k) % 255 - 127 + 0.5).astype(np.float32)]  # ties
        x = np.stack(rows)
        for code, zero in ((0, 0), (0, None), (0, -1), (-1, 0), (-1, None), (-1, -1)):
            matrix = BlockMatrix.random(rng, n, k, bits, block, zero is not None)
            matrix.codes[:] = code % (1 << bits)
            if zero is not None and matrix.zero_points is not None:
                matrix.zero_points[:] = zero % (1 << bits)
            matrix.scales[1] = (0, 1e-45, most)
            matrix.scales[2:5] = np.array([np.inf, np.nan, -0.0], np.float32)[:, None]
            yield matrix, x


def check_extremes(products: Products, bits: int) -> None:
    for matrix, x in extremes(bits):
        packed = products.pack(matrix)
        assert packed is not None
        check_equal(packed.product(x), reference(matrix, x))


def check_all(products: Products, counts: Sequence[int]) -> None:
    """Run every check with the instruction set in use."""
    for bits in (4, 8):
        for block in BLOCKS:
            check_rows(products, bits, block, counts)
        check_splits(products, bits)
        check_extremes(products, bits)


if __name__ == "__main__":
    tested = Products(Path(sys.argv[1]))
    for name in tested.isas():
        tested.use(name)
        check_all(tested, (*range(1, 15), 40))
        print(name)
