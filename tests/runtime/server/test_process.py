"""A server with real connections: OpenAI's own client, clients that leave, slow ones, and a server that drains."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest

from redraft.errors import UsageError
from redraft.runtime.server import process
from redraft.runtime.server.process import MOST_HEADER_BYTES, bound_socket
from redraft.runtime.server.settings import ServerSettings
from tests.runtime.fakes import EOS, script
from tests.runtime.server.serving import HERMES, USER, WAIT, Gate, error_of, listening, toy, wait_until

CALL = '<think>why</think><tool_call>{"name": "f", "arguments": {"x": 5}}</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def client_at(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT)


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def test_openais_client_reads_answers_streams_and_errors() -> None:
    with toy() as runtime, listening(runtime, api_keys=("secret",)) as (url, _), client_at(url, "secret") as client:
        assert [model.id for model in client.models.list()] == ["toy"]
        asked: Any = {"model": "toy", "messages": [USER], "max_tokens": 30, "logprobs": True, "seed": 1}
        whole = client.chat.completions.create(**asked)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 30
        text = whole.choices[0].message.content
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens_details is not None
        assert chunks[-1].system_fingerprint == whole.system_fingerprint == "redraft-host"
        completion = client.completions.create(model="toy", prompt="user: hi\nassistant: ", max_tokens=30)
        assert completion.choices[0].text == text
        with pytest.raises(openai.BadRequestError, match="verbosity") as refused:
            client.chat.completions.create(**asked, verbosity="low")
        assert refused.value.param == "verbosity"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**asked, "model": "gpt"})
        with client_at(url) as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_openais_client_reads_tool_calls() -> None:
    prompt = len("user: hi\nassistant: <tool_call>1</tool_call><think></think>")
    said = script([*CALL.encode(), EOS], prompt)
    asked: Any = {"model": "toy", "messages": [USER], "tools": [TOOL]}
    with toy(said, HERMES) as runtime, listening(runtime) as (url, _), client_at(url) as client:
        (whole,) = client.chat.completions.create(**asked).choices
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        for message in (whole.message, final.message):  # both can be sent again, with the tool's result
            (call,) = message.tool_calls
            result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
            again = client.chat.completions.create(**{**asked, "messages": [USER, message, result]})
            assert again.choices[0].finish_reason
    assert whole.finish_reason == final.finish_reason == "tool_calls"
    for choice in (whole, final):
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"x": 5}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(stream: bool) -> None:
    gate = Gate(free=30)
    with toy(gate) as runtime, listening(runtime) as (url, server):
        body = json.dumps({"model": "toy", "prompt": "abc", "max_tokens": 150, "n": 2, "stream": stream}).encode()
        headers = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        with socket.create_connection(address_of(url), WAIT) as connection:
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
            assert gate.reached.wait(WAIT)
        wait_until(lambda: server.service.open_answers == 0)
        gate.opened.set()  # the step that runs ends, and no other has the requests
        wait_until(lambda: runtime.health.requests == 0)
        metrics = httpx.get(f"{url}/metrics").text
        assert 'request_success_total{finished_reason="abort",model_name="toy"} 2.0' in metrics


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("long", [b"X: %s\r\n" % (b"a" * MOST_HEADER_BYTES), b"X: y\r\n" * 20_000])
def test_headers_are_limited_before_a_request_begins(first: bytes, long: bytes) -> None:
    """The last bytes of the headers never come."""
    with toy() as runtime, listening(runtime, api_keys=("secret",)) as (url, _):
        with socket.create_connection(address_of(url), WAIT) as connection:
            connection.sendall(first)
            if first:
                answered = b""
                while not answered.endswith(b"}"):  # headers and body may come apart
                    answered += connection.recv(1 << 16)
                assert answered.startswith(b"HTTP/1.1 200")
            connection.sendall(b"GET /v1/models HTTP/1.1\r\n" + long[: MOST_HEADER_BYTES - 25])
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_long_headers_within_the_limit_and_long_bodies_are_read() -> None:
    with toy() as runtime, listening(runtime) as (url, _), httpx.Client(base_url=url) as client:
        for size in (1, 60_000):
            assert client.get("/v1/models", headers={"X": "a" * size}).status_code == 200
            body = {"model": "toy", "prompt": "abc", "user": "a" * 300_000}
            assert client.post("/v1/completions", json=body, headers={"X": "a" * size}).status_code == 200


def test_a_slow_reader_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer fills small buffers, so that the server waits for it; other requests end meanwhile."""

    def small_buffers(settings: ServerSettings) -> socket.socket:
        sock = bound_socket(settings)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        return sock

    monkeypatch.setattr(process, "bound_socket", small_buffers)
    with toy() as runtime, listening(runtime) as (url, server), socket.socket() as slow:
        slow.settimeout(WAIT)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        slow.connect(address_of(url))
        asked = {"model": "toy", "prompt": "abc", "max_tokens": 150, "n": 4, "logprobs": 5}
        body = json.dumps({**asked, "stream": True}).encode()
        headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        slow.sendall(f"POST /v1/completions HTTP/1.1\r\nConnection: close\r\n{headers}\r\n\r\n".encode() + body)
        wait_until(lambda: any(one.flow.write_paused for one in tuple(server.server_state.connections)))
        others = [httpx.post(f"{url}/v1/completions", json=asked) for _ in range(3)]
        assert [other.status_code for other in others] == [200] * 3
        wait_until(lambda: runtime.health.requests == 0)  # its own requests end as well
        assert server.service.open_answers == 1
        answer = b"".join(iter(lambda: slow.recv(1 << 20), b""))
        assert b"data: [DONE]" in answer
        wait_until(lambda: server.service.open_answers == 0)


def test_a_server_that_is_told_to_stop_ends_running_requests() -> None:
    gate = Gate(free=10)
    with toy(gate) as runtime, ThreadPoolExecutor(1) as pool, listening(runtime) as (url, server):
        asked = {"model": "toy", "prompt": "abc", "max_tokens": 30}
        running = pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=WAIT)
        assert gate.reached.wait(WAIT)
        server.handle_exit(signal.SIGTERM, None)
        assert error_of(httpx.post(f"{url}/v1/completions", json=asked), 503)["code"] == "shutting_down"
        assert error_of(httpx.get(f"{url}/ready"), 503)["code"] == "not_ready"
        assert httpx.get(f"{url}/health").status_code == 200
        gate.opened.set()
        answer = running.result(WAIT)
        assert answer.json()["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize(("seconds", "signals"), [(0.1, 1), (60, 2)])
def test_a_server_that_is_told_to_stop_waits_only_so_long_or_until_it_is_told_again(
    seconds: float, signals: int
) -> None:
    def slow(tokens: list[int]) -> int:
        time.sleep(0.05)
        return 97

    with (
        toy(slow) as runtime,
        ThreadPoolExecutor(1) as pool,
        listening(runtime, drain_timeout=seconds) as (url, server),
    ):
        asked = {"model": "toy", "prompt": "abc", "max_tokens": 190, "speculative_config": False}
        running = pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=WAIT)
        wait_until(lambda: runtime.health.requests == 1)
        for _ in range(signals):
            server.handle_exit(signal.SIGTERM, None)
        assert error_of(running.result(WAIT), 503)["code"] == "shutting_down"


def test_an_address_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, port {port}"):
            bound_socket(ServerSettings("toy", port=port))
