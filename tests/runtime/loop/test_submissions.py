"""Submissions from several threads: text and results, aborts, timeouts, full queues, callbacks, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from redraft.errors import UsageError
from redraft.runtime import Budget, QueueFull, RequestError, Runtime, SamplingParams, SpeculationParams, Submission
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.loop.scheduler import RequestOutput, Scheduler
from redraft.runtime.loop.slots import Slots
from redraft.runtime.requests.request import Request
from tests.runtime.fakes import byte_text, greedy, make_runtime, mixing_rule, plain


class Gate:
    """A rule whose answers after `free` tokens of a sequence wait until the gate is opened."""

    def __init__(self, free: int = 20) -> None:
        self.opened = threading.Event()
        self._free = free

    def __call__(self, tokens: list[int]) -> int:
        if len(tokens) > self._free:
            assert self.opened.wait(30)
        return mixing_rule(tokens)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime(max_model_len=400, max_num_seqs=3) as found:
        yield found


def text_of(ids: list[int]) -> str:
    return byte_text().decode(ids)


def test_threads_submit_at_the_same_time_and_each_has_its_own_text(runtime: Runtime) -> None:
    prompts = [[97 + (number * step) % 5 for step in range(1, 12)] for number in range(24)]
    found: dict[int, str] = {}

    def work(number: int) -> None:
        method = ("none", "ngram", "suffix")[number % 3]
        found[number] = "".join(runtime.submit(prompts[number], greedy(30), method, tenant=str(number % 4)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: text_of(plain(mixing_rule, prompt, 30)) for number, prompt in enumerate(prompts)}
    assert runtime.health.requests == 0


def test_an_event_loop_reads_texts_and_awaits_results(runtime: Runtime) -> None:
    async def read(prompt: list[int]) -> tuple[str, str]:
        chunks = [chunk async for chunk in runtime.submit(prompt, greedy(25))]
        return "".join(chunks), (await runtime.submit(prompt, greedy(25))).text

    async def main() -> list[tuple[str, str]]:
        return await asyncio.gather(*[read([97, number]) for number in range(98, 104)])

    for number, texts in zip(range(98, 104), asyncio.run(main()), strict=True):
        assert texts == (text_of(plain(mixing_rule, [97, number], 25)),) * 2


def test_an_abort_ends_a_request_and_no_other() -> None:
    gate = Gate()
    with make_runtime(gate, max_model_len=400, max_num_seqs=2) as runtime:
        first = runtime.submit([97, 98], greedy(300), "none")
        waiting = [runtime.submit([97, number], greedy(5), "none") for number in range(3)]
        last = runtime.submit([99], greedy(4), "none")
        waiting[2].abort()
        first.abort()
        gate.opened.set()
        assert first.result(30).finish_reason == waiting[2].result(30).finish_reason == "abort"
        assert len(first.result().token_ids) < 300
        assert list(last.result(30).token_ids) == plain(mixing_rule, [99], 4)
        first.abort()
        assert runtime.submit([97], greedy(3)).result(30).finish_reason == "length"


def test_leaving_a_text_early_aborts_the_request() -> None:
    gate = Gate()
    with make_runtime(gate, max_model_len=400) as runtime:
        submission = runtime.submit([97], greedy(300), "none")
        for _ in submission:
            break
        gate.opened.set()
        assert submission.result(30).finish_reason == "abort"


def test_a_timeout_ends_a_request() -> None:
    with make_runtime(lambda tokens: time.sleep(0.002) or mixing_rule(tokens), max_model_len=2000) as runtime:
        late = runtime.submit([97], greedy(1900), "none", timeout=0.05)
        waiting = runtime.submit([98], greedy(5), "none", timeout=0.02)
        assert (late.result(30).finish_reason, waiting.result(30).finish_reason) == ("timeout", "timeout")
        assert late.result().token_ids
        assert not waiting.result().token_ids


def test_a_full_queue_refuses_a_submission_and_keeps_the_others() -> None:
    gate = Gate(free=3)
    runtime = make_runtime(gate, max_model_len=100)
    runtime._thread.loop.scheduler._max_waiting = 2
    with runtime:
        running = runtime.submit([97, 98], greedy(8), "none")
        while runtime.health.waiting:
            time.sleep(0.001)
        waiting = [runtime.submit([98], greedy(8), "none") for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests wait already"):
            runtime.submit([99], greedy(8), "none")
        gate.opened.set()
        assert [len(one.result(30).token_ids) for one in (running, *waiting)] == [8, 8, 8]


def test_a_callback_that_raises_loses_nothing(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    def fails(output: object) -> None:
        raise RuntimeError("my callback failed")

    one = runtime.submit([97, 98], greedy(10), on_output=fails)
    other = runtime.submit([99, 98], greedy(10))
    assert list(one.result(30).token_ids) == plain(mixing_rule, [97, 98], 10)
    assert list(other.result(30).token_ids) == plain(mixing_rule, [99, 98], 10)
    assert "a request's callback raised" in caplog.text


def test_a_callback_may_submit_a_request_of_a_new_method(runtime: Runtime) -> None:
    found: list[Submission] = []

    def follow(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            found.append(runtime.submit([99, 98], greedy(10), "suffix"))

    runtime.submit([97, 98], greedy(10), "ngram", on_output=follow).result(30)
    while not found:
        time.sleep(0.001)
    assert list(found[0].result(30).token_ids) == plain(mixing_rule, [99, 98], 10)


def test_smaller_priorities_and_tenants_in_turn_get_the_slot() -> None:
    """One slot. The first request holds it until the others wait."""
    gate, ended = Gate(free=3), list[str]()
    with make_runtime(gate, max_model_len=100) as runtime:
        runtime.submit([97, 98], greedy(4), "none", priority=-2)
        while runtime.health.waiting:
            time.sleep(0.001)

        def add(name: str, **options: object) -> Submission:
            def note(output: RequestOutput) -> None:
                if output.finish_reason is not None:
                    ended.append(name)

            return runtime.submit([98], greedy(2), "none", on_output=note, **options)

        found = [add("a1", tenant="a"), add("a2", tenant="a"), add("b1", tenant="b"), add("urgent", priority=-1)]
        gate.opened.set()
        for one in found:
            one.result(30)
    assert ended == ["urgent", "a1", "b1", "a2"]


def test_a_cache_salt_separates_rows(runtime: Runtime) -> None:
    prompt = [97 + number % 5 for number in range(60)]
    cached = [
        runtime.submit(prompt, greedy(3), "none", cache_salt=salt).result(30).cached_tokens
        for salt in (None, "me", "me", None, "you")
    ]
    assert cached == [0, 0, 48, 48, 0]


def test_a_callback_that_exits_or_closes_stops_nobody_without_a_word() -> None:
    for action in ("exit", "close"):
        with make_runtime(lambda tokens: time.sleep(0.001) or mixing_rule(tokens), max_model_len=2000) as runtime:

            def call(output: RequestOutput, action: str = action, runtime: Runtime = runtime) -> None:
                if action == "exit":
                    raise SystemExit
                runtime.close()

            other = runtime.submit([99, 98], greedy(30 if action == "exit" else 1900), "none")
            one = runtime.submit([97, 98], greedy(10), "none", on_output=call)
            if action == "exit":
                assert list(one.result(30).token_ids) == plain(mixing_rule, [97, 98], 10)
                assert list(other.result(30).token_ids) == plain(mixing_rule, [99, 98], 30)
                continue
            other.abort()  # so that the one whose callback closes gets the slot
            for submission in (one, other):
                assert submission._ended.wait(30)
            with pytest.raises(UsageError, match="closed"):
                runtime.submit([97])


def test_a_cancelled_await_does_not_hide_the_end_from_a_later_one(runtime: Runtime) -> None:
    gate = Gate()
    with make_runtime(gate, max_model_len=400) as slow:
        submission = slow.submit([97, 98], greedy(40), "none")

        async def wait() -> str:
            return (await submission).finish_reason

        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(wait(), 0.05))
        threading.Timer(0.1, gate.opened.set).start()
        assert asyncio.run(asyncio.wait_for(wait(), 30)) == "length"


def test_a_request_that_is_aborted_before_it_starts_stays_aborted(runtime: Runtime) -> None:
    busy = runtime.submit([97], greedy(200), "none")
    one = runtime.pieces([97, 98], greedy(10), "none")
    one.abort()
    busy.result(30)
    assert (one.result(30).finish_reason, one.result().token_ids) == ("abort", ())


def test_an_interrupt_while_a_drafter_opens_leaves_the_loop_running(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the patch ends with it
        patch.setattr(runtime._thread._changed, "wait_for", interrupted)
        with runtime._thread.paused():
            pass
    assert runtime._thread._visitors == 0
    assert list(runtime.submit([97], greedy(5), "none").result(30).token_ids) == plain(mixing_rule, [97], 5)


def test_an_interrupt_of_generate_aborts_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Submission) -> None:
        raise KeyboardInterrupt

    gate = Gate()
    with make_runtime(gate, max_model_len=2000, max_num_seqs=2) as runtime:
        monkeypatch.setattr(Submission, "ended", interrupted)
        requests = []
        add = runtime._thread.add
        monkeypatch.setattr(runtime._thread, "add", lambda new: (requests.extend(new), add(new)))
        with pytest.raises(KeyboardInterrupt):
            runtime.generate([[97], [98], [99]], greedy(1900), "none")
        gate.opened.set()
        started = time.monotonic()
        while runtime.health.requests and time.monotonic() < started + 30:
            time.sleep(0.001)
        assert [one.finish_reason for one in requests] == ["abort"] * 3


def test_a_new_kind_of_request_does_not_pause_the_loop(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened or measured for it, so no step waits and no row is copied."""

    def refused() -> None:
        raise AssertionError("the loop was paused")

    busy = runtime.submit([97], greedy(300), "none")
    monkeypatch.setattr(runtime._thread, "paused", refused)
    ways = ["ngram", "suffix", "lookahead", SpeculationParams("ngram", [98] * 5),
            SpeculationParams("suffix", budget=Budget(3, 3, 1)), None]  # fmt: skip
    found = [runtime.submit([97, 98], greedy(5), how) for how in ways]
    assert {one.result(30).token_ids for one in found} == {tuple(plain(mixing_rule, [97, 98], 5))}
    busy.abort()


def test_closing_fails_requests_that_run_and_wait() -> None:
    with make_runtime(lambda tokens: time.sleep(0.001) or mixing_rule(tokens), max_model_len=2000) as runtime:
        found = [runtime.submit([97, number], greedy(1900), "none") for number in range(3)]
    for one in found:
        with pytest.raises(RequestError, match="this runtime is closed; open it again"):
            one.result(30)
    with pytest.raises(UsageError, match="this runtime is closed"):
        runtime.submit([97])


def test_a_loop_that_raises_goes_on_unless_it_cannot_recover(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(self: object, *_: object) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(DecodeLoop, "step", dies)
        for _ in range(2):  # it recovers
            with pytest.raises(RequestError, match="the decode loop failed: RuntimeError: a fault of ours"):
                runtime.submit([97], greedy(3)).result(30)
    assert "a fault of ours" in str(runtime.health.error)
    assert runtime.submit([97], greedy(3)).result(30).token_ids == runtime.generate([[97]], greedy(3))[0].token_ids
    assert runtime.health.error is None
    monkeypatch.setattr(DecodeLoop, "step", dies)
    monkeypatch.setattr(Scheduler, "end_concerned", dies)
    with pytest.raises(RequestError, match="the decode loop failed: RuntimeError: a fault of ours"):
        runtime.submit([97], greedy(3)).result(30)
    with pytest.raises(UsageError, match="the decode loop has died"):
        runtime.submit([97], greedy(3))


def test_a_loop_that_raises_while_it_admits_a_request_fails_that_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: Slots, request: object) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "admit", dies)
        with pytest.raises(RequestError, match="the decode loop failed"):
            runtime.submit([97], greedy(3)).result(30)
    assert runtime.submit([97], greedy(3)).result(30).token_ids


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("fails", [1, 2])
def test_a_slot_that_cannot_be_taken_loses_no_output(
    requests: int, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs of the step come, and the loop goes on, also if no other request is left."""
    left = count(1)

    def leave(self: Slots, request: Request, park: bool = True) -> None:
        known(self, request, park)
        if next(left) == fails:
            raise RuntimeError("a fault of ours")

    known = Slots.leave
    with make_runtime(max_num_seqs=2) as runtime:
        prompts = [[97], [98]][:requests]
        expected = [one.token_ids for one in runtime.generate(prompts, greedy(3), "none")]
        monkeypatch.setattr(Slots, "leave", leave)
        for _ in range(2):
            with runtime._thread.paused():  # so that both end in one step
                found = [runtime.submit(prompt, greedy(3), "none") for prompt in prompts]
            assert [one.result(30).token_ids for one in found] == expected
    assert next(left) > fails


def test_a_request_that_cannot_make_room_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached = Gate(free=3), threading.Event()
    with make_runtime(gate, max_num_seqs=1) as runtime:
        second = runtime.submit([97, 98], greedy(20), "none", priority=1, on_output=lambda output: reached.set())

        def leave(self: Slots, request: Request, park: bool = True) -> None:
            known(self, request, park)
            raise RuntimeError("a fault of ours")

        assert reached.wait(30)
        with monkeypatch.context() as patch:
            known = Slots.leave
            patch.setattr(Slots, "leave", leave)
            first = runtime.submit([97], greedy(3), "none")
            gate.opened.set()
            with pytest.raises(RequestError, match="a fault of ours"):
                second.result(30)
        assert first.result(30).token_ids


def test_a_request_knows_when_it_was_admitted_and_how_full_the_rows_are() -> None:
    """The second one waits for the slot of the first. Rows of prefixes do not count, since requests may have them."""
    gate, reached = Gate(free=3), threading.Event()
    with make_runtime(gate, max_model_len=100) as runtime:
        first = runtime.submit([97, 98, 99], greedy(40), "none", on_output=lambda output: reached.set())
        second = runtime.submit([98], greedy(40), "none")
        assert reached.wait(30)
        assert (second.request.admitted, runtime.health.waiting, runtime.health.kv_usage) == (0.0, 1, 0.03)
        gate.opened.set()
        first.result(30)
        second.result(30)
        assert first.request.started <= first.request.admitted <= first.request.first_token < second.request.admitted
        assert runtime.health.prefixes == 1
        assert runtime.health.kv_usage == 0.0


def test_a_loop_that_hangs_is_not_healthy() -> None:
    gate = Gate(free=3)
    with make_runtime(gate, max_model_len=100) as runtime:
        assert runtime.health == (0, 0, 0, 0.0, None, 0.0)
        hanging = runtime.submit([97, 98, 99], greedy(8), "none")
        time.sleep(0.2)
        assert runtime.health.idle_seconds > 0.1
        assert runtime.health.requests == 1
        gate.opened.set()
        hanging.result(30)
        assert runtime.health.idle_seconds == 0.0


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, None),
        ([97] * 400, {}, "the prompt has 400 tokens and the context holds 400"),
        ([97], {"priority": 1.5}, "priority must be a whole number, not 1.5"),
        ([97], {"priority": True}, "priority must be a whole number"),
        ([97], {"tenant": ["a"]}, "tenant must be a text"),
        ([97], {"cache_salt": 5}, "cache_salt must be a text, not 5"),
        ([97], {"timeout": 0}, "timeout must be a positive number of seconds, not 0"),
        ([97], {"timeout": "soon"}, "timeout must be a positive number"),
        ([97], {"speculation": "nothing"}, "no drafter 'nothing'"),
        (3, {}, "a prompt is a text or a list of token ids"),
        ([97], {"params": SamplingParams(min_tokens=400, max_tokens=400)}, "min_tokens is 400"),
        ([97], {"speculation": SpeculationParams("none", prediction="x")}, "plain decoding takes no prediction"),
    ],
)
def test_what_cannot_run_is_refused_before_it_waits(
    runtime: Runtime, prompt: object, options: dict[str, object], message: str | None
) -> None:
    if message is None:
        assert runtime.submit(prompt, greedy(3), **options).result(30).prompt_tokens == 1
        return
    with pytest.raises(UsageError, match=message):
        runtime.submit(prompt, **options)
    assert runtime.health.requests == 0


def test_a_text_is_read_once_and_a_result_as_often_as_one_likes(runtime: Runtime) -> None:
    submission = runtime.submit([97, 98], greedy(10))
    text = "".join(submission)
    with pytest.raises(UsageError, match="can be read once"):
        list(submission)
    assert submission.result().text == submission.result().text == text


def test_a_result_that_does_not_come_in_time_is_a_timeout() -> None:
    with make_runtime(lambda tokens: time.sleep(0.05) or 97) as slow:
        submission = slow.submit([97], greedy(30), "none")
        with pytest.raises(TimeoutError):
            submission.result(0.01)
