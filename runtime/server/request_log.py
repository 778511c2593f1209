"""Middleware that gives each HTTP request an id, counts it, and writes one line of the log and one span at its end."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redraft.runtime.server.logs import FIELDS
from redraft.runtime.server.request_record import RequestRecord, begin_record
from redraft.runtime.server.service import Service
from redraft.runtime.server.spans import SpanWriter

_LOG = logging.getLogger("redraft.requests")


class RequestLog:
    """Logs requests: of POST with the level `info`, others with `debug`, failures of the server with `warning`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._spans = SpanWriter(service.settings.model_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin_record(scope)
        self._service.open_answers += 1

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                ids = [(name.lower().encode(), value.encode()) for name, value in record.headers.items()]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            record.status, record.error = 500, "internal_error"
            raise
        finally:
            self._service.open_answers -= 1
            self._ended(record)

    def _ended(self, record: RequestRecord) -> None:
        seconds, figures = time.perf_counter() - record.started, record.figures()
        trace = self._spans.write(record, figures)
        level = logging.INFO if record.verb == "POST" else logging.DEBUG
        level = logging.WARNING if (record.status or 0) >= 500 else level
        if not _LOG.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": record.id,
            "trace_id": trace,
            "request": f"{record.verb} {record.path}",
            "status": record.status,
            "error": record.error_type,
            "seconds": seconds,
        }
        if figures:
            fields |= {"model": self._service.settings.model_name, "finish_reasons": record.finish_reasons, **figures}
        if self._service.settings.log_clients:
            fields["client"] = record.client
        if self._service.settings.log_prompts:
            fields |= self._texts(record)
        _LOG.log(level, "request", extra={FIELDS: fields})

    def _texts(self, record: RequestRecord) -> dict[str, list[str]]:
        """Return the prompts and answers, with their control tokens removed as in every answer."""
        if record.job is None:
            return {}
        decode = self._service.runtime.tokenizer.decode
        requests = [one.request for one in record.submissions]
        prompts = [decode(one.tokens[: one.prompt_length]) for one in requests[:: record.job.choices]]
        return {"prompts": prompts, "answers": [decode(one.new_tokens) for one in requests]}
