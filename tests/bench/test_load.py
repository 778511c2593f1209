"""Load: latencies and rates from the times of outputs, waiting, and traffic that shares no rows."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.bench.runs import LOOP, make_generation
from tests.runtime.fakes import FakeEngine, engine_of, greedy, know_costs, make_runtime

from redraft.bench import load
from redraft.bench.compare import Settings
from redraft.bench.load import (
    BLOCKS,
    TURNS,
    Block,
    Served,
    Traffic,
    measure,
    requests_of_blocks,
    summarise,
    table,
    waits,
)
from redraft.runtime import RequestError, Runtime
from redraft.runtime.observe.metrics import Clock
from redraft.runtime.requests.request import Request

CALL = 0.01
"""Seconds of an engine's call by the fake clock."""
PROMPTS = [list(b"abcdefgh" * 3), list(b"bcdefgha" * 3), list(b"cdefghab" * 3)]


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only engine calls and sleeping move."""
    now, lock = [100.0], threading.Lock()

    def advance(seconds: float) -> None:
        with lock:
            now[0] += seconds

    know_costs(monkeypatch)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", advance)
    monkeypatch.setattr(FakeEngine, "fail", lambda self: advance(CALL))


def run(runtime: Runtime, requests: list[int], clients: int) -> Block:
    """Decode plainly in a closed loop."""
    runtime.generate(PROMPTS, greedy(2), "none")
    return Traffic(runtime, PROMPTS, "none", Settings(greedy(4))).run(requests, clients)


def test_latencies_are_those_of_the_engine_calls(ticking: None) -> None:
    """A request has a call for its prompt and one for each token. The second begins when the first has ended."""
    with make_runtime() as runtime:
        block = run(runtime, [0, 1], clients=1)
    first, second = block.served
    for one in (first, second):
        assert np.diff([one.submitted, *one.outputs]) == pytest.approx([2 * CALL, CALL, CALL, CALL])
        assert one.ended == one.outputs[-1]
    assert second.submitted == first.ended
    assert block.timing == pytest.approx((8, 10 * CALL))
    assert block.clock.engine == pytest.approx(10 * CALL)


def test_requests_of_an_open_loop_wait_for_a_slot(ticking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second arrives while the first runs. Latencies count from arrivals, though sleeping takes too long."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds + CALL))
    with make_runtime() as runtime:
        runtime.generate(PROMPTS, greedy(2), "none")
        begun = time.perf_counter()
        traffic = Traffic(runtime, PROMPTS, "none", Settings(greedy(4)))
        first, second = traffic.run([0, 1], 1, [0.5 * CALL, 1.5 * CALL]).served
    assert (first.submitted, second.submitted) == pytest.approx((begun + 0.5 * CALL, begun + 1.5 * CALL))
    assert second.outputs[0] >= first.ended + 2 * CALL - 1e-9
    assert waits([first, second], 1) == pytest.approx([0.0, first.ended - second.submitted])


def test_a_prompt_that_runs_waits_for_its_end(ticking: None) -> None:
    with make_runtime(max_num_seqs=2) as runtime:
        block = run(runtime, [0, 0, 1], clients=2)
    assert [one.prompt for one in block.served] == [0, 1, 0]


def test_waits_are_those_of_a_queue() -> None:
    """Two run at once. The third waits for the first end, the fourth for the second; the last finds a free slot."""
    ends = [3.0, 4.0, 6.0, 5.0, 21.0]
    served = [Served(n, at, [end], end) for n, (at, end) in enumerate(zip([0, 1, 2, 3, 20], ends, strict=True))]
    assert waits(served, 2) == [0, 0, 1, 1, 0]
    assert waits(served, 1) == [0, 2, 2, 2, 0]


def test_different_prompts_run_at_once_and_no_request_finds_rows(
    monkeypatch: pytest.MonkeyPatch, ticking: None
) -> None:
    running: set[Request] = set()
    most, same = [], []

    def seen(self: Request, *given: object) -> int:
        running.add(self)
        running.difference_update([one for one in running if one.finish_reason is not None])
        most.append(len(running))
        same.append(len({tuple(one.tokens[: one.prompt_length]) for one in running}) < len(running))
        return commit(self, *given)

    commit = Request.commit
    monkeypatch.setattr(Request, "commit", seen)
    monkeypatch.setattr(load, "spread", lambda most, count: [most] * count)  # else few prompts are left to choose from
    lines: list[str] = []
    with make_runtime(max_num_seqs=2) as runtime:
        blocks = measure(
            dict.fromkeys(("none", "ngram"), runtime), PROMPTS, Settings(greedy(12)), progress=lines.append
        )
    order = [line.rpartition(" ")[2] for line in lines if "block" in line]
    assert order == ["none", "ngram", "ngram", "none"] * (BLOCKS // 2)
    assert max(most) == 2
    assert not any(same)
    for method in ("none", "ngram"):
        assert len(blocks[method]) == BLOCKS
        served = [one for block in blocks[method] for one in block.served]
        assert {one.generation.cached_tokens for one in served} == {0}
        assert all(len(block.served) == 2 * TURNS for block in blocks[method])
    pairs = zip(blocks["none"], blocks["ngram"], strict=True)
    assert all(sorted(one.prompt for one in a.served) == sorted(one.prompt for one in b.served) for a, b in pairs)
    figures = summarise(blocks, 2)
    assert [figures[method]["differing_outputs"] for method in figures] == [0, 0]
    assert figures["ngram"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(("prompts", "size"), [(5, 2 * TURNS), (108, 18)])
def test_blocks_have_every_prompt(prompts: int, size: int) -> None:
    blocks = requests_of_blocks(prompts, batch=2)
    assert [len(block) for block in blocks] == [size] * BLOCKS
    assert {one for block in blocks for one in block} == set(range(prompts))


def test_runtimes_decode_a_block_at_once_by_clocks_of_their_own(ticking: None) -> None:
    """Each has as many seconds as alone, though they step in turn."""
    with make_runtime() as first, make_runtime() as second:
        blocks = measure({"none": first, "ngram": second}, PROMPTS, Settings(greedy(4)))
    with make_runtime() as runtime:
        runtime.generate(PROMPTS, greedy(2), "none")
        limits = load.spread(4, 3)
        alone = Traffic(runtime, PROMPTS, "none", Settings(greedy(4)), limits).run([0, 1, 2], 1).timing.seconds
    assert [block.timing.seconds for block in blocks["none"]] == pytest.approx([alone] * BLOCKS)
    assert all(0 < block.timing.seconds < alone + CALL for block in blocks["ngram"])


def test_a_failed_request_ends_the_blocks_of_all_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other runtime cannot end its first call before it is stopped, and then begins no further request."""
    know_costs(monkeypatch)
    stopped, begun, stop = threading.Event(), list[object](), Traffic.stop

    def stopping(self: Traffic, error: BaseException) -> None:
        stop(self, error)
        if self._runtime is other:
            stopped.set()

    with make_runtime() as failing, make_runtime() as other:
        monkeypatch.setattr(Traffic, "stop", stopping)
        monkeypatch.setattr(failing, "generate", lambda *given: [])
        engine_of(failing.verifier).fail = lambda: 1 / 0  # type: ignore[method-assign]
        other.generate(PROMPTS, greedy(2), "none")
        monkeypatch.setattr(other, "generate", lambda *given: [])
        engine_of(other.verifier).fail = lambda: stopped.wait(10)  # type: ignore[method-assign]
        submit = other.submit
        monkeypatch.setattr(other, "submit", lambda *given, **options: begun.append(1) or submit(*given, **options))
        with pytest.raises(RequestError, match="division"):
            measure({"ngram": failing, "none": other}, PROMPTS, Settings(greedy(4)))
        while other.health.requests:
            time.sleep(0.01)
        assert len(begun) == 1


def test_lengths_are_spread_from_half_to_all() -> None:
    for begin in (0, 7):
        lengths = load.spread(64, 40)[begin : begin + 24]
        assert 32 <= min(lengths) <= 34
        assert 62 <= max(lengths) <= 64
        assert len({length // 4 for length in lengths}) >= 8
        assert abs(sum(lengths) / 24 - 48) < 2


def test_a_failed_request_ends_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    know_costs(monkeypatch)
    with make_runtime() as runtime:
        runtime.generate(PROMPTS, greedy(2), "none")
        engine_of(runtime.verifier).fail = lambda: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="division"):
            Traffic(runtime, PROMPTS, "none", Settings(greedy(4))).run([0, 1], 1)


def test_an_error_in_the_loops_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    know_costs(monkeypatch)
    with make_runtime() as runtime:
        runtime.generate(PROMPTS, greedy(2), "none")
        submit, calls = runtime.submit, []

        def second_fails(*given: object, **options: object) -> object:
            calls.append(given)
            if len(calls) == 2:
                raise ValueError("no second one")
            return submit(*given, **options)

        monkeypatch.setattr(runtime, "submit", second_fails)
        with pytest.raises(ValueError, match="no second one"):
            Traffic(runtime, PROMPTS, "none", Settings(greedy(4))).run([0, 1, 2], 1)


def block_of(seconds: float, *answers: tuple[int, ...], engine: float = 0.5, **counts: int) -> Block:
    """A block whose requests begin at 10 seconds and have two outputs, after 100 ms and at the end of the block."""
    served = [
        Served(n, 10.0, [10.1, 10 + seconds], 10 + seconds, make_generation(tokens=tokens, **counts))
        for n, tokens in enumerate(answers)
    ]
    return Block(served, Clock(0.1, 0.0, 0.3, engine, 0.7))


def test_figures_of_paired_blocks() -> None:
    texts = (1, 2, 3, 4), (5, 6)
    plain, fast = block_of(1.0, *texts), block_of(0.5, *texts, engine=0.4, steps=2, drafted=3, accepted=1)
    found = summarise({"none": [plain] * BLOCKS, "ngram": [fast] * BLOCKS}, 2)
    own = found["ngram"]
    assert (own["tokens_per_second"], own["plain_tokens_per_second"]) == (12, 6)
    assert own["speedup"] == 2
    assert own["speedup_interval"] == pytest.approx((2, 2))
    assert own["time_to_first_token_ms"] == pytest.approx({"p50": 100, "p99": 100})
    assert own["time_between_outputs_ms"] == pytest.approx({"p50": 400, "p99": 400})
    assert own["overhead_fraction"] == pytest.approx(0.2)
    stages = {"draft": 600, "resample": 0, "verify": 1800, "host": 1800, "between": -1200}
    assert own["stage_ms"] == pytest.approx(stages)
    assert (own["num_steps"], own["num_draft_tokens"], own["num_accepted_draft_tokens"]) == (24, 36, 12)
    assert own["mean_acceptance_length"] == 1.5
    assert (own["outputs"], own["tokens"], own["identical_to_plain"]) == (12, 36, True)
    assert "queue_ms" not in own


def test_texts_are_compared_with_the_first_plain_one() -> None:
    """Plain decoding in a batch may differ from itself too."""
    blocks = {
        "none": [block_of(1.0, (1, 2)), block_of(1.0, (1, 3))],
        "ngram": [block_of(1.0, (1, 2)), block_of(1, LOOP)],
    }
    found = summarise(blocks, 1, queued=True)
    assert [found[method]["differing_outputs"] for method in found] == [1, 1]
    assert [found[method]["looping_outputs"] for method in found] == [0, 1]
    assert found["none"]["speedup_interval"] is None
    rows = table({"1": found})
    assert rows[0][-1] == "queue, ms"
    assert rows[2][1:] == ["ngram", "33.00", "16.50", "-", "100 / 100", "900 / 900", "1.00", "50.0 %", "NO, 1 differ",
                           "0 / 0"]  # fmt: skip


def test_a_single_output_has_no_time_between() -> None:
    block = Block([Served(0, 0.0, [1.0], 1.0, make_generation(tokens=(1,)))], Clock())
    found = summarise({"none": [block]}, 1)
    assert found["none"]["time_between_outputs_ms"] is None
    assert table({"1": found})[1][6] == "-"
