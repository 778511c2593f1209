"""A gateway over replicas that die: texts stay what they would have been, and come once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from redraft.errors import BackendError, RedraftError, UsageError
from redraft.runtime import QueueFull, RequestError, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.replicas import gateway as gateway_module
from redraft.runtime.replicas.calls import Answer, Call, Refused, Started
from redraft.runtime.replicas.gateway import ReplicaDied
from redraft.runtime.requests.request import Request
from tests.runtime.fakes import greedy, make_runtime
from tests.runtime.replicas.fakes import LocalReplicas, gateway_of

PROMPT = [97, 98, 99, 97, 98]
NGRAM = SpeculationParams("ngram")
WAYS = {
    "greedy": greedy(30),
    "sampled": SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True),
    "logprobs": SamplingParams(max_tokens=30, temperature=0.8, logprobs=2, seed=2, ignore_eos=True),
    "regex": SamplingParams(max_tokens=30, regex="[a-e]{3}(bc|de)*", seed=3, temperature=1.0),
}  # fmt: skip


@pytest.fixture
def runtimes() -> Iterator[list[Runtime]]:
    with make_runtime(max_model_len=200, max_num_seqs=2) as one, make_runtime(max_model_len=200, max_num_seqs=2) as two:
        yield [one, two]


@pytest.mark.parametrize("params", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("answers", [0, 1, 4])
def test_a_replica_that_dies_changes_no_text(runtimes: list[Runtime], params: SamplingParams, answers: int) -> None:
    whole = runtimes[0].submit(PROMPT, params, "none").result()
    replicas = LocalReplicas(runtimes, lambda call, number, sent: number == 0 and sent == answers)
    gateway = gateway_of(replicas)
    submission = gateway.submit(PROMPT, params, NGRAM)
    assert "".join(submission) == whole.text
    found = submission.generation
    assert (found.token_ids, found.finish_reason, found.logprobs) == (
        whole.token_ids,
        whole.finish_reason,
        whole.logprobs,
    )
    assert (len(replicas.calls), gateway.calls_lost) == (2, 1)
    assert replicas.calls[1].written == whole.token_ids[: len(replicas.calls[1].written)]
    assert bool(replicas.calls[1].written) == bool(answers)
    gateway.close()


def test_streams_go_on_while_replicas_die_again_and_again(runtimes: list[Runtime]) -> None:
    def dies(call: Call, number: int, sent: int) -> bool:
        return number < 8 and sent == number % 3

    gateway = gateway_of(LocalReplicas(runtimes, dies), retries=8)
    prompts = [[97 + (step * number) % 5 for step in range(6)] for number in range(8)]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = "".join(gateway.submit(prompts[number], greedy(20), NGRAM))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: runtimes[0].submit(p, greedy(20), "none").result().text for n, p in enumerate(prompts)}
    assert gateway.calls_lost == 8
    assert gateway.health.requests == 0
    gateway.close()


def test_a_request_that_kills_replicas_is_refused_after_the_second(runtimes: list[Runtime]) -> None:
    replicas = LocalReplicas(runtimes, lambda call, number, sent: call.prompt[0] == 99 and sent == 1)
    gateway = gateway_of(replicas)
    poison = gateway.submit([99, 98], greedy(20), NGRAM)
    with pytest.raises(RequestError, match="2 replicas died while they worked on this request"):
        poison.result(30)
    assert len(replicas.calls) == 2
    other = gateway.submit([97, 98], greedy(20), NGRAM).result(30)
    assert other.text == runtimes[0].submit([97, 98], greedy(20), "none").result().text
    gateway.close()


def test_a_request_that_no_replica_would_take_is_refused(runtimes: list[Runtime]) -> None:
    gateway, outputs = gateway_of(LocalReplicas(runtimes)), []
    with pytest.raises(UsageError, match="has no drafter 'eagle'"):
        gateway.submit(PROMPT, greedy(5), SpeculationParams("eagle"), on_output=outputs.append)
    assert (outputs, gateway.running) == ([], [])
    gateway.close()


def test_an_abort_ends_a_request_at_its_replica(runtimes: list[Runtime]) -> None:
    gateway = gateway_of(LocalReplicas(runtimes))
    submission = gateway.submit(PROMPT, greedy(150), NGRAM)
    next(iter(submission))
    submission.abort()
    assert submission.ended().finish_reason == "abort"
    for _ in range(1000):
        if not any(runtime.health.requests for runtime in runtimes):
            break
        threading.Event().wait(0.01)
    assert [runtime.health.requests for runtime in runtimes] == [0, 0]
    gateway.close()


def test_closing_ends_requests(runtimes: list[Runtime]) -> None:
    gateway = gateway_of(LocalReplicas(runtimes))
    submission = gateway.submit(PROMPT, greedy(190), NGRAM)
    gateway.close()
    gateway.close()
    assert submission.ended().finish_reason in ("error", "length")
    with pytest.raises(UsageError, match="closed"):
        gateway.submit(PROMPT, greedy(5), NGRAM)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"version": "9"}, "replica replica 1 has redraft 9"), ({"tokens": "other"}, "has another tokenizer")],
)
def test_replicas_that_would_not_understand_are_refused(
    runtimes: list[Runtime], changed: dict[str, str], message: str
) -> None:
    replicas = LocalReplicas(runtimes)
    gateway = gateway_of(replicas)
    replicas.replicas[1].identity = replicas.replicas[1].identity._replace(**changed)
    assert gateway.submit(PROMPT, greedy(5), NGRAM).result(30).token_ids
    with pytest.raises(BackendError, match=message):
        gateway.submit(PROMPT, greedy(5), NGRAM)
    gateway.close()


def test_a_text_does_not_go_on_where_it_would_be_another(runtimes: list[Runtime]) -> None:
    replicas = LocalReplicas(runtimes, lambda call, number, sent: number in (0, 2) and sent == (2 if number else 0))
    replicas.replicas[1].identity = replicas.replicas[1].identity._replace(texts="others")
    gateway = gateway_of(replicas)
    assert gateway.submit(PROMPT, greedy(8), NGRAM).result(30).token_ids  # it had no token yet
    with pytest.raises(RequestError, match="another one would write another text"):
        gateway.submit(PROMPT, greedy(20), NGRAM).result(30)
    gateway.close()


def test_the_state_here_is_that_of_the_replica(runtimes: list[Runtime]) -> None:
    seen: list[Request] = []
    gateway = gateway_of(LocalReplicas(runtimes))
    how = SpeculationParams("ngram", prediction=[97] * 12)
    submission = gateway.submit(PROMPT, greedy(30), how, on_output=lambda output: seen.append(output.request))
    found, direct = submission.result(30), runtimes[0].submit(PROMPT, greedy(30), how)
    direct.result()
    assert found.token_ids == direct.generation.token_ids
    assert set(map(id, seen)) == {id(submission.request)}
    assert submission.request.speculation.method == "ngram"
    assert sum(submission.request.counters.histogram) == submission.request.counters.spec_steps > 0
    assert isinstance(found.error, RedraftError | None)
    gateway.close()


class NoReplicas:
    """Replicas of which none is there."""

    async def ping(self) -> None:
        raise ReplicaDied

    async def run(self, call: Call) -> AsyncGenerator[Answer]:
        await asyncio.sleep(60)
        yield Started("", "", "")


def test_a_request_without_a_replica_ends_when_its_time_is_over(
    runtimes: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "_LATE_SECONDS", 0.01)
    gateway = gateway_of(LocalReplicas(runtimes), max_waiting=1)
    gateway._replicas = NoReplicas()
    assert gateway.submit(PROMPT, greedy(5), NGRAM, timeout=0.05).ended().finish_reason == "timeout"
    assert gateway.submit(PROMPT, greedy(5), NGRAM, first_token_timeout=0.05).ended().finish_reason == "timeout"
    gateway.check_queue(1)

    def wait() -> None:
        with pytest.raises(UsageError, match="closed"):
            gateway.submit(PROMPT, greedy(5), NGRAM)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not gateway.running:
        pass
    gateway.check_queue(2)  # a slot is free, perhaps, for one more than may wait
    with pytest.raises(QueueFull, match="1 requests wait already"):
        gateway.check_queue(3)
    assert gateway.unavailable() is None
    gateway._answered -= 60
    assert "no replica has answered for 6" in str(gateway.unavailable())
    gateway.close()
    waiting.join(30)
    assert not waiting.is_alive()


def test_the_time_of_the_first_token_is_over_when_it_comes(
    runtimes: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "_LATE_SECONDS", -0.2)  # it would end before its replica says so
    gateway = gateway_of(LocalReplicas(runtimes))
    found = gateway.submit(PROMPT, greedy(190), NGRAM, first_token_timeout=1.0)
    assert found.ended().finish_reason == "length"
    gateway.close()


def test_a_replica_whose_loop_has_died_hands_its_requests_over(runtimes: list[Runtime]) -> None:
    """The request is long, so that it has not ended when the loop breaks."""
    whole = runtimes[1].submit(PROMPT, greedy(190), "none").result()
    replicas = LocalReplicas(runtimes)
    gateway = gateway_of(replicas, retries=1)

    def die(output: RequestOutput) -> None:
        if len(output.request.new_tokens) > 3:
            break_loop(runtimes[0])

    submission = gateway.submit(PROMPT, greedy(190), NGRAM, on_output=die)
    assert submission.result(60).text == whole.text
    assert gateway.calls_lost == 1
    replicas.calls.clear()  # the next call goes to the dead one, and then to the other
    assert gateway.submit(PROMPT, greedy(190), NGRAM).result(60).text == whole.text
    assert gateway.calls_lost == 1
    gateway.close()


def break_loop(runtime: Runtime) -> None:
    """Let the next step fail, and everything that could repair it."""

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    loop = runtime._thread.loop
    loop.step = fail  # type: ignore[method-assign,assignment]
    loop.scheduler.end_concerned = fail  # type: ignore[method-assign,assignment]


def test_calls_that_no_replica_takes_end(runtimes: list[Runtime], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "_RETRY_SECONDS", 0.0)
    replicas = LocalReplicas(runtimes)
    gateway = gateway_of(replicas)

    async def run(call: Call) -> AsyncGenerator[Answer]:
        replicas.calls.append(call)
        raise ReplicaDied
        yield

    replicas.run = run  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="no replica took this request in 20 tries"):
        gateway.submit(PROMPT, greedy(5), NGRAM)
    assert len(replicas.calls) == 20
    gateway.close()


def test_a_request_that_kills_replicas_before_they_take_it_is_refused_too(runtimes: list[Runtime]) -> None:
    replicas = LocalReplicas(runtimes)
    gateway = gateway_of(replicas)

    async def run(call: Call) -> AsyncGenerator[Answer]:
        replicas.calls.append(call)
        raise ReplicaDied(worked=True)
        yield

    replicas.run = run  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="2 replicas died"):
        gateway.submit(PROMPT, greedy(5), NGRAM)
    assert len(replicas.calls) == 2
    gateway.close()


def test_a_request_that_lost_its_replica_waits_for_space_anywhere(
    runtimes: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "_RETRY_SECONDS", 0.0)
    replicas = LocalReplicas(runtimes, lambda call, number, sent: number == 0 and sent == 2)
    run, full = replicas.run, [True] * 3

    async def crowded(call: Call) -> AsyncGenerator[Answer]:
        if call.written and full:
            full.pop()
            replicas.calls.append(call)
            yield Refused(QueueFull(9, None))
            return
        async for answer in run(call):
            yield answer

    replicas.run = crowded  # type: ignore[method-assign]
    gateway = gateway_of(replicas)
    found = gateway.submit(PROMPT, greedy(20), NGRAM, session="s").result(30)
    assert found.text == runtimes[0].submit(PROMPT, greedy(20), "none").result().text
    assert [call.session for call in replicas.calls] == ["s", "s", None, None, None]
    gateway.close()
