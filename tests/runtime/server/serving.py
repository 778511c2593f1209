"""Servers over the toy model: in this process, or over real connections."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx2 as httpx
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.server.app import create_app
from redraft.runtime.server.process import DrainingServer, serve_in_thread
from redraft.runtime.server.settings import ServerSettings
from tests.runtime.fakes import CURVE, EOS, FakeEngine, Rule, byte_text, fake_verifier, mixing_rule

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
HERMES = TEMPLATE + "{% if tools %}<tool_call>{{ tools | length }}</tool_call>{% endif %}<think></think>"
"""As above, in the format of Hermes."""
LONG = {"model": "toy", "prompt": "abc", "max_tokens": 100}
USER = {"role": "user", "content": "hi"}
WAIT = 60
"""Seconds after which a test that waits has failed."""


class Gate:
    """A rule that waits after a text of `free` tokens, prompt included, until the gate is opened."""

    def __init__(self, free: int) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self._free = free

    def __call__(self, tokens: list[int]) -> int:
        if len(tokens) > self._free:
            self.reached.set()
            assert self.opened.wait(WAIT)
        return mixing_rule(tokens)


@contextmanager
def toy(
    rule: Rule = mixing_rule, template: str | None = TEMPLATE, max_num_seqs: int = 4, max_waiting: int | None = None
) -> Iterator[Runtime]:
    """Open a runtime over the toy model, with a context of 200 tokens."""
    verifier = fake_verifier(FakeEngine(rule, single=max_num_seqs == 1), 200, max_num_seqs)
    costs, tokenizer = VerifyCosts({max_num_seqs: CURVE}), byte_text(template=template)
    with Runtime(verifier, tokenizer, costs, 200, (EOS,), max_waiting=max_waiting) as runtime:
        yield runtime


def client_of(runtime: Runtime, **settings: Any) -> TestClient:
    """Return a client of a server without connections."""
    app = create_app(runtime, ServerSettings("toy", **settings))
    return TestClient(app, "http://localhost", raise_server_exceptions=False)


def listening(runtime: Runtime, **settings: Any) -> AbstractContextManager[tuple[str, DrainingServer]]:
    """Run a server in a thread of its own. Gives its URL and itself; it is drained at the end."""
    return serve_in_thread(runtime, ServerSettings("toy", port=0, **settings))


def ask(client: TestClient, **fields: Any) -> httpx.Response:
    """Complete a prompt of 3 tokens, by 100 tokens unless `fields` says otherwise."""
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


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of a stream's events. The last one, `[DONE]`, is checked and left out."""
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error of an answer, whose form is checked."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of a stream's events, whose names are checked: each is the type of its data."""
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.splitlines()
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
