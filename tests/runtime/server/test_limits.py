"""The queue is limited in requests and in tokens, and orders its requests."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redraft.runtime.api import Runtime
from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.limits import Backlog
from redraft.runtime.text.tokenizer import Tokenizer
from tests.runtime.server.serving import USER, WAIT, Gate, ask, client_of, ended_by_abort, error_of, toy, wait_until


def test_a_full_queue_refuses_before_a_prompt_is_encoded_with_the_time_to_try_again(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(free=3)
    with toy(gate, max_num_seqs=1, max_waiting=1) as runtime:
        client = client_of(runtime)
        running = pool.submit(ask, client, max_tokens=5)
        assert gate.reached.wait(WAIT)
        waiting = pool.submit(ask, client, max_tokens=5)
        wait_until(lambda: runtime.health.waiting == 1)
        with monkeypatch.context() as patch:
            patch.delattr(Tokenizer, "encode")
            refused = ask(client)
            assert error_of(refused, 429)["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            assert error_of(ask(client, n=2), 429)
            chat = {"model": "toy", "messages": [USER]}
            assert error_of(client.post("/v1/chat/completions", json=chat), 429)["code"] == "queue_full"
        gate.opened.set()
        assert [one.result(WAIT).status_code for one in (running, waiting)] == [200, 200]
        assert ask(client, max_tokens=5).status_code == 200
        text = client.get("/metrics").text
        assert 'redraft:requests_refused_total{model_name="toy",reason="queue_full"} 3.0' in text


def test_choices_that_never_have_space_are_a_wrong_request() -> None:
    with toy(max_num_seqs=2, max_waiting=1) as runtime:
        client = client_of(runtime)
        for fields in ({"n": 4}, {"n": 2, "prompt": ["a", "b"]}):
            error = error_of(ask(client, **fields), 400)
            assert (error["param"], error["code"]) == ("n", "too_many_choices")
        assert ask(client, n=3, max_tokens=2).status_code == 200


def test_choices_start_all_or_none(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue may fill after the look at it."""
    monkeypatch.setattr(Runtime, "check_queue", lambda *_: None)
    served, leave = [], Backlog.leave
    monkeypatch.setattr(Backlog, "leave", lambda self, tokens: (served.append(tokens), leave(self, tokens)))
    gate = Gate(free=3)
    with toy(gate, max_num_seqs=2, max_waiting=0) as runtime:
        client = client_of(runtime)
        first = pool.submit(ask, client, max_tokens=5)
        assert gate.reached.wait(WAIT)
        error_of(ask(client, n=2, prompt="abcd"), 429)
        gate.opened.set()
        assert first.result(WAIT).status_code == 200
        wait_until(lambda: runtime.health.requests == 0)
        assert ended_by_abort(client) == 1
        assert served == [3]
        assert client.app.state.service._backlog.tokens == 0


def test_an_empty_queue_takes_all_choices_of_a_request(pool: ThreadPoolExecutor) -> None:
    gate = Gate(free=3)
    with toy(gate) as runtime:
        asked = pool.submit(ask, client_of(runtime, max_queued_tokens=6), prompt="abcd", n=3, max_tokens=5)
        wait_until(lambda: runtime.health.requests == 3 or asked.done())
        gate.opened.set()
        assert asked.result(WAIT).status_code == 200


def test_queued_tokens_are_limited(pool: ThreadPoolExecutor) -> None:
    gate = Gate(free=3)
    with toy(gate, max_num_seqs=1) as runtime:
        client = client_of(runtime, max_queued_tokens=6)
        first = pool.submit(ask, client, max_tokens=5)  # an empty queue takes any prompt
        assert gate.reached.wait(WAIT)
        second = pool.submit(ask, client, max_tokens=5)
        wait_until(lambda: runtime.health.requests == 2)
        refused = ask(client, prompt="abcd")
        assert error_of(refused, 429)["code"] == "queued_tokens"
        assert "retry-after" in refused.headers
        gate.opened.set()
        assert [one.result(WAIT).status_code for one in (first, second)] == [200, 200]
        assert ask(client, prompt="a" * 50, max_tokens=5).status_code == 200


def test_the_time_to_try_again_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog, now = Backlog(100), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    backlog.enter(100)
    for second in range(4):
        now[0] = float(second)
        backlog.leave(20)
    backlog.cancel(10)  # it would double the pace
    backlog.enter(50)
    with pytest.raises(ApiError) as caught:
        backlog.enter(80)
    assert caught.value.retry_after == pytest.approx(40 / (80 / 3))
    with pytest.raises(ApiError) as caught:
        backlog.enter(1000)  # it may enter when the queue is empty
    assert caught.value.retry_after == pytest.approx(60 / (80 / 3))
    assert backlog.tokens == 60


def test_time_without_requests_says_nothing_of_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog, now = Backlog(100), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for start in (0.0, 1000.0):
        now[0] = start
        backlog.enter(90)
        now[0] = start + 2
        backlog.leave(20)
        with pytest.raises(ApiError) as caught:
            backlog.enter(50)
        assert caught.value.retry_after == pytest.approx(20 / (20 / 2))
        backlog.cancel(70)


def test_requests_share_rows_only_by_equal_salts() -> None:
    with toy() as runtime:
        client, prompt = client_of(runtime), "abcde" * 8
        for salt, cached in (("x", 0), ("y", 0), ("x", 32)):
            used = ask(client, cache_salt=salt, prompt=prompt, max_tokens=2).json()["usage"]
            assert used["prompt_tokens_details"]["cached_tokens"] == cached


def test_requests_run_by_their_priority(pool: ThreadPoolExecutor) -> None:
    gate, order = Gate(free=8), []

    def rule(tokens: list[int]) -> int:
        if (first := chr(tokens[0])) not in order:
            order.append(first)
        return gate(tokens)

    with toy(rule, max_num_seqs=1) as runtime:
        client = client_of(runtime)
        asked = [pool.submit(ask, client, max_tokens=30)]
        assert gate.reached.wait(WAIT)
        for number, (prompt, priority) in enumerate((("low", 5), ("high", 1)), 1):
            asked.append(pool.submit(ask, client, prompt=prompt, max_tokens=2, priority=priority))
            wait_until(lambda number=number: runtime.health.waiting == number)
        gate.opened.set()
        assert [one.result(WAIT).status_code for one in asked] == [200] * 3
    assert order == ["a", "h", "l"]
