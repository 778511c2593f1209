"""What the log says of each request, and what it keeps to itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from redraft.runtime.server import logs
from redraft.runtime.server.app import create_app
from redraft.runtime.server.logs import JsonLines, TextLines
from redraft.runtime.server.settings import ServerSettings
from tests.runtime.fakes import mixing_rule
from tests.runtime.server.serving import USER, client_of, events, listening, toy

ASKED: dict[str, Any] = {"model": "toy", "messages": [USER], "max_tokens": 20}
SECRET = {"role": "user", "content": "the secret is xyzzy"}


@pytest.fixture
def log() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Return what reads the lines of the requests so far, from the level `debug` on."""
    stream, logger = StringIO(), logging.getLogger("redraft")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lambda: [
        one for line in stream.getvalue().splitlines() if (one := json.loads(line))["logger"] == "redraft.requests"
    ]
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_line_has_what_the_request_took(client: TestClient, log: Callable[[], list[dict[str, Any]]]) -> None:
    whole = client.post("/v1/chat/completions", json={**ASKED, "n": 2, "seed": 3}, headers={"X-Request-Id": "mine-1"})
    streamed = client.post("/v1/chat/completions", json={**ASKED, "n": 2, "seed": 3, "stream": True})
    answer, chunks = whole.json(), events(streamed)
    assert whole.headers["X-Request-Id"] == "mine-1"
    first, second = log()
    assert first["request_id"] == "mine-1"
    assert second["request_id"] == streamed.headers["X-Request-Id"] != "mine-1"
    for line, figures in ((first, answer["redraft"]), (second, chunks[-1]["redraft"])):
        assert line.keys() == {
            "time", "level", "logger", "message", "request_id", "request", "status", "seconds", "model",
            "finish_reasons", "prompt_tokens", "completion_tokens", "cached_tokens", "first_token_seconds", "method",
            "steps", "drafted", "accepted",
        }  # fmt: skip
        assert line["request"] == "POST /v1/chat/completions"
        assert (line["level"], line["status"], line["model"]) == ("info", 200, "toy")
        assert line["finish_reasons"] == ["length", "length"]
        assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert line["completion_tokens"] == 40
        assert {name: line[name] for name in ("steps", "drafted", "accepted")} == {
            name: figures[name] for name in ("steps", "drafted", "accepted")
        }
        assert line["method"].startswith("ngram")
        assert 0 < line["first_token_seconds"] < line["seconds"]
    assert first["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("given", ["a b", "", "a" * 129, "a\u00e9", 'a"b'])
def test_other_ids_of_clients_are_replaced(shared: TestClient, given: str) -> None:
    header = shared.get("/health", headers={"X-Request-Id": given.encode("latin-1")}).headers["X-Request-Id"]
    assert len(header) == 32
    assert header.isalnum()


def test_refused_requests_have_the_errors_code(client: TestClient, log: Callable[[], list[dict[str, Any]]]) -> None:
    refused = client.post("/v1/chat/completions", json={**ASKED, "model": "gpt"})
    assert refused.headers["X-Request-Id"]
    client.get("/nothing")
    client.get("/health")
    model, path, health = log()
    assert (model["status"], model["error"], model["level"]) == (404, "model_not_found", "info")
    assert "finish_reasons" not in model
    assert (path["status"], path["request"], path["level"]) == (404, "GET /nothing", "debug")
    assert (health["status"], health["level"]) == (200, "debug")


def test_a_fault_of_the_server_is_logged_with_the_id_of_the_answer(
    runtime: Runtime, log: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(runtime, ServerSettings("toy"))
    monkeypatch.setattr(app.state.service, "check_queue", lambda count: 1 / 0)
    client = TestClient(app, "http://localhost", raise_server_exceptions=False)
    answer = client.post("/v1/chat/completions", json=ASKED)
    (line,) = log()
    assert (answer.status_code, line["status"], line["error"]) == (500, 500, "internal_error")
    assert line["level"] == "warning"
    assert answer.headers["X-Request-Id"] == line["request_id"]


def test_a_request_that_fails_in_its_stream_is_logged_with_the_reason(log: Callable[[], list[dict[str, Any]]]) -> None:
    def broken(tokens: list[int]) -> int:
        if len(tokens) > 30:
            raise ValueError
        return mixing_rule(tokens)

    with toy(broken) as runtime:
        client_of(runtime).post("/v1/chat/completions", json={**ASKED, "stream": True})
    (line,) = log()
    assert (line["status"], line["error"], line["finish_reasons"]) == (200, "error", ["error"])


@pytest.mark.parametrize("shown", [False, True])
def test_texts_and_addresses_are_logged_only_if_that_is_asked_for(
    shown: bool, runtime: Runtime, log: Callable[[], list[dict[str, Any]]]
) -> None:
    client = client_of(runtime, log_prompts=shown, log_clients=shown)
    asked = {**ASKED, "messages": [SECRET], "n": 2}
    answer = client.post("/v1/chat/completions", json=asked)
    client.post("/v1/chat/completions", json={**asked, "stop": 7})
    line, refused = log()
    assert refused["status"] == 400
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    if shown:
        assert line["prompts"] == ["user: the secret is xyzzy\nassistant: "]
        assert line["answers"] == texts
        assert line["client"] == "testclient"
    else:
        assert not {"prompts", "answers", "client"} & line.keys()
        assert not [text for text in (SECRET["content"], *texts) if text in json.dumps(log())]


def test_a_client_that_leaves_has_aborted(log: Callable[[], list[dict[str, Any]]]) -> None:
    """The line is written when the answer ends, which may be before the request leaves the loop."""
    with toy() as runtime, listening(runtime) as (url, _):
        asked = {**ASKED, "max_tokens": 150, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer:
            next(answer.iter_lines())
    (line,) = [one for one in log() if one["status"]]
    assert line["finish_reasons"] in (["abort"], ["length"])


def test_json_lines_are_lines() -> None:
    record = logging.LogRecord("redraft.server", logging.WARNING, "", 0, "a\nb %s", ("\u2028",), None)
    setattr(record, logs.FIELDS, {"seconds": 0.123456789, "nothing": None, "texts": ["a\nb"]})
    line = JsonLines().format(record)
    assert "\n" not in line
    assert line.isascii()
    found = json.loads(line)
    assert found["time"].endswith("Z")
    del found["time"]
    assert found == {
        "level": "warning", "logger": "redraft.server", "message": "a\nb \u2028", "seconds": 0.123457,
        "texts": ["a\nb"],
    }  # fmt: skip


def test_values_in_text_cannot_look_like_others() -> None:
    record = logging.LogRecord("redraft.requests", logging.INFO, "", 0, "request\nx", (), None)
    setattr(record, logs.FIELDS, {"request": "GET /a status=200\n", "status": 404, "method": "ngram+a", "error": None})
    line = TextLines().format(record).partition(" ")[2]
    assert line == 'info redraft.requests: request x request="GET /a status=200\\n" status=404 method=ngram+a'


def test_an_exception_keeps_its_traceback() -> None:
    try:
        raise ValueError("a fault")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("redraft.server", logging.ERROR, "", 0, "failed", (), info)
    assert "ValueError: a fault" in json.loads(JsonLines().format(record))["exception"]
    assert TextLines().format(record).splitlines()[-1] == "ValueError: a fault"
