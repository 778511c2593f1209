"""Faults in the middle of requests: those concerned end with a reason, and others go on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redraft.errors import BackendError
from redraft.runtime.drafters.ngram import NgramDrafter
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.loop.slots import Slots
from redraft.runtime.requests.batch import Batch
from redraft.runtime.requests.request import Request
from redraft.runtime.text.tokenizer import Detokenizer
from redraft.runtime.trees.offers import Offer
from redraft.types import Budget
from tests.runtime.fakes import NO_NUMBERS, FakeEngine, greedy, mixing_rule
from tests.runtime.server.serving import (
    LONG,
    WAIT,
    Gate,
    ask,
    client_of,
    ended_by_abort,
    error_of,
    events,
    toy,
    wait_until,
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_disturbs_no_other(stream: bool) -> None:
    def rule(tokens: list[int]) -> int:
        return NO_NUMBERS if tokens[0] == ord("z") and len(tokens) > 5 else mixing_rule(tokens)

    with toy(rule) as runtime:
        client = client_of(runtime)
        expected = ask(client, max_tokens=5).json()["choices"]
        failed = ask(client, prompt="zz", stream=stream, temperature=1.0, seed=3, speculative_config=False)
        error = events(failed)[-1]["error"] if stream else error_of(failed, 500)
        assert (error["type"], error["code"]) == ("server_error", "request_failed")
        assert ask(client, max_tokens=5).json()["choices"] == expected
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_output_that_cannot_be_read_fails_the_answer(
    n: int, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the fault once, with the id of the answer."""

    def take(self: Detokenizer, finished: bool = False) -> str:
        if len(self.text) > 5:
            raise ValueError("no text")
        return taken(self, finished)

    taken = Detokenizer.take
    monkeypatch.setattr(Detokenizer, "take", take)
    with toy() as runtime:
        answer = ask(client_of(runtime), n=n, stream=stream)
        wait_until(lambda: runtime.health.requests == 0)
    found = events(answer) if stream else [{"error": error_of(answer, 500)}]
    assert found[-1]["error"]["code"] == "internal_error"
    (record,) = [record for record in caplog.records if "a fault of the server" in record.message]
    assert record.message.startswith(found[0]["id"] if stream else "cmpl-")
    assert record.exc_info is not None


@pytest.mark.faulty_drafts
def test_a_drafter_that_raises_changes_no_text(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def offers(self: NgramDrafter, seq: Request, budget: Budget) -> Sequence[Offer]:
        if seq.tokens[0] == ord("z") and len(seq.new_tokens) > 20:
            raised.append(seq)
            raise RuntimeError("no drafts")
        return offered(self, seq, budget)

    raised, offered = [], NgramDrafter.offers
    with toy() as runtime:
        client = client_of(runtime)
        how = {"speculative_config": {"num_speculative_tokens": 3, "controller": "fixed"}}
        expected = [ask(client, prompt=prompt, **how).json()["choices"] for prompt in ("zab", "abc")]
        monkeypatch.setattr(NgramDrafter, "offers", offers)
        answers = [pool.submit(ask, client, prompt=prompt, **how) for prompt in ("zab", "abc")]
        assert [answer.result(WAIT).json()["choices"] for answer in answers] == expected
        assert len(raised) == 1
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("times", [2, 3])
def test_an_engine_that_raises_fails_only_the_requests_of_three_such_calls(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [times]

    def fail(self: FakeEngine) -> None:
        if left[0]:
            left[0] -= 1
            raise BackendError("no memory at /dev/x")

    with toy() as runtime:
        client = client_of(runtime)
        expected = ask(client).json()["choices"]
        monkeypatch.setattr(FakeEngine, "fail", fail)
        answer = ask(client)
        if times == 3:
            assert error_of(answer, 500)["message"] == "no memory at …"
            answer = ask(client)
        assert answer.json()["choices"] == expected
        assert client.get("/ready").status_code == 200


def test_a_loop_that_raises_fails_the_requests_of_that_step_and_goes_on(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two requests are in the step, and a third one waits. It runs when the server tells that a step failed."""
    gate, step, lock, faults = Gate(free=0), DecodeLoop.commit, threading.Lock(), ["none left for build/x/target.onnx"]

    def commit(self: DecodeLoop, batch: Batch) -> None:
        if faults:
            raise MemoryError(faults.pop())
        step(self, batch)

    def rule(tokens: list[int]) -> int:
        return gate(tokens) if tokens[0] == ord("z") else mixing_rule(tokens)

    with toy(rule, max_num_seqs=2) as runtime:
        client = client_of(runtime)
        (expected,) = runtime.generate(["abc"], greedy(9))
        monkeypatch.setattr(DecodeLoop, "commit", commit)
        runtime.step_within(lock)
        asked = []
        with lock:  # no step begins
            for number, fields in enumerate(({}, {"stream": True}, {"prompt": "z"}), 1):
                asked.append(pool.submit(ask, client, max_tokens=9, **fields))
                wait_until(lambda number=number: runtime.health.requests == number)
        errors = [error_of(asked[0].result(WAIT), 500), events(asked[1].result(WAIT))[-1]["error"]]
        reason = "the decode loop failed: MemoryError: none left for …"
        assert [(error["code"], error["message"]) for error in errors] == [("request_failed", reason)] * 2
        assert gate.reached.wait(WAIT)
        assert reason in error_of(client.get("/ready"), 503)["message"]
        gate.opened.set()
        assert len(asked[2].result(WAIT).json()["choices"][0]["text"]) == 9
        assert client.get("/ready").status_code == 200
        assert ask(client, max_tokens=9).json()["choices"][0]["text"] == expected.text
    assert caplog.text.count("none left for build/x/target.onnx") == 1


def test_a_loop_that_died_takes_no_requests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with toy() as runtime:
        client = client_of(runtime)

        def step(self: object, *_: object) -> None:
            raise MemoryError("none left for build/engines/toy/target.onnx")

        monkeypatch.setattr(DecodeLoop, "step", step)
        monkeypatch.setattr(Slots, "reset", step)
        assert "target" not in error_of(ask(client), 500)["message"]
        for answer in (client.get("/ready"), ask(client)):
            assert error_of(answer, 503)["message"] == "the decode loop has died"
        assert "none left for build/engines/toy" in caplog.text
        assert client.get("/health").status_code == 200


def test_a_stream_that_cannot_begin_ends_its_requests() -> None:
    gate = Gate(free=3)
    body = json.dumps({**LONG, "stream": True}).encode()

    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: dict[str, Any]) -> None:
        assert gate.reached.wait(WAIT)
        raise ConnectionError("the client has left")

    with toy(gate) as runtime:
        client = client_of(runtime)
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }  # fmt: skip
        with pytest.raises(ConnectionError):
            asyncio.run(client.app(scope, receive, send))  # type: ignore[arg-type]
        gate.opened.set()
        wait_until(lambda: runtime.health.requests == 0)
        assert ended_by_abort(client) == 1
