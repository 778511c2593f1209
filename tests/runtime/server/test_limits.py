"""Limits, keys and origins, and what a server that cannot work answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from anyio import to_thread
from starlette.testclient import TestClient

from redraft.errors import BackendError, UsageError
from redraft.runtime.api import GREEDY, Runtime
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.server.app import create_app
from redraft.runtime.server.errors import ApiError, without_paths
from redraft.runtime.server.limits import Backlog
from redraft.runtime.server.settings import ServerSettings, read_api_keys
from redraft.runtime.text.tokenizer import Detokenizer, Tokenizer
from tests.runtime.fakes import NO_NUMBERS, mixing_rule
from tests.runtime.server.serving import USER, WAIT, Gate, client_of, error_of, events, toy

LONG = {"model": "toy", "prompt": "abc", "max_tokens": 100}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


def ask(client: TestClient, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={**LONG, **fields})


def ended_by_abort(client: TestClient) -> int:
    """Return how many requests ended because nobody wanted them."""
    (line,) = [line for line in client.get("/metrics").text.splitlines() if 'finished_reason="abort"' in line]
    return int(float(line.rpartition(" ")[2]))


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a state that no event tells."""
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_queue_refuses_with_the_time_to_try_again(pool: ThreadPoolExecutor) -> None:
    gate = Gate(free=3)
    with toy(gate, max_num_seqs=1, max_waiting=1) as runtime:
        client = client_of(runtime)
        running = pool.submit(ask, client, max_tokens=5)
        assert gate.reached.wait(WAIT)
        waiting = pool.submit(ask, client, max_tokens=5)
        wait_until(lambda: runtime.health.waiting == 1)
        refused = ask(client)
        assert error_of(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert error_of(ask(client, n=2), 429)
        gate.opened.set()
        assert [one.result(WAIT).status_code for one in (running, waiting)] == [200, 200]
        assert ask(client, max_tokens=5).status_code == 200
        text = client.get("/metrics").text
        assert 'redraft:requests_refused_total{model_name="toy",reason="queue_full"} 2.0' in text


def test_a_full_queue_refuses_before_a_prompt_is_encoded(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(free=3)
    with toy(gate, max_num_seqs=1, max_waiting=0) as runtime:
        client = client_of(runtime)
        running = pool.submit(ask, client, max_tokens=5)
        assert gate.reached.wait(WAIT)
        with monkeypatch.context() as patch:
            patch.delattr(Tokenizer, "encode")
            assert error_of(ask(client), 429)["code"] == "queue_full"
            chat = {"model": "toy", "messages": [USER]}
            assert error_of(client.post("/v1/chat/completions", json=chat), 429)["code"] == "queue_full"
        gate.opened.set()
        assert running.result(WAIT).status_code == 200


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


def test_a_body_that_is_too_large_is_refused_however_it_is_sent(pool: ThreadPoolExecutor) -> None:
    with toy() as runtime:
        client = client_of(runtime, max_body_bytes=100)
        error_of(ask(client, prompt="a" * 100), 413)
        chunks = (b" " * 60 for _ in range(2))
        error_of(client.post("/tokenize", content=chunks, headers={"Content-Type": "application/json"}), 413)
        assert ask(client, max_tokens=1).status_code == 200


def test_a_key_is_needed_where_the_model_is_used(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\none\ntwo\n")
    keys = read_api_keys(file)
    assert keys == ("one", "two")
    with toy() as runtime:
        client = client_of(runtime, api_keys=keys)
        for header in (None, "Bearer three", "Bearer", "Basic one", "one"):
            headers = {} if header is None else {"Authorization": header}
            refused = client.get("/v1/models", headers=headers)
            assert error_of(refused, 401)["type"] == "authentication_error"
            assert refused.headers["www-authenticate"] == "Bearer"
        for key in keys:
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert [client.get(path).status_code for path in ("/health", "/ready", "/metrics", "/version")] == [200] * 4
    file.write_text("\n#\n")
    with pytest.raises(UsageError, match="no API key"):
        read_api_keys(file)


@pytest.mark.parametrize(
    ("settings", "hosts", "others"),
    [
        ({}, ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"],
         ["a.test", "a.test:8000", "", "localhost.a.test", "127.0.0.1.a.test", "a_b.test", "[::2]", "127.0.0.2"]),
        ({"host": "127.0.0.2"}, ["127.0.0.2:80", "localhost"], ["127.0.0.3"]),
        ({"host": "::1"}, ["[::1]:80"], ["a.test"]),
        ({"host": "localhost"}, ["localhost"], ["a.test"]),
        ({"allow_hosts": ("a.test", "b.test")}, ["A.test:443", "b.test", "localhost"], ["c.test"]),
        ({"host": "0.0.0.0"}, ["a.test", "10.0.0.1:8000", ""], []),
        ({"host": "0.0.0.0", "allow_hosts": ("a.test",)}, ["a.test"], ["b.test"]),
    ],
    ids=str,
)  # fmt: skip
def test_only_names_of_the_server_are_answered(settings: dict[str, Any], hosts: list[str], others: list[str]) -> None:
    """A page may let its name point to 127.0.0.1, and so read answers as if they were its own."""
    with toy() as runtime:
        client = client_of(runtime, **settings)
        for path in ("/v1/models", "/ready", "/metrics"):
            assert {client.get(path, headers={"Host": host}).status_code for host in hosts} == {200}
            for host in others:
                assert error_of(client.get(path, headers={"Host": host}), 403)["code"] == "host_not_allowed"


def test_pages_of_other_origins_are_allowed_by_name_only() -> None:
    asking = {"Origin": "http://a.test", "Access-Control-Request-Method": "POST"}
    with toy() as runtime:
        refused = client_of(runtime).options("/v1/completions", headers=asking)
        assert "access-control-allow-origin" not in refused.headers
        client = client_of(runtime, allow_origins=("http://a.test",))
        allowed = client.options("/v1/completions", headers=asking)
        assert allowed.headers["access-control-allow-origin"] == "http://a.test"
        other = client.get("/v1/models", headers={"Origin": "http://b.test"})
        assert "access-control-allow-origin" not in other.headers


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_disturbs_no_other(stream: bool) -> None:
    def rule(tokens: list[int]) -> int:
        return NO_NUMBERS if tokens[0] == ord("z") and len(tokens) > 5 else mixing_rule(tokens)

    with toy(rule) as runtime:
        client = client_of(runtime)
        expected = ask(client, max_tokens=5).json()["choices"]
        failed = ask(client, prompt="zz", stream=stream, temperature=1.0, speculative_config=False)
        error = events(failed)[-1]["error"] if stream else error_of(failed, 500)
        assert (error["type"], error["code"]) == ("server_error", "request_failed")
        assert ask(client, max_tokens=5).json()["choices"] == expected
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("n", [1, 2])
def test_an_output_that_cannot_be_read_fails_the_answer(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise ValueError("no text")

    with toy() as runtime:
        client = client_of(runtime)
        monkeypatch.setattr(Detokenizer, "take", fault)
        assert error_of(ask(client, n=n), 500)["code"] == "internal_error"
        wait_until(lambda: runtime.health.requests == 0)


def test_no_path_of_the_machine_is_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as runtime:
        client = client_of(runtime)

        def submit(*_: object, **__: object) -> None:
            raise BackendError("/srv/models/x.onnx cannot be read")

        monkeypatch.setattr(runtime, "submit", submit)
        assert error_of(ask(client), 500)["message"] == "… cannot be read"

        def fault(*_: object, **__: object) -> None:
            raise ValueError("/srv/models")

        monkeypatch.setattr(runtime, "submit", fault)
        assert error_of(ask(client), 500)["message"] == "the server failed"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("open '/a/b c': no", "open '… c': no"), ("see ~/x.json.", "see …."), ("./a/b, or", "…, or"),
        ("1/2 and and/or", "1/2 and and/or"), ("'build/engines/demo/x.bin' is", "'…' is"),
        ("in engines/demo/v1: no", "in …: no"),
        ("models/x.onnx.", "…."), ("tokens/s. N/A", "tokens/s. N/A"), ("</s> ends", "</s> ends"), ("/", "/"),
    ],
)  # fmt: skip
def test_paths_are_left_out(text: str, shown: str) -> None:
    assert without_paths(text) == shown


@pytest.mark.parametrize("status", [500, 503])
def test_a_fault_of_the_server_has_no_path(status: int) -> None:
    error = ApiError(status, "no memory for build/engines/demo/x.bin")
    assert error.body["error"]["message"] == "no memory for …"


def test_a_server_without_progress_is_not_ready(pool: ThreadPoolExecutor) -> None:
    gate = Gate(free=3)
    with toy(gate) as runtime:
        client = client_of(runtime, progress_timeout=0.05)
        assert client.get("/ready").json() == {"status": "ready"}
        asked = pool.submit(ask, client, max_tokens=3)
        assert gate.reached.wait(WAIT)
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert "no step has made progress" in error_of(client.get("/ready"), 503)["message"]
        assert client.get("/health").status_code == 200
        gate.opened.set()
        assert asked.result(WAIT).status_code == 200
        assert client.get("/ready").status_code == 200


def test_a_loop_that_died_takes_no_requests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with toy() as runtime:
        client = client_of(runtime)

        def step(self: DecodeLoop) -> None:
            raise MemoryError("none left for build/engines/toy/target.onnx")

        monkeypatch.setattr(DecodeLoop, "step", step)
        assert "target" not in error_of(ask(client), 500)["message"]
        for answer in (client.get("/ready"), ask(client)):
            assert error_of(answer, 503)["message"] == "the decode loop has died"
        assert "none left for build/engines/toy" in caplog.text
        assert client.get("/health").status_code == 200


def test_a_runtime_that_is_closed_is_no_fault_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as runtime:
        client, submit = client_of(runtime), runtime.submit

        def closed(*arguments: Any, **options: Any) -> Any:
            runtime.close()
            return submit(*arguments, **options)

        monkeypatch.setattr(runtime, "submit", closed)
        assert error_of(ask(client), 503)["code"] == "not_running"


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


def test_metrics_need_no_thread() -> None:
    async def scrape() -> int:
        limiter = to_thread.current_default_thread_limiter()
        limiter.total_tokens = 1
        await limiter.acquire()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await asyncio.wait_for(client.get("/metrics"), WAIT)).status_code

    with toy() as runtime:
        app = create_app(runtime, ServerSettings("toy"))
        assert asyncio.run(scrape()) == 200


def test_a_server_that_drains_takes_no_requests() -> None:
    with toy() as runtime:
        app = create_app(runtime, ServerSettings("toy"))
        client = TestClient(app, "http://localhost")
        app.state.service.draining = True
        assert error_of(ask(client), 503)["code"] == "shutting_down"
        assert error_of(client.get("/ready"), 503)["code"] == "not_ready"
        assert client.get("/health").status_code == 200


def test_requests_have_the_defaults_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as runtime:
        greedy = ask(client_of(runtime)).json()
        assert ask(client_of(runtime)).json()["choices"] == greedy["choices"]
        monkeypatch.setattr(runtime, "model_sampling", lambda: type(GREEDY)(temperature=1.0, stop="c"))
        drawn = ask(client_of(runtime), seed=1).json()
        assert drawn["choices"][0]["finish_reason"] == "stop"
        assert ask(client_of(runtime), temperature=0, stop=[]).json()["choices"] == greedy["choices"]


@pytest.mark.parametrize(
    "wrong",
    [{"model_name": ""}, {"port": -1}, {"max_body_bytes": 0}, {"drain_timeout": 0}, {"request_timeout": float("nan")},
     {"api_keys": ("a b",)}, {"api_keys": ("",)}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServerSettings(**{"model_name": "toy", **wrong})


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
