"""Attention on CPUs equals its definition to the bit, and a text has the same bits however it is computed."""

from __future__ import annotations

import functools
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redraft.plugins.library import BUILD
from redraft.plugins.operators import OPERATORS_LIBRARY

from .attention import (
    ISAS,
    Attention,
    Call,
    Form,
    Parents,
    Refused,
    chain,
    literal,
    random_call,
    random_form,
    random_tree,
    reference,
    written,
)
from .builds import AVX2, CPU, ROOT, SANITIZERS, arm_tools, build_kernels, x86_compiler
from .products import Floats, check_equal

SOURCES = CPU / "attention"
PROGRAM = ROOT / "tests/plugins/attention_test.cpp"
COMMON = [PROGRAM, *(SOURCES / name for name in ("entries.cpp", "plan.cpp", "scalar.cpp"))]
LENGTHS = ((0, 1, 15, 16), (255, 256, 257, 600))
SIZES = ((1, 20, 8, 33), (9, 12, 14, 30))
"""Nodes of the sequences with these lengths. An odd number is a chain, an even one a tree."""
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window of blocks": {"window": 300},
    "chunk": {"chunk": 100},
    "window and chunk": {"window": 40, "chunk": 64},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "rotation": {"rotation": "half"},
    "interleaved": {"rotation": "interleaved"},
    "all": {"rotation": "half", "sinks": True, "softcap": 1.5, "window": 270, "scale": 0.3},
    "fp16": {"cache": np.float16},
    "all in fp16": {"rotation": "interleaved", "sinks": True, "softcap": 1.5, "window": 270, "cache": np.float16},
}
SHAPES = [((1, 1), 16), ((6, 2), 64), ((7, 1), 80), ((3, 1), 128), ((2, 2), 256), ((48, 1), 64)]
"""Heads and head sizes."""
TEXT = 600
TEXT_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"rotation": "interleaved", "sinks": True, "softcap": 3.0, "window": 310, "chunk": 400},
    "fp16": {"rotation": "half", "cache": np.float16},
}


def assert_right(attention: Attention, call: Call, tolerance: float = 4e-6) -> None:
    """Fail unless out is near to float64's, and the caches have the new rows and are otherwise as before."""
    out, *caches = attention.attend(call)
    expected = reference(call)
    assert np.abs(out - expected).max() < tolerance * np.abs(expected).max()
    for found, right in zip(caches, written(call), strict=True):
        assert found.tobytes() == right.tobytes()


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_against_float64(attention: Attention, heads: tuple[int, int], head_dim: int, features: dict[str, Any]) -> None:
    """Rows that no node sees are NaN: a result without NaN has not read them."""
    rng = np.random.default_rng(head_dim)
    form = random_form(rng, heads, head_dim, **features)
    for joined, lengths, sizes in zip((True, False), LENGTHS, SIZES, strict=True):
        trees = [chain(count) if count % 2 else random_tree(rng, count) for count in sizes]
        assert_right(attention, random_call(rng, form, lengths, trees, joined=joined))
    padded = [random_tree(rng, 11), chain(11), (-1, *(0,) * 10)]
    assert_right(attention, random_call(rng, form, (255, 3, 40), padded, padded=True, spare=0))


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_every_head_size_and_tile(used_attention: Attention, head_dim: int) -> None:
    """Chunks of a few tiles, the last one with any number of rows."""
    rng = np.random.default_rng(head_dim)
    form = random_form(rng, (head_dim // 16, 1), head_dim, rotation="half")
    trees = (random_tree(rng, 5 + head_dim // 16), chain(50 - head_dim // 8))
    call = random_call(rng, form, (250, 30), trees)
    assert_right(used_attention, call)


def test_trees_of_several_tiles(attention: Attention) -> None:
    """With 16 key heads threads do not share the blocks of a tile, with one they do."""
    rng = np.random.default_rng(0)
    for heads in ((16, 16), (1, 1)):
        trees = (random_tree(rng, 150), (), chain(70), random_tree(rng, 60))
        assert_right(attention, random_call(rng, random_form(rng, heads, 32), (230, 5, 600, 0), trees))


def test_scores_far_apart(attention: Attention) -> None:
    """One key above all others by a thousand, in any block, and large scores of both signs."""
    rng = np.random.default_rng(1)
    form = random_form(rng, (2, 1), 64, scale=1.0)
    for place in (0, 255, 256, 400, 599):
        call = random_call(rng, form, (600,), (chain(3),))
        call.key_cache[0, 0, place] = 30 * np.sign(call.rows[0, :64])
        assert_right(attention, call, 3e-4)
    assert_right(attention, random_call(rng, form, (300,), (random_tree(rng, 9),), magnitude=10), 3e-4)


@functools.cache
def _defined(features: str) -> tuple[Call, Floats]:
    """Return a call and its result by the header's arithmetic."""
    rng = np.random.default_rng(3)
    form = random_form(rng, (6, 2), 48, **FEATURES[features])
    call = random_call(rng, form, (1, 250, 509), (chain(1), random_tree(rng, 12), random_tree(rng, 6)))
    return call, literal(call)


@pytest.mark.parametrize("features", FEATURES)
def test_the_definition(used_attention: Attention, features: str) -> None:
    call, expected = _defined(features)
    check_equal(used_attention.attend(call)[0], expected)


@pytest.mark.parametrize("features", ["plain", "sinks", "softcap", "fp16"])
def test_rows_that_see_rows_after_them(used_attention: Attention, features: str) -> None:
    """Each has the bits of a last row with its query, which sees the same keys. A hidden place is as if it were not."""
    rng, count, hidden = np.random.default_rng(6), 9, 3
    form = random_form(rng, (6, 2), 32, **FEATURES[features])
    queries = slice(0, form.q_heads * form.head_dim)
    for past in (0, 251, 300):
        call = random_call(rng, form, (past,), (chain(count),))
        mask = np.ones((1, count, count), np.uint8)
        whole = used_attention.attend(call, tree_mask=mask)[0]
        mask[:, :, hidden] = 0
        partly = used_attention.attend(call, tree_mask=mask)[0]
        fewer = np.delete(call.rows, hidden, axis=0)
        for row in range(count - 1):  # the last row sees no row ahead
            for rows, out in ((call.rows.copy(), whole), (fewer.copy(), partly)):
                rows[-1, queries] = call.rows[row, queries]
                alone = used_attention.attend(replace(call, rows=rows, parents=(chain(len(rows)),)))[0]
                assert out[row].tobytes() == alone[-1].tobytes()


def test_subnormal_keys_and_values(used_attention: Attention) -> None:
    """Of fp16. A processor's setting for subnormal numbers does not matter."""
    rng = np.random.default_rng(11)
    form = random_form(rng, (6, 2), 48, scale=1e10, cache=np.float16)
    call = random_call(rng, form, (250,), (random_tree(rng, 12),), magnitude=1e-5)
    check_equal(used_attention.attend(call)[0], literal(call))


def test_every_number_in_fp16(used_attention: Attention) -> None:
    """Values as they are stored and read: all numbers in fp16, and those at and next to the middle of two of them."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = np.sort(halves[np.isfinite(halves)]).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    sides = [np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf)]
    ends = np.array([65519, 65520, 65521, 1e30, np.inf, 1e-30, 2.0**-25, 2.0**-149], np.float32)
    values = np.concatenate([halves, middles, *sides, ends, -ends])
    values = np.pad(values, (0, -values.size % 256)).reshape(-1, 256)
    form = Form(1, 1, 256, 1.0, cache=np.float16)
    shape = 1, 1, len(values), 256
    caches = [np.zeros(shape, np.float16) for _ in range(2)]
    rows = np.concatenate([np.ones((len(values), 512), np.float32), values], axis=1)
    out, _, stored = used_attention.attend(Call(form, rows, *caches, (0,), ((-1,) * len(values),)))
    expected = np.clip(values, -65504, 65504).astype(np.float16)
    assert stored.tobytes() == expected.tobytes()
    assert np.array_equal(out, expected.astype(np.float32))


@pytest.mark.parametrize("count", [1, 50])
def test_every_instruction_set_gives_the_same_bits(attention: Attention, count: int) -> None:
    rng, best, found = np.random.default_rng(4), attention.isa, []
    calls = [
        random_call(
            rng, random_form(rng, heads, head_dim, **features), (270, 600), (chain(count), random_tree(rng, count))
        )
        for heads, head_dim in SHAPES[1:5]
        for features in (FEATURES["all"], FEATURES["window and chunk"], FEATURES["all in fp16"])
    ]
    calls.append(random_call(rng, calls[0].form, (400,), (chain(count),), magnitude=20))
    for isa in attention.isas():
        attention.use(isa)
        found.append([attention.attend(call) for call in calls])
    attention.use(best)
    for others in found[1:]:
        for call, other in zip(found[0], others, strict=True):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(call, other, strict=True))


class Text:
    """Rows of a text, its results and its caches' rows when it is computed as one chunk."""

    def __init__(self, attention: Attention, **features: Any) -> None:
        self.rng = np.random.default_rng(5)
        self.attention, self.form = attention, random_form(self.rng, (6, 2), 32, **features)
        self.call = random_call(self.rng, self.form, (0,), (chain(TEXT),))
        self.out, *self.caches = attention.attend(self.call)

    def after(self, past: int, parents: Parents, rows: Floats) -> Call:
        """Return a call over nodes after the text's first tokens. Later rows of the caches are NaN."""
        capacity = past + len(parents) + int(self.rng.integers(0, 9))
        shape = 1, self.form.kv_heads, capacity, self.form.head_dim
        caches = [np.full(shape, np.nan, self.form.cache) for _ in range(2)]
        for cache, known in zip(caches, self.caches, strict=True):
            cache[:, :, :past] = known[:, :, :past]
        return Call(self.form, rows, caches[0], caches[1], (past,), (parents,))

    def check(self, result: tuple[Floats, Floats, Floats], past: int, places: list[int], sequence: int = 0) -> None:
        """Fail unless nodes at these places, out's first rows, are the text's next tokens."""
        tokens = slice(past, past + len(places))
        check_equal(result[0], self.out[tokens])
        for found, expected in zip(result[1:], self.caches, strict=True):
            check_equal(found[sequence][:, [past + place for place in places]], expected[0][:, tokens])


@pytest.fixture(params=[*TEXT_FORMS.values()], ids=[*TEXT_FORMS])
def text(request: pytest.FixtureRequest, attention: Attention) -> Text:
    return Text(attention, **request.param)


@pytest.mark.parametrize(
    "sizes", [(1,) * TEXT, (255, 1, 1, 255, 88), (7, 250, 24, 300, 19), (8,) * 75], ids=lambda sizes: str(sizes[:5])
)
def test_a_text_in_chunks(text: Text, sizes: tuple[int, ...]) -> None:
    past = 0
    for size in sizes:
        call = text.after(past, chain(size), text.call.rows[past : past + size])
        text.check(text.attention.attend(call), past, list(range(size)))
        past += size
    assert past == TEXT


def test_a_text_next_to_other_sequences(text: Text) -> None:
    for past, count in ((0, TEXT), (256, 1), (250, 40), (599, 1)):
        own = text.after(past, chain(count), text.call.rows[past : past + count])
        others = random_call(text.rng, text.form, (77, past, 0), (random_tree(text.rng, 13), chain(count), chain(9)))
        rows, tokens = others.rows.copy(), slice(13, 13 + count)
        rows[tokens] = own.rows
        for cache, known in zip((others.key_cache, others.value_cache), text.caches, strict=True):
            cache[1, :, :past] = known[0][:, :past]
        out, keys, values = text.attention.attend(replace(others, rows=rows))
        text.check((out[tokens], keys, values), past, list(range(count)), sequence=1)


@pytest.mark.parametrize(("past", "count"), [(0, TEXT), (560, 40), (250, 12), (256, 1), (511, 30)])
def test_a_text_as_a_branch(text: Text, past: int, count: int) -> None:
    """Other nodes follow any node before them, the text's too."""
    ours = [0, *sorted((1 + text.rng.permutation(2 * count)[: count - 1]).tolist())]
    size = ours[-1] + 1 + int(text.rng.integers(0, 5))
    parents = [int(text.rng.integers(0, place)) if place else -1 for place in range(size)]
    for place, parent in zip(ours[1:], ours, strict=False):
        parents[place] = parent
    rows = text.rng.standard_normal((size, text.form.width), np.float32)
    rows[ours] = text.call.rows[past : past + count]
    out, keys, values = text.attention.attend(text.after(past, tuple(parents), rows))
    text.check((out[ours], keys, values), past, ours)


@pytest.mark.parametrize("seed", range(6))
def test_every_node_of_a_tree_is_as_its_path_alone(text: Text, seed: int) -> None:
    rng, past = np.random.default_rng(seed), (0, 200, 250, 256, 500, 510)[seed]
    parents = random_tree(rng, 40)
    call = text.after(past, parents, rng.standard_normal((40, text.form.width), np.float32))
    out, *_ = text.attention.attend(call)
    for place, (_, path) in enumerate(call.nodes()):
        places = [row - past for row in path[past:]]
        alone = text.attention.attend(text.after(past, chain(len(places)), call.rows[places]))[0]
        check_equal(out[place], alone[-1])


def test_threads_do_not_share_state(attention: Attention) -> None:
    rng = np.random.default_rng(6)
    calls = [
        random_call(rng, random_form(rng, (4, 2), 64), (past, 300), (random_tree(rng, 20), chain(past % 7 + 1)))
        for past in range(0, 600, 20)
    ]
    expected = [attention.attend(call)[0] for call in calls]
    with ThreadPoolExecutor(4) as threads:
        for (out, _, _), one in zip(threads.map(attention.attend, calls), expected, strict=True):
            check_equal(out, one)


NANS = (0x7FC00000, 0x7FC00001, 0xFFFFFFFF)
"""NaNs, two of them with a payload."""


@pytest.mark.parametrize(
    "features",
    [{}, {"window": 30, "softcap": 2.0, "rotation": "half", "sinks": True}, {"cache": np.float16}],
    ids=["plain", "features", "fp16"],
)
@pytest.mark.parametrize("bits", NANS, ids=hex)
def test_nan_reaches_only_the_rows_that_see_it(used_attention: Attention, features: dict[str, Any], bits: int) -> None:
    """One number of a node's q or k, a node's v, or one of a committed row of a cache. Other rows keep every bit."""
    rng, nan = np.random.default_rng(7), np.uint32(bits).view(np.float32)
    form = random_form(rng, (4, 2), 32, **features)
    for tree in (chain(40), random_tree(rng, 40)):
        call = random_call(rng, form, (250, 260), (tree, chain(2)))
        before = used_attention.attend(call)[0]

        def check(changed: Call, see: list[int], before: Floats = before) -> None:
            expected = before.copy()
            expected[see] = np.nan
            check_equal(used_attention.attend(changed)[0], expected)

        for part, node in product("qkv", (0, 4, 20, 39)):
            rows = call.rows.copy()
            heads = form.split(rows)["qkv".index(part)][node].reshape(-1, 32)
            heads[:, slice(None) if part == "v" else 5] = nan
            check(replace(call, rows=rows), [node] if part == "q" else call.seers(0, 250 + node))
        for sequence, row in product((0, 1), (0, 230, 249)):
            keys, values = call.key_cache.copy(), call.value_cache.copy()
            keys[sequence, :, row, 3] = nan
            check(replace(call, key_cache=keys), call.seers(sequence, row))
            values[sequence, :, row] = nan
            check(replace(call, value_cache=values), call.seers(sequence, row))


def test_calls_without_nodes(attention: Attention) -> None:
    form = random_form(np.random.default_rng(8), (4, 2), 16)
    for lengths in ((), (3, 5)):
        keys, values = (np.zeros((len(lengths), 2, 8, 16), np.float32) for _ in range(2))
        call = Call(form, np.zeros((0, form.width), np.float32), keys, values, lengths, ((),) * len(lengths))
        out, *after = attention.attend(call)
        assert out.size == 0
        assert not any(cache.any() for cache in after)


REFUSALS: dict[str, list[dict[str, Any]]] = {
    "expected no negative size": [{name: -1} for name in ("sequences", "nodes", "rows", "capacity")],
    "q_heads: expected a multiple of kv_heads": [
        *({"q_heads": heads} for heads in (0, -4, 3)),
        *({"kv_heads": heads} for heads in (0, -2, 3)),
    ],
    "expected at most 48 query heads for a key head": [{"q_heads": 98}],
    "expected heads of a multiple of 16 numbers, up to 256": [{"head_dim": size} for size in (0, -16, 8, 24, 272)],
    "window and chunk: expected no negative number": [{"window": -1}, {"chunk": -1}],
    "expected a row for each place": [
        *({"rows": rows} for rows in (0, 5, 7)),
        {"rows": 0, "sequences": 2**32, "nodes": 2**32},
    ],
    "packed_rows: expected ascending places of the batch": [
        {"packed_rows": np.arange(6), "nodes": 0},
        *(
            {"packed_rows": np.array([*places, last])}
            for places, last in (
                ([0, 1, 2, 3, 4], 4),
                ([0, 2, 1, 3, 4], 5),
                ([-1, 0, 1, 2, 3], 4),
                ([0, 1, 2, 3, 4], 6),
                ([0, 1, 2, 3, 4], 2**62),
            )
        ),
    ],
    "cache_len: expected room for the nodes in the cache": [
        {"capacity": 7},
        {"cache_len": np.array([2, -1])},
        {"cache_len": np.array([2, 8])},
        {"cache_len": np.array([2, 2**62])},
    ],
    "positions: expected rows of the rotation's tables": [
        {"table_rows": 7},
        {"positions": np.array([2, 3, 3, 5, 6, -1])},
    ],
    "tree_mask: expected a node's ancestors to be as many as its depth": [
        {"tree_mask": np.eye(3, dtype=np.uint8)[[0, 1, 2] * 2]}
    ],
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(attention: Attention, message: str) -> None:
    """`attend` checks that nothing was written. In most calls, only the last sequence or node is wrong."""
    rng = np.random.default_rng(9)
    form = random_form(rng, (4, 2), 16, rotation="half", table_rows=8)
    call = random_call(rng, form, (2, 5), ((-1, 0, 0), chain(3)), padded=True, spare=0)
    attention.attend(call)
    for wrong in REFUSALS[message]:
        with pytest.raises(Refused, match=f"^{message}$"):
            attention.attend(call, **wrong)


def test_positions_outside_of_a_tree_see_what_the_nearest_of_them_do(attention: Attention) -> None:
    """A drafter's unused rows have such positions at the context's end. No other row may suffer from them."""
    rng = np.random.default_rng(10)
    call = random_call(rng, random_form(rng, (4, 2), 16), (2, 5), (chain(3), chain(3)), padded=True, spare=0)
    usual, *_ = attention.attend(call)
    for outside, nearest in ((9, 7), (2**62, 7), (4, 5), (-(2**62), 5)):
        found, expected = (
            attention.attend(call, positions=np.array([2, 3, 4, 5, 6, position]))[0] for position in (outside, nearest)
        )
        assert found.tobytes() == expected.tobytes()
        assert found[:5].tobytes() == usual[:5].tobytes()


def test_unknown_instruction_sets_are_refused(attention: Attention) -> None:
    before = attention.isa
    assert before in ISAS
    assert not attention.use("sse9")
    assert attention.isa == before


@pytest.fixture(scope="module")
def expected_hash(attention: Attention, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the program's calls with the library of `make operators`."""
    program = tmp_path_factory.mktemp("hash") / "test"
    build_kernels(program, x86_compiler(), [PROGRAM, BUILD / OPERATORS_LIBRARY], {}, link=[f"-Wl,-rpath,{BUILD}"])
    return _hashes(program)["scalar"]


def _hashes(*command: str | Path) -> dict[str, str]:
    """Return the hash of the program's calls by each instruction set."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr[-4000:]
    return dict(line.split() for line in done.stdout.splitlines())


def test_kernels_of_arm(expected_hash: str, tmp_path: Path) -> None:
    """Under an emulator of the processor: the bits of this CPU."""
    compiler, emulator = arm_tools()
    isas = {SOURCES / "neon.cpp": ["-march=armv8-a"]}
    build_kernels(tmp_path / "test", compiler, COMMON, isas, link=["-static"])
    assert _hashes(emulator, tmp_path / "test") == {"neon": expected_hash, "scalar": expected_hash}


@pytest.mark.slow
def test_sanitizers_find_nothing(expected_hash: str, tmp_path: Path) -> None:
    """Addresses and undefined behavior of every kernel. That of AVX-512 has its instruction emulated."""
    isas = {SOURCES / "avx512.cpp": ["-DREDRAFT_EMULATED", "-Wno-psabi", *AVX2], SOURCES / "avx2.cpp": AVX2}
    build_kernels(tmp_path / "test", x86_compiler(), COMMON, isas, flags=[*SANITIZERS, "-O0"])
    assert _hashes(tmp_path / "test") == {"avx512": expected_hash, "avx2": expected_hash, "scalar": expected_hash}
