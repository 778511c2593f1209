"""A server in front of replicas: its answers are those of one runtime, also while replicas die."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from redraft.runtime.replicas import gateway as gateways
from redraft.runtime.replicas.calls import Call
from redraft.runtime.server.app import create_app
from redraft.runtime.server.settings import ServerSettings
from tests.runtime.replicas.fakes import Dies, LocalReplicas, gateway_of
from tests.runtime.server.serving import USER, client_of, error_of, events, toy

CHAT = {"model": "toy", "messages": [USER], "max_tokens": 20}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"model": "toy", "prompt": "abc", "max_tokens": 20, "logprobs": 2, "seed": 1}),
    "choices": ("/v1/completions", {"model": "toy", "prompt": ["ab", "abc"], "n": 2, "temperature": 1.0, "seed": 3}),
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0.8, "seed": 2, "logprobs": True, "top_logprobs": 1}),
    "stop": ("/v1/chat/completions", {**CHAT, "stop": ["c"]}),
    "prediction": ("/v1/chat/completions", {**CHAT, "prediction": {"type": "content", "content": "aaaaaaaa"}}),
}


def third(call: Call, number: int, sent: int) -> bool:
    """Every third call dies after some updates, but for those that go on."""
    return number % 3 == 0 and sent == 2 and not call.written


@contextmanager
def served(dies: Dies) -> Iterator[tuple[TestClient, LocalReplicas]]:
    with toy() as one, toy() as two:
        replicas = LocalReplicas([one, two], dies)
        gateway = gateway_of(replicas)
        app = create_app(gateway, ServerSettings("toy"))
        try:
            yield TestClient(app, "http://localhost", raise_server_exceptions=False), replicas
        finally:
            gateway.close()


def joined(chunks: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


@pytest.mark.parametrize(("path", "fields"), REQUESTS.values(), ids=REQUESTS)
def test_answers_are_those_of_one_runtime(path: str, fields: dict[str, Any]) -> None:
    with toy() as runtime:
        plain = {name: value for name, value in fields.items() if name != "prediction"}
        alone = client_of(runtime).post(path, json={**plain, "speculative_config": False}).json()
    with served(third) as (client, replicas):
        for _ in range(2):
            found = client.post(path, json=fields).json()
            assert found["choices"] == alone["choices"]
            tokens = ("prompt_tokens", "completion_tokens")
            assert [found["usage"][name] for name in tokens] == [alone["usage"][name] for name in tokens]
        texts = joined(events(client.post(path, json={**fields, "stream": True})))
        for choice in alone["choices"]:
            assert texts[choice["index"]] == choice.get("text", choice.get("message", {}).get("content"))
        lost = sum(bool(call.written) for call in replicas.calls)
        assert lost > 0
        assert f'redraft:replica_calls_lost_total{{model_name="toy"}} {lost}.0' in client.get("/metrics").text


def test_a_stream_tells_the_steps_of_replicas() -> None:
    with served(third) as (client, _):
        fields = {**CHAT, "max_tokens": 60, "redraft": {"steps": True}, "stream": True}
        chunks = events(client.post("/v1/chat/completions", json=fields))
        told = [choice["redraft"] for chunk in chunks for choice in chunk["choices"] if "redraft" in choice]
        assert {source for one in told for token in one["tokens"] for source in token["sources"]} > {"plain"}
        assert any("tree" in one for one in told)


def test_wrong_requests_have_the_status_that_one_runtime_gives() -> None:
    with served(lambda *_: False) as (client, _):
        asked = {"model": "toy", "prompt": "abc"}
        assert error_of(client.post("/v1/completions", json={**asked, "speculative_config": {"method": "x"}}), 400)
        assert error_of(client.post("/v1/completions", json={**asked, "prompt": [300]}), 400)
        assert client.get("/ready").status_code == 200
        assert client.get("/batch").json()["slots"] == 4


def test_it_is_not_ready_without_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "_PING_SECONDS", 0.01)
    silent = threading.Event()

    async def ping() -> None:
        silent.set()  # so an earlier answer has been noted
        raise ConnectionError

    with served(lambda *_: False) as (client, replicas):
        monkeypatch.setattr(replicas, "ping", ping)
        assert silent.wait(60)
        client.app.state.service.runtime._answered -= 60  # type: ignore[attr-defined]
        assert "no replica has answered" in error_of(client.get("/ready"), 503)["message"]
