"""Limits of time, and a step that does not end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redraft.runtime.server.service import Service
from tests.runtime.fakes import greedy, mixing_rule
from tests.runtime.server.serving import WAIT, Gate, ask, client_of, error_of, events, toy, wait_until


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends(stream: bool) -> None:
    def slow(tokens: list[int]) -> int:
        time.sleep(0.02)
        return mixing_rule(tokens)

    with toy(slow) as runtime:
        answer = ask(client_of(runtime, request_timeout=0.1), stream=stream)
        error = events(answer)[-1]["error"] if stream else error_of(answer, 504)
        assert (error["type"], error["code"]) == ("timeout_error", "timeout")
        wait_until(lambda: runtime.health.requests == 0)


def test_a_server_without_progress_is_not_ready(pool: ThreadPoolExecutor) -> None:
    gate = Gate(free=3)
    with toy(gate) as runtime:
        client = client_of(runtime, progress_timeout=0.05)
        assert client.get("/ready").json() == {"status": "ready"}
        asked = pool.submit(ask, client_of(runtime), max_tokens=3)
        assert gate.reached.wait(WAIT)
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert "no step has made progress" in error_of(client.get("/ready"), 503)["message"]
        assert client.get("/health").status_code == 200
        assert error_of(ask(client), 503)["code"] == "no_progress"
        gate.opened.set()
        assert asked.result(WAIT).status_code == 200
        assert client.get("/ready").status_code == 200


def test_the_first_token_may_take_so_long(pool: ThreadPoolExecutor) -> None:
    """Requests that wait for the slot of another one, which has its first token, get a status: they have no stream."""
    gate = Gate(free=4)
    with toy(gate, max_num_seqs=1) as runtime:
        limited, free = client_of(runtime, first_token_timeout=0.01), client_of(runtime, first_token_timeout=WAIT)
        first = pool.submit(ask, free, max_tokens=20, stream=True)
        assert gate.reached.wait(WAIT)
        others = [pool.submit(ask, limited, stream=stream) for stream in (False, True)]
        wait_until(lambda: runtime.health.waiting == 2)
        now = time.monotonic()
        wait_until(lambda: time.monotonic() > now + 0.01)
        gate.opened.set()
        for other in others:
            error = error_of(other.result(WAIT), 504)
            assert (error["type"], error["code"]) == ("timeout_error", "first_token_timeout")
        text = "".join(chunk["choices"][0]["text"] for chunk in events(first.result(WAIT)))
        assert text == ask(client_of(runtime), max_tokens=20).json()["choices"][0]["text"]


def test_a_step_that_does_not_end_fails_its_requests_and_no_later_ones(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, gate = threading.Event(), Gate(free=5)
    monkeypatch.setattr(Service, "seconds_to_stall", lambda self: 0.0 if stalled.is_set() else 0.01)
    with toy(gate) as runtime:
        client = client_of(runtime)
        whole = pool.submit(ask, client)
        stream = pool.submit(ask, client, prompt="abd", stream=True)
        assert gate.reached.wait(WAIT)
        wait_until(lambda: runtime.health.requests == 2)
        stalled.set()
        errors = [error_of(whole.result(WAIT), 500), events(stream.result(WAIT))[-1]["error"]]
        assert [error["code"] for error in errors] == ["no_progress"] * 2
        assert error_of(ask(client), 503)["code"] == "no_progress"
        assert "no step has made progress" in error_of(client.get("/ready"), 503)["message"]
        stalled.clear()
        gate.opened.set()
        wait_until(lambda: runtime.health.requests == 0)
        assert client.get("/ready").status_code == 200
        (expected,) = runtime.generate(["abc"], greedy(9))
        assert ask(client, max_tokens=9).json()["choices"][0]["text"] == expected.text


def test_a_pause_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is opened, or costs that are measured, may take longer than a step."""
    gate, now = Gate(free=3), time.monotonic()
    with toy(gate) as runtime:
        submission = runtime.submit([97, 98, 99], greedy(3))
        assert gate.reached.wait(WAIT)
        monkeypatch.setattr(time, "monotonic", lambda: now + 50)
        assert runtime.health.idle_seconds > 40
        gate.opened.set()
        with runtime._pause():
            assert runtime.health.idle_seconds == 0
            monkeypatch.setattr(time, "monotonic", lambda: now + 100)
            assert runtime.health.idle_seconds == 0
        assert runtime.health.idle_seconds == 0
        submission.result(WAIT)
