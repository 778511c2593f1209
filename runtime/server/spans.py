"""OpenTelemetry spans of requests, with the attributes of its conventions for generative AI (`gen_ai.*`).

They are recorded if the process has a tracer provider, such as the one that the command opentelemetry-instrument sets
up. FastAPI then records a span of each HTTP request, which is the parent of the span here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import StatusCode, format_trace_id

from redraft import __version__
from redraft.runtime.server.request_record import RequestRecord

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
"""Names of operations by path. Other requests have no span."""
_OF_FIGURES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "first_token_seconds": "gen_ai.server.time_to_first_token",
    "method": "redraft.method",
    "steps": "redraft.steps",
    "drafted": "redraft.drafted",
    "accepted": "redraft.accepted",
}


class SpanWriter:
    """Writes spans of requests to one model when they have ended."""

    def __init__(self, model: str) -> None:
        self._tracer = trace.get_tracer("redraft", __version__)
        self._model = model

    def write(self, record: RequestRecord, figures: Mapping[str, Any]) -> str | None:
        """Write the span of a request, and return its trace id; None if there is no span, or nobody records it.

        figures: those of the record.   The parent is the span of this task, FastAPI's.
        """
        operation = _OPERATIONS.get(record.path) if record.verb == "POST" else None
        if operation is None:
            return None
        span = self._tracer.start_span(
            f"{operation} {self._model}", attributes=self._attributes(operation, record, figures),
            start_time=record.started_ns,
        )  # fmt: skip
        if (record.status or 0) >= 500:
            span.set_status(StatusCode.ERROR)
        trace_id = format_trace_id(span.get_span_context().trace_id) if span.is_recording() else None
        span.end(time.time_ns())
        return trace_id

    def _attributes(self, operation: str, record: RequestRecord, figures: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "redraft",
            "gen_ai.request.model": self._model,
            "error.type": record.error_type,
            "redraft.request_id": record.id,
        }
        if record.job is not None:
            sampling = record.job.sampling
            found |= {
                "gen_ai.response.model": self._model,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.seed": sampling.seed,
                "gen_ai.request.choice.count": record.job.choices if record.job.choices > 1 else None,
                "gen_ai.response.finish_reasons": record.finish_reasons,
            }
        found |= {name: figures[key] for key, name in _OF_FIGURES.items() if key in figures}
        return {name: value for name, value in found.items() if value is not None}
