"""OpenTelemetry spans of requests, in the SDK's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from tests.runtime.server.serving import USER, client_of, events

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ASKED: dict[str, Any] = {"model": "toy", "messages": [USER], "max_tokens": 20, "temperature": 0.5, "seed": 3}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[ReadableSpan]]]:
    """Return what reads the finished spans of the process's tracer provider, those of FastAPI left out."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield lambda: [one for one in exporter.get_finished_spans() if one.instrumentation_scope.name == "redraft"]
    provider.shutdown()


def test_a_span_has_the_conventions_attributes_and_the_clients_parent(
    exported: Callable[[], list[ReadableSpan]], runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(runtime)
    with caplog.at_level(logging.INFO, "redraft.requests"):
        whole = client.post("/v1/chat/completions", json={**ASKED, "n": 2}, headers={"traceparent": PARENT})
    events(client.post("/v1/completions", json={"model": "toy", "prompt": "abc", "stream": True}))
    chat, text = exported()
    assert chat.name == "chat toy"
    assert chat.parent is not None
    assert trace.format_trace_id(chat.context.trace_id) == PARENT.split("-")[1]
    assert trace.format_span_id(chat.parent.span_id) != PARENT.split("-")[2]  # FastAPI's span is between
    attributes, usage = dict(chat.attributes or {}), whole.json()["usage"]
    assert 0 < attributes.pop("gen_ai.server.time_to_first_token") <= (chat.end_time - chat.start_time) / 1e9
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "redraft",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": tuple(choice["finish_reason"] for choice in whole.json()["choices"]),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "redraft.request_id": whole.headers["X-Request-Id"],
        "redraft.method": attributes["redraft.method"],
        "redraft.steps": whole.json()["redraft"]["steps"],
        "redraft.drafted": whole.json()["redraft"]["drafted"],
        "redraft.accepted": whole.json()["redraft"]["accepted"],
    }
    assert text.name == "text_completion toy"
    assert text.context.trace_id not in (0, chat.context.trace_id)
    assert text.attributes["gen_ai.usage.output_tokens"] == 16
    line, *_ = [record.redraft_fields for record in caplog.records if record.name == "redraft.requests"]
    assert line["trace_id"] == PARENT.split("-")[1]


def test_errors_are_in_spans_and_other_endpoints_have_none(
    exported: Callable[[], list[ReadableSpan]], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(runtime)
    for path in ("/health", "/metrics", "/v1/models"):
        client.get(path)
    client.post("/tokenize", json={"prompt": "a"})
    client.post("/v1/chat/completions", json={**ASKED, "temperature": -1})
    runtime.close()
    client.post("/v1/chat/completions", json=ASKED)
    wrong, closed = exported()
    assert wrong.attributes["error.type"] == "invalid_value"
    assert wrong.status.status_code is trace.StatusCode.UNSET
    assert "gen_ai.response.model" not in wrong.attributes
    assert closed.attributes["error.type"] == "not_running"
    assert closed.status.status_code is trace.StatusCode.ERROR


def test_without_a_tracer_provider_nothing_is_recorded(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "redraft.requests"):
        assert client.post("/v1/chat/completions", json=ASKED, headers={"traceparent": PARENT}).status_code == 200
    line, *_ = [record.redraft_fields for record in caplog.records if record.name == "redraft.requests"]
    assert line["trace_id"] is None
