"""The attention of CPUs in Python: its C entries, random calls, and their answers in NumPy.

`reference` is float64 over each node's path. `literal` computes attention.h's arithmetic, to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .products import Floats, _fused

ISAS = ("avx512", "avx2", "neon", "scalar")
ABI = 4
BLOCK, LANES = 256, 16
GUARD = 64
"""NaNs before and after each array that a call writes."""
_int64, _pointer, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_SIZES = ("sequences", "nodes", "rows", "capacity", "q_heads", "kv_heads", "head_dim", "window", "chunk")

Parents = tuple[int, ...]


class _Call(ctypes.Structure):
    """`redraft_attention_call`."""

    _fields_ = (
        *((name, _int64) for name in _SIZES),
        *((name, _float) for name in ("scale", "softcap")),
        *((name, _pointer) for name in ("q", "k", "v")),
        *((name, _int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, _pointer) for name in ("key_cache", "value_cache")),
        ("half", _int64),
        *((name, _pointer) for name in ("tree_mask", "positions", "cache_len")),
        *((name, _pointer) for name in ("packed_rows", "sinks", "cosines", "sines")),
        *((name, _int64) for name in ("table_rows", "interleaved")),
        ("out", _pointer),
    )


@dataclass(frozen=True, eq=False)
class Form:
    """The attributes of a model's attention. sinks: [Hq]. cosines, sines: [table rows, D / 2]. cache: its type."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    chunk: int = 0
    sinks: Floats | None = None
    cosines: Floats | None = None
    sines: Floats | None = None
    interleaved: bool = False
    cache: type[np.floating[Any]] = np.float32

    @property
    def width(self) -> int:
        """Return the numbers of a row: q, k and v."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    def begin(self, position: int) -> int:
        """Return the first position that a node at a position sees."""
        first = max(0, position - self.window + 1) if self.window else 0
        return max(first, position // self.chunk * self.chunk) if self.chunk else first

    def split(self, rows: Floats) -> list[Floats]:
        """Return the views q [N, Hq * D], k and v [N, Hkv * D] of rows [N, width]."""
        ends = (self.q_heads * self.head_dim, (self.q_heads + self.kv_heads) * self.head_dim)
        return np.split(rows, ends, axis=1)


def random_form(
    rng: np.random.Generator, heads: tuple[int, int], head_dim: int, *, sinks: bool = False, rotation: str = "",
    table_rows: int = 700, **options: Any,
) -> Form:  # fmt: skip
    """Return a form. rotation: "half" or "interleaved", else none."""
    given: dict[str, Any] = {"scale": head_dim**-0.5} | options
    if sinks:
        given["sinks"] = rng.normal(0, 2, heads[0]).astype(np.float32)
    if rotation:
        angles = rng.uniform(-np.pi, np.pi, (table_rows, head_dim // 2))
        given |= {"cosines": np.cos(angles).astype(np.float32), "sines": np.sin(angles).astype(np.float32)}
    return Form(*heads, head_dim, interleaved=rotation == "interleaved", **given)


@dataclass(frozen=True, eq=False)
class Call:
    """Nodes of several sequences, in order.

    rows: [N, width], the nodes' q, k and v.   key_cache, value_cache: [B, Hkv, C, D].
    parents: of each sequence's nodes, -1 for none.   padded: no packed_rows.   joined: passes `rows` by strides.
    """

    form: Form
    rows: Floats
    key_cache: Floats
    value_cache: Floats
    cache_len: tuple[int, ...]
    parents: tuple[Parents, ...]
    padded: bool = False
    joined: bool = True

    def nodes(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each node's sequence and the cache rows of all its path, in order of position."""
        for sequence, (past, parents) in enumerate(zip(self.cache_len, self.parents, strict=True)):
            paths: list[list[int]] = []
            for place, parent in enumerate(parents):
                paths.append([*(range(past) if parent < 0 else paths[parent]), past + place])
                yield sequence, paths[-1]

    def seers(self, sequence: int, row: int) -> list[int]:
        """Return the nodes that see a row of a sequence's cache."""
        nodes = enumerate(self.nodes())
        return [
            node for node, (own, path) in nodes if own == sequence and row in path[self.form.begin(len(path) - 1) :]
        ]


def random_call(
    rng: np.random.Generator, form: Form, cache_len: Sequence[int], parents: Sequence[Parents], *, spare: int = 3,
    magnitude: float = 1.0, padded: bool = False, joined: bool = True,
) -> Call:  # fmt: skip
    """Return a call. Rows of the caches are NaN from `cache_len` on."""
    capacity = max(past + len(each) for past, each in zip(cache_len, parents, strict=True)) + spare
    shape = len(cache_len), form.kv_heads, capacity, form.head_dim
    caches = [(magnitude * rng.standard_normal(shape, np.float32)).astype(form.cache) for _ in range(2)]
    for cache in caches:
        for sequence, past in enumerate(cache_len):
            cache[sequence, :, past:] = np.nan
    rows = magnitude * rng.standard_normal((sum(map(len, parents)), form.width), np.float32)
    keys, values = caches
    return Call(form, rows, keys, values, tuple(cache_len), tuple(parents), padded, joined)


def chain(count: int) -> Parents:
    return tuple(range(-1, count - 1))


def random_tree(rng: np.random.Generator, count: int) -> Parents:
    """Return parents of which some are none, and some the node before."""
    return tuple(place - 1 if rng.random() < 0.4 else int(rng.integers(-1, place)) for place in range(count))


class _Gate(ctypes.Structure):
    """`redraft_gate_call`."""

    _fields_ = (("n", _int64), *((name, _pointer) for name in ("x", "factors", "y")))


class Refused(Exception):
    """What the library finds wrong with a call."""


class Attention:
    """The C entries of a library."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name in ("redraft_attention", "redraft_attention_isa"):
            getattr(self.library, name).restype = ctypes.c_char_p
        assert self.library.redraft_attention_abi() == ABI

    @property
    def isa(self) -> str:
        found: bytes = self.library.redraft_attention_isa()
        return found.decode()

    def use(self, isa: str) -> bool:
        """Choose an instruction set; False if it is not there."""
        return bool(self.library.redraft_attention_use(isa.encode()) == 0)

    def isas(self) -> list[str]:
        """Return the instruction sets of this library and CPU, the best first."""
        before = self.isa
        found = [isa for isa in ISAS if self.use(isa)]
        self.use(before)
        return found

    def attend(self, call: Call, **wrong: Any) -> tuple[Floats, Floats, Floats]:
        """Return out [N, Hq * D] and the caches afterwards. wrong: fields of the C call in place of their values.

        Raises Refused, after a check that nothing was written. Fails if a call wrote past an array's end.
        """
        form = call.form
        before = (np.full((len(call.rows), form.q_heads * form.head_dim), np.nan, np.float32),)
        arrays = [_guarded(array) for array in (*before, call.key_cache, call.value_cache)]
        names = ("out", "key_cache", "value_cache")
        given = _fields(call) | {name: array for name, (array, _) in zip(names, arrays, strict=True)} | wrong
        values = {name: _address(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
        message = self.library.redraft_attention(ctypes.byref(_Call(**values)))
        for _, guards in arrays:
            assert all(np.isnan(guard).all() for guard in guards)
        out, keys, values_after = (array for array, _ in arrays)
        if message is not None:
            for array, old in zip((out, keys, values_after), (*before, call.key_cache, call.value_cache), strict=True):
                assert array.tobytes() == old.tobytes()
            raise Refused(message.decode())
        return out, keys, values_after

    def gate(self, x: Floats, factors: Floats | None = None) -> Floats:
        """Return the gated rows [N, n] of x [N, 2 n]. Fails if the call wrote past their end."""
        rows, n = len(x), x.shape[1] // 2
        y, guards = _guarded(np.full((rows, n), np.nan, np.float32))
        given = _Gate(n, _address(x), None if factors is None else _address(factors), _address(y))
        self.library.redraft_gate(ctypes.byref(given), _int64(0), _int64(rows))
        assert all(np.isnan(guard).all() for guard in guards)
        return y


def _fields(call: Call) -> dict[str, Any]:
    form, most = call.form, max(map(len, call.parents), default=0)
    batch, _, capacity, _ = call.key_cache.shape
    mask = np.zeros((batch, most, most), np.uint8)
    positions, places = [], []
    at = [(sequence, place) for sequence, each in enumerate(call.parents) for place in range(len(each))]
    for (sequence, place), (_, path) in zip(at, call.nodes(), strict=True):
        past = call.cache_len[sequence]
        mask[sequence, place, [row - past for row in path[past:]]] = 1
        positions.append(len(path) - 1)
        places.append(sequence * most + place)
    parts = form.split(call.rows)
    if not call.joined:
        parts = [np.ascontiguousarray(part) for part in parts]
    strides = {f"{name}_stride": part.strides[0] // 4 for name, part in zip("qkv", parts, strict=True)}
    return strides | {
        "sequences": batch, "nodes": most, "rows": len(call.rows), "capacity": capacity,
        "half": int(form.cache is np.float16),
        "q_heads": form.q_heads, "kv_heads": form.kv_heads, "head_dim": form.head_dim, "window": form.window,
        "chunk": form.chunk, "scale": form.scale, "softcap": form.softcap, "q": parts[0], "k": parts[1], "v": parts[2],
        "tree_mask": mask, "positions": np.array(positions, np.int64), "cache_len": np.array(call.cache_len, np.int64),
        "packed_rows": None if call.padded else np.array(places, np.int64), "sinks": form.sinks,
        "cosines": form.cosines, "sines": form.sines, "interleaved": int(form.interleaved),
        "table_rows": 0 if form.cosines is None else len(form.cosines),
    }  # fmt: skip


def _guarded(array: Floats) -> tuple[Floats, tuple[Floats, Floats]]:
    """Return a copy in the middle of NaNs, and these."""
    whole = np.full(array.size + 2 * GUARD, np.nan, array.dtype)
    inner = whole[GUARD : GUARD + array.size].reshape(array.shape)
    inner[...] = array
    return inner, (whole[:GUARD], whole[GUARD + array.size :])


def _address(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def rotated(form: Form, x: Floats, position: int) -> Floats:
    """Return heads x [H, D] at a position, rounded as attention.h does."""
    if form.cosines is None or form.sines is None:
        return x
    pairs = (x[:, ::2], x[:, 1::2]) if form.interleaved else np.split(x, 2, axis=1)
    (a, b), cos, sin = pairs, form.cosines[position], form.sines[position]
    with np.errstate(invalid="ignore"):
        turned = _fma(a, cos, -(b * sin)), _fma(a, sin, b * cos)
    return np.stack(turned, axis=2).reshape(x.shape) if form.interleaved else np.concatenate(turned, axis=1)


def written(call: Call) -> tuple[Floats, Floats]:
    """Return the caches with the new rows."""
    form, keys, values = call.form, call.key_cache.copy(), call.value_cache.copy()
    _, new_keys, new_values = (part.reshape(len(part), -1, form.head_dim) for part in form.split(call.rows))
    for row, (sequence, path) in enumerate(call.nodes()):
        keys[sequence, :, path[-1]] = rotated(form, new_keys[row], len(path) - 1)
        values[sequence, :, path[-1]] = new_values[row]
    return keys, values


def _seen(call: Call) -> Iterator[tuple[Floats, Floats, Floats, int]]:
    """Yield each node's rotated q [Hkv, G, D], the keys and values [Hkv, P, D] that it sees, and the first position."""
    form, (keys, values) = call.form, written(call)
    heads = form.split(call.rows)[0].reshape(-1, form.q_heads, form.head_dim)
    for q, (sequence, path) in zip(heads, call.nodes(), strict=True):
        own = len(path) - 1
        begin = form.begin(own)
        turned = rotated(form, q, own).reshape(form.kv_heads, -1, form.head_dim)
        yield turned, keys[sequence][:, path[begin:]], values[sequence][:, path[begin:]], begin


def reference(call: Call) -> NDArray[np.float64]:
    """Return out [N, Hq * D] in float64."""
    form, found = call.form, []
    for q, keys, values, _ in _seen(call):
        scores = np.einsum("hgd,hpd->hgp", q.astype(np.float64), keys.astype(np.float64)) * np.float32(form.scale)
        if form.softcap:
            scores = form.softcap * np.tanh(scores / form.softcap)
        most = scores.max(axis=2, keepdims=True)
        weights = np.exp(scores - most)
        total = weights.sum(axis=2, keepdims=True)
        if form.sinks is not None:
            total += np.exp(form.sinks.reshape(most.shape) - most)
        found.append(np.einsum("hgp,hpd->hgd", weights / total, values.astype(np.float64)).ravel())
    return np.stack(found)


def literal(call: Call) -> Floats:
    """Return out [N, Hq * D] in float32, in the order of attention.h."""
    form, found = call.form, []
    for q, keys, values, begin in _seen(call):
        q = q * np.float32(form.scale)
        scores = np.zeros((*q.shape[:2], keys.shape[1]), np.float32)
        for i in range(form.head_dim):
            scores = _fma(q[:, :, i, None], keys[:, None, :, i], scores)
        if form.softcap:
            scores = _capped(scores, np.float32(form.softcap))
        state = None
        for start in range(begin // BLOCK * BLOCK, begin + keys.shape[1], BLOCK):
            columns = slice(max(start - begin, 0), start + BLOCK - begin)
            block = _block(scores[:, :, columns], values[:, columns], max(begin - start, 0))
            state = block if state is None else _joined(state, block)
        assert state is not None
        if form.sinks is not None:
            sinks = form.sinks.reshape(form.kv_heads, -1, 1)
            state = _joined(state, (sinks, np.ones_like(sinks), np.zeros_like(state[2])))
        _, total, out = state
        found.append((out * (np.float32(1) / total)).ravel())
    return np.stack(found)


_State = tuple[Floats, Floats, Floats]
"""m and l [Hkv, G, 1], and o [Hkv, G, D]."""


def _block(scores: Floats, values: Floats, skipped: int) -> _State:
    """Return the sums of a block. skipped: positions of it before the first of `scores`."""
    most = scores.max(axis=2, keepdims=True)
    p = _exp(scores - most)
    lanes = np.zeros((*p.shape[:2], BLOCK), np.float32)
    lanes[:, :, skipped : skipped + p.shape[2]] = p
    sums = np.zeros((*p.shape[:2], LANES), np.float32)
    for at in range(0, BLOCK, LANES):
        sums = sums + lanes[:, :, at : at + LANES]
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[:, :, :half] + sums[:, :, half:]
    out = np.zeros((*p.shape[:2], values.shape[2]), np.float32)
    for at in range(p.shape[2]):
        out = _fma(p[:, :, at, None], values[:, None, at], out)
    return most, sums, out


def _joined(old: _State, new: _State) -> _State:
    most = np.maximum(old[0], new[0])
    before, now = _exp(old[0] - most), _exp(new[0] - most)
    return most, _fma(old[1], before, new[1] * now), _fma(old[2], before, new[2] * now)


def _capped(scores: Floats, cap: np.float32) -> Floats:
    x = scores / cap
    e = _exp(np.float32(-2) * np.abs(x))
    capped: Floats = cap * np.copysign((np.float32(1) - e) / (np.float32(1) + e), x)
    return capped


def _exp(x: Floats) -> Floats:
    """Cephes' expf by fma, of x <= 0; exp(-86) below -86."""
    x = np.maximum(np.float32(-86), x)
    n = _fma(x, 1.44269504088896341, 12582912) - np.float32(12582912)  # 1.5 * 2^23: rounds to an integer
    r = _fma(n, 2.12194440e-4, _fma(n, -0.693359375, x))
    y = _fma(r, 1.9875691500e-4, 1.3981999507e-3)
    for factor in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = _fma(y, r, factor)
    y = _fma(y, r * r, r) + np.float32(1)
    found: Floats = np.ldexp(y, n.astype(np.int32))
    return found


def literal_gate(x: Floats, factors: Floats | None = None) -> Floats:
    """Return what gate.h defines for x [N, 2 n]."""
    g, u = np.split(x, 2, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        one, e = np.float32(1), _exp(-np.abs(g))
        y = g * (np.where(g < 0, e, one) / (one + e)) * u
        return np.where(np.isnan(g), np.float32(np.nan), y if factors is None else y * factors)


def _fma(a: Floats | float, b: Floats | float, c: Floats | float) -> Floats:
    """Return a * b + c in float32, rounded once."""
    x, y, z = (np.asarray(value, np.float32) for value in (a, b, c))
    products = x.astype(np.float64) * y.astype(np.float64)  # exact
    found: Floats = _fused(products, np.broadcast_to(z, products.shape))
    return found
