"""Several models behind one address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from redraft.runtime.server.app import create_app
from redraft.runtime.server.models_app import models_app
from redraft.runtime.server.settings import ServerSettings
from tests.runtime.server.serving import error_of, events, toy

ASKED = {"prompt": "abc", "max_tokens": 12, "seed": 1}


@contextmanager
def client_of(keys: tuple[str, ...] = ()) -> Iterator[TestClient]:
    with toy() as first, toy(lambda tokens: 98 + len(tokens) % 3) as second:
        apps = {
            name: create_app(runtime, ServerSettings(name, api_keys=keys, max_body_bytes=300))
            for name, runtime in (("first", first), ("second", second))
        }
        yield TestClient(models_app(apps), "http://localhost", raise_server_exceptions=False)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with client_of() as found:
        yield found


def text_of(client: TestClient, model: str) -> str:
    answer = client.post("/v1/completions", json={"model": model, **ASKED}).json()
    assert answer["model"] == model
    text: str = answer["choices"][0]["text"]
    return text


def test_the_field_model_chooses(client: TestClient) -> None:
    first, second = text_of(client, "first"), text_of(client, "second")
    assert second == "bcdbcdbcdbcd"
    assert first != second
    chunks = events(client.post("/v1/completions", json={"model": "second", "stream": True, **ASKED}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == second


def test_all_models_are_listed_and_each_is_described(client: TestClient) -> None:
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["first", "second"]
    assert client.get("/v1/models/second").json()["id"] == "second"
    assert error_of(client.get("/v1/models/third"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("body", [b'{"model": "third", "prompt": "a"}', b'{"model": 3, "prompt": "a"}'])
def test_a_model_that_is_not_there_is_refused(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert error_of(answer, 404 if b"third" in body else 400)["param"] == "model"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"model": "second"', b"\xff\xfe", b'{"model": "second", "x": 1}', b"[" * 299]
)
def test_bodies_that_are_wrong_are_refused_as_by_one_model(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert error_of(answer, 400)


def test_a_body_that_is_too_large_is_refused_in_the_form_of_its_api(client: TestClient) -> None:
    large = {"model": "second", "prompt": "a" * 400}
    assert error_of(client.post("/v1/completions", json=large), 413)["code"] == "body_too_large"
    assert client.post("/v1/messages", json=large).json()["type"] == "error"


def test_metrics_are_of_all_models(client: TestClient) -> None:
    text_of(client, "first")
    text_of(client, "second")
    lines = client.get("/metrics").text.splitlines()
    for model in ("first", "second"):
        assert f'redraft:generation_tokens_total{{model_name="{model}"}} 12.0' in lines
    assert len([line for line in lines if line.startswith("# HELP redraft:generation_tokens ")]) <= 1
    assert len(helps := [line for line in lines if line.startswith("# HELP")]) == len(set(helps))


def test_it_is_ready_if_all_models_are(client: TestClient) -> None:
    assert client.get("/ready").json() == {"status": "ready"}
    apps = client.app._apps
    apps["second"].state.service.draining = True
    assert "second: the server is shutting down" in error_of(client.get("/ready"), 503)["message"]


def test_keys_are_asked_for_everywhere() -> None:
    with client_of(("secret",)) as client:
        assert error_of(client.get("/v1/models"), 401)["code"] == "invalid_api_key"
        assert error_of(client.post("/v1/completions", json={"model": "second", **ASKED}), 401)
        headers = {"Authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health").status_code == 200
