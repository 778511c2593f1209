"""The app: it streams the runtime's text, refuses as it should, and ends the request of a client that leaves."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.responses import Response
from starlette.testclient import TestClient

from redraft.runtime import Runtime, SamplingParams, Submission
from tests.examples.running import load
from tests.runtime.fakes import know_costs
from tests.runtime.server.serving import WAIT, Gate, toy


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    know_costs(monkeypatch)


@contextmanager
def listening(runtime: Runtime) -> Iterator[int]:
    """Run the app in a thread. Yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(load("app").create_app(runtime), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


def test_it_streams_the_text_of_the_runtime() -> None:
    with toy() as runtime, TestClient(load("app").create_app(runtime)) as client:
        response = client.post("/continue", json={"prompt": "hello", "max_tokens": 30})
        (expected,) = runtime.generate(["hello"], SamplingParams(max_tokens=30))
        assert response.text == expected.text
        wrong = client.post("/continue", json={"prompt": "a" * 300})
        assert wrong.status_code == 400
        assert "300" in wrong.json()["error"]


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """The submissions of a runtime, as they come."""
    found: list[Submission] = []
    submit = Runtime.submit

    def noted(self: Runtime, prompt: str, params: SamplingParams) -> Submission:
        found.append(submit(self, prompt, params))
        return found[-1]

    monkeypatch.setattr(Runtime, "submit", noted)
    return found


def test_a_client_that_leaves_ends_its_request(submissions: list[Submission], monkeypatch: pytest.MonkeyPatch) -> None:
    gate, aborted, abort = Gate(20), threading.Event(), Submission.abort

    def noted(self: Submission) -> None:
        abort(self)
        aborted.set()

    monkeypatch.setattr(Submission, "abort", noted)
    with toy(gate) as runtime, listening(runtime) as port:
        body = json.dumps({"prompt": "hello", "max_tokens": 150})
        head = f"POST /continue HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        with socket.create_connection(("127.0.0.1", port), WAIT) as client:
            client.sendall(f"{head}\r\n\r\n{body}".encode())
            assert client.recv(8) == b"HTTP/1.1"
            assert gate.reached.wait(WAIT)
        assert aborted.wait(WAIT)
        gate.opened.set()
        assert submissions[0].ended().finish_reason == "abort"


def test_a_request_ends_with_a_response_that_does_not_read_it(
    submissions: list[Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a client who has left already."""
    module, gate = load("app"), Gate(20)
    monkeypatch.setattr(module, "StreamingResponse", lambda content, media_type: Response())
    with toy(gate) as runtime, TestClient(module.create_app(runtime)) as client:
        client.post("/continue", json={"prompt": "hello", "max_tokens": 150})
        gate.opened.set()
        assert submissions[0].ended().finish_reason == "abort"


def test_a_full_queue_is_told() -> None:
    gate = Gate(20)
    with toy(gate, max_num_seqs=1, max_waiting=0) as runtime, TestClient(load("app").create_app(runtime)) as client:
        running = runtime.submit("hello", SamplingParams(max_tokens=60))
        assert gate.reached.wait(WAIT)
        assert client.post("/continue", json={"prompt": "hello"}).status_code == 429
        gate.opened.set()
        running.result(WAIT)
