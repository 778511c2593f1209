"""Prompts in any slot, and least rows of a call: on the host, and on step graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from redraft import names
from redraft.cgroups import read_text
from redraft.engines import host_device, open_bundle
from redraft.engines.device import Buffer, slots_of
from redraft.engines.host_device import HostBuffer
from redraft.lru import LruCache
from redraft.runtime import Runtime, SpeculationParams
from redraft.runtime.drafters import engine
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.steps import graph_steps
from redraft.runtime.steps.graph_steps import GraphSteps
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.tree import chain, make_tree, root_only
from redraft.types import NO_SPECULATION
from tests.runtime.devices import cpu_device, open_over, opener, tensorrt_device
from tests.runtime.fakes import SHAPE, VOCABULARY, FakeEngine, engine_of, fake_verifier, mixing_rule
from tests.runtime.lyanna_bundle import CONTEXT, FULL, PARAMS, PROMPTS, fill, request
from tests.standins.cuda import FakeCuda

pytestmark = pytest.mark.usefixtures("unmeasured")
Open = Callable[..., Runtime]
TEXT = [3, 9, 4, 7, 5, 8, 6, 12, 3, 11] * 8


@pytest.fixture(params=["host", "cpu", "tensorrt"])
def opened(
    request: pytest.FixtureRequest, lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """Return a function that opens the bundle on the host or on a device."""
    return opener(request.param, lyanna_bundle, tmp_path, monkeypatch)


def rows(verifier: Verifier) -> np.ndarray:
    """Return the first layer's keys [slots, H_kv, CONTEXT, D]."""
    steps = verifier.steps
    if isinstance(steps, GraphSteps):
        found = steps._buffers.state[names.key_cache(0)].read()
    else:
        found = steps.kv[0].copy()  # type: ignore[attr-defined]
    return found[:, :, :CONTEXT]


def computed(verifier: Verifier, tokens: list[int], slot: int) -> Request:
    """Return a sequence whose rows, but the root's, were computed in a slot."""
    seq = request(tokens)
    seq.slot = slot
    fill(verifier, seq)
    return seq


def test_a_prompt_is_computed_in_any_slot_and_leaves_the_others(opened: Open) -> None:
    with opened(3) as runtime:
        verifier = runtime.verifier
        computed(verifier, TEXT, 0)
        first, rows_of = rows(verifier)[0], len(TEXT) - 1
        for slot in (2, 1):
            before = rows(verifier)
            computed(verifier, TEXT, slot)
            after = rows(verifier)
            np.testing.assert_allclose(after[slot, :, :rows_of], first[:, :rows_of], atol=1e-5)
            others = [other for other in range(3) if other != slot]
            assert after[others].tobytes() == before[others].tobytes()
            assert np.abs(after[slot, :, :rows_of] - before[slot, :, :rows_of]).max() > 0.01
        (outcome,) = verifier.verify([request(TEXT)], [root_only(TEXT[-1])])  # over slot 0 alone
        assert outcome.tokens


def test_a_drafter_computes_a_prompts_rows_in_its_slot(opened: Open) -> None:
    """Its KV of a long prompt has all rows but the pending ones, and other slots do not change."""
    with opened(3) as runtime:
        verifier, drafter = runtime.verifier, runtime._speculation.drafter("lyanna")
        keys = drafter._state[names.key_cache(0)]  # type: ignore[attr-defined]

        def prefilled(slot: int) -> int:
            seq = request(TEXT)
            seq.slot = slot
            drafter.begin(seq)
            fill(verifier, seq, drafter)
            drafter.catch_up([seq] * (slot + 1), [NO_SPECULATION] * slot + [FULL])
            return int(seq.drafting[drafter].cache_len)

        kept = prefilled(0)
        assert kept == engine.CATCH_UP < len(TEXT)
        before = keys.read()
        assert prefilled(2) == kept
        after = keys.read()
        assert after[:2].tobytes() == before[:2].tobytes()
        np.testing.assert_allclose(after[2, :, :kept], before[0, :, :kept], atol=1e-5)
        pending = slots_of(drafter._state[names.PENDING_FEATURES], range(2, 3)).read()  # type: ignore[attr-defined]
        first = slots_of(drafter._state[names.PENDING_FEATURES], range(1)).read()  # type: ignore[attr-defined]
        left = len(TEXT) - kept
        np.testing.assert_allclose(pending[0, :left], first[0, :left], atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "tensorrt"])
def test_few_steps_and_calls_are_kept_of_many_slots(
    lyanna_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    plain: list[list[int]],
) -> None:
    """A dropped step is first waited for, and made again when its slot is used again."""
    monkeypatch.setattr(Verifier, "warm", lambda self: None)
    monkeypatch.setattr(graph_steps, "MOST_PREFILLS", 2)
    monkeypatch.setattr(engine, "MOST_CALLS", 2)
    bundle = open_bundle(lyanna_bundle, verify=False)
    opened = cpu_device(bundle) if device == "cpu" else tensorrt_device(bundle, tmp_path, cuda=FakeCuda()).device
    with open_over(opened, lyanna_bundle, 3) as runtime:
        found = runtime.generate(PROMPTS, PARAMS, SpeculationParams("lyanna", budget=FULL))
        steps, drafter = runtime.verifier.steps, runtime._speculation.drafter("lyanna")
        assert isinstance(steps, GraphSteps)
        assert len(steps._prefills._values) == len(drafter._calls._values) == 2  # type: ignore[attr-defined]
    assert [list(generation.token_ids) for generation in found] == plain[: len(PROMPTS)]


def test_a_prompts_chunk_as_wide_as_a_tree_leaves_the_trees_step_as_it_was() -> None:
    """Both calls have the same sizes, but other rows of logits and other masks."""
    verifier = fake_verifier(FakeEngine(), 400)
    verifier.steps.fewest_rows = 16
    text = np.arange(97, 97 + 48) % 5 + 97
    verifier.chunk_logits(text[:16], 0, 16)
    (expected,) = verifier.logits([chain(text[16:32])], [16])
    assert len({row.tobytes() for row in expected}) > 1
    verifier.chunk_logits(text[:16], 0, 16)
    (found,) = verifier.logits([chain(text[16:32])], [16])
    assert found.tobytes() == expected.tobytes()
    again = verifier.chunk_logits(text[:16], 0, 16)
    (alone,) = verifier.logits([chain(text[15:16])], [15])
    assert again.tobytes() == alone.tobytes()


def test_a_bundle_with_drafters_and_large_weights_has_one_engine(
    lyanna_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain: list[list[int]],
) -> None:
    monkeypatch.setattr(host_device, "MOST_COPIED_BYTES", 0)
    with Runtime.open(lyanna_bundle, threads=1, verify=False) as runtime:
        assert runtime.verifier.branches
        for way in ("none", SpeculationParams("lyanna", budget=FULL)):
            found = runtime.generate(PROMPTS, PARAMS, way)
            assert [list(generation.token_ids) for generation in found] == plain[: len(PROMPTS)]
        assert not runtime.verifier.steps.prefers_chains


@pytest.mark.parametrize("fewest", [1, 2])
def test_the_host_computes_a_prompt_without_padding(fewest: int) -> None:
    verifier = fake_verifier(engine := FakeEngine(), 400)
    verifier.steps.fewest_rows = fewest
    computed(verifier, [97] * 130, 0)
    assert engine.sizes == [(1, 128), (1, fewest)]


def test_steps_of_the_host_share_the_memory_of_their_logits_and_features() -> None:
    verifier = fake_verifier(FakeEngine(hidden_states=("0",)), 400, 2, ("0",))
    outputs = verifier.steps._outputs  # type: ignore[attr-defined]
    for sequences, nodes in ((1, 3), (2, 8), (1, 5), (1, 8)):
        trees = [chain(np.full(nodes, 97))] * sequences
        (first, *_) = verifier.logits(trees, [0] * sequences)
        step = verifier.steps.tree(trees, [0] * sequences)
        assert np.shares_memory(step.tree_logits(trees)[0], outputs[names.LOGITS])
        assert np.shares_memory(step._features["0"], outputs[names.hidden_states("0")])  # type: ignore[attr-defined]
        assert step.tree_logits(trees)[0].tobytes() == first.tobytes()
    assert {name: array.size for name, array in outputs.items()} == {
        names.LOGITS: 2 * 8 * VOCABULARY, names.hidden_states("0"): 2 * 8 * SHAPE.hidden,
    }  # fmt: skip


def test_products_of_a_batch_compute_no_padding_and_trees_keep_their_logits() -> None:
    """Trees of other sizes, in another order, and in the same step again, have the logits that each has alone."""
    verifier = fake_verifier(engine := FakeEngine(), 400, 3)
    alone = fake_verifier(FakeEngine(single=True), 400)
    few, several, branched = (
        chain(np.array([97])),
        chain(np.arange(97, 101)),
        make_tree([99, 97, 98, 100, 101, 97], [-1, 0, 0, 1, 1, 4], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]),
    )
    for trees in ([few, branched, several], [several, few, branched], [branched, several, few], [few] * 3):
        found = verifier.logits(trees, [0, 0, 0])
        assert engine.rows[-1] == sum(map(len, trees))
        for tree, logits in zip(trees, found, strict=True):
            assert logits.tobytes() == alone.logits([tree], [0])[0].tobytes()
    assert len(verifier.steps._trees._values) == 2  # one of 11 rows, one of 3


class Reader:
    """Reads a hidden state of every row, 20 rows a slot."""

    def __init__(self, slots: int) -> None:
        self.buffer = HostBuffer.zeros("float32", slots, 20, SHAPE.hidden)

    def pending_features(self, slots: range) -> dict[str, Buffer]:
        return {"0": slots_of(self.buffer, slots)}

    def pending(self, batch: Sequence[Request], rows: int, slots: range) -> list[int]:
        return [1 + slot for slot in slots]


def test_features_of_accepted_rows_are_gathered_from_packed_rows() -> None:
    """The fake's features are token ids. Of three trees, the second branches and is accepted in part."""
    verifier = fake_verifier(FakeEngine(lambda tokens: tokens[-1] + 1, hidden_states=("0",)), 400, 3, ("0",))
    reader = Reader(3)
    verifier.attach(reader)  # type: ignore[arg-type]
    batch = [Request([token], 1, 40, frozenset(), Greedy()) for token in (90, 97, 110)]
    second = make_tree([97, 50, 98, 60, 99], [-1, 0, 0, 2, 2], [1.0, 0.9, 0.8, 0.7, 0.6])
    outcomes = verifier.verify(batch, [root_only(90), second, root_only(110)])
    assert [outcome.tokens for outcome in outcomes] == [(91,), (98, 99, 100), (111,)]
    assert reader.buffer.host[[0, 2], [1, 3], 0].tolist() == [90, 110]
    assert reader.buffer.host[1, 2:5, 0].tolist() == [97, 98, 99]


def test_a_graph_that_pads_all_rows_has_the_logits_of_a_packed_one() -> None:
    """A bundle without lowered graphs runs the portable graph."""
    trees = [chain(np.arange(97, 97 + nodes)) for nodes in (1, 5, 2)]
    packed, padded = (fake_verifier(FakeEngine(padded=padded), 400, 3) for padded in (False, True))
    expected, found = (verifier.logits(trees, [0, 0, 0]) for verifier in (packed, padded))
    assert [rows.tobytes() for rows in found] == [rows.tobytes() for rows in expected]
    assert [engine_of(verifier).rows for verifier in (packed, padded)] == [[8], [15]]


@pytest.mark.parametrize(("sequences", "fewest", "rows"), [(1, 2, 2), (2, 2, 2), (1, 5, 5), (2, 5, 6)])
def test_a_packed_call_has_the_fewest_rows_in_all(sequences: int, fewest: int, rows: int) -> None:
    verifier = fake_verifier(engine := FakeEngine(), 400, 2)
    verifier.steps.fewest_rows = fewest
    trees = [root_only(97)] * sequences
    found = verifier.logits(trees, [0] * sequences)
    assert engine.rows == [rows]
    assert {logits.argmax() for logits in found} == {mixing_rule([97])}


@pytest.mark.parametrize(("sequences", "fewest", "width"), [(1, 5, 8), (1, 2, 2), (2, 5, 4), (3, 1, 1)])
def test_a_device_computes_at_least_so_many_rows(lyanna_bundle: Path, sequences: int, fewest: int, width: int) -> None:
    """The call is padded, and the text of a step is the same as without padding."""
    with open_over(cpu_device(open_bundle(lyanna_bundle, verify=False)), lyanna_bundle, 3) as runtime:
        verifier = runtime.verifier
        verifier.steps.fewest_rows = 1
        batch = [computed(verifier, TEXT[slot : slot + 20], slot) for slot in range(sequences)]
        trees = [root_only(seq.tokens[-1]) for seq in batch]
        expected = [outcome.tokens for outcome in verifier.verify(batch, trees)]
        verifier.steps.fewest_rows = fewest
        assert verifier.steps.tree(trees, [seq.num_computed_tokens for seq in batch]).width == width  # type: ignore[attr-defined]
        assert [outcome.tokens for outcome in verifier.verify(batch, trees)] == expected


@pytest.mark.skipif("VmFlags" not in read_text(Path("/proc/self/smaps")), reason="the system lists no flags of memory")
@pytest.mark.parametrize(("sequences", "slots", "small"), [(2, 2, [True, True]), (1, 2, [False, True])])
def test_rows_of_several_slots_are_in_small_pages(sequences: int, slots: int, small: list[bool]) -> None:
    """So that a slot takes what it uses. The only slot of a single sequence may have large pages."""
    engine = FakeEngine(single=sequences == 1)
    kv = fake_verifier(engine, 20_000, sequences, slots=slots).steps.host_kv()
    for layer in kv:
        found = [flags_at(int(layer[slot].ctypes.data) + layer[slot].nbytes // 2) for slot in range(slots)]
        assert ["nh" in flags for flags in found] == small


def flags_at(address: int) -> list[str]:
    """Return the flags of the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such memory")


def test_the_least_recently_used_value_is_dropped() -> None:
    dropped: list[list[str]] = []
    cache: LruCache[str, int] = LruCache(2, lambda: dropped.append(list(cache._values)))
    assert [cache.get(key, lambda value=value: value) for key, value in (("a", 1), ("b", 2), ("a", 3))] == [1, 2, 1]
    assert cache.get("c", lambda: 3) == 3
    assert dropped == [["b", "a"]]  # called before the value is dropped
    assert list(cache._values) == ["a", "c"]
    assert cache.get("b", lambda: 4) == 4
    cache.clear()
    assert not cache._values
