"""Several models behind one address: the field `model` of a request chooses the application that answers it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import prometheus_client
from anyio import to_thread
from fastapi import FastAPI
from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redraft.runtime.server.app import error_response
from redraft.runtime.server.errors import ApiError, unavailable
from redraft.runtime.server.http import HostCheck, KeyCheck, read_body
from redraft.runtime.server.metrics import CONTENT_TYPE
from redraft.runtime.server.service import Service

_SMALL_BODY = 64 << 10
"""Bytes of a body that is read in the event loop."""


def models_app(apps: Mapping[str, FastAPI]) -> ASGIApp:
    """Return the application of these models, each as `create_app` returns it, by their names."""
    return next(iter(apps.values())) if len(apps) == 1 else _ModelsApp(apps)


class _ModelsApp:
    """Hands requests with a body to the application of their model, and others to the first, but for what is of all.

    A body of an unknown model, or of none, goes to the first application, which refuses it in the form of its API.
    """

    def __init__(self, apps: Mapping[str, FastAPI]) -> None:
        self._apps = dict(apps)
        self._first = next(iter(apps.values()))
        self._services: list[Service] = [app.state.service for app in apps.values()]
        self._host_check, self._key_check = HostCheck(self._services[0].settings), KeyCheck(self._services[0].settings)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._first(scope, receive, send)
        request, whole = Request(scope, receive), None
        path = request.url.path.removeprefix(scope.get("root_path", ""))
        if request.method == "POST":
            try:
                await self._host_check(request)
                await self._key_check(request)
                body = await read_body(request, self._services[0].settings)
            except ApiError as error:
                return await error_response(request, error)(scope, receive, send)
            except ClientDisconnect:
                return None
            chosen = self._app_of(body) if len(body) <= _SMALL_BODY else await to_thread.run_sync(self._app_of, body)
            return await chosen(scope, _Replayed(body, receive), send)
        if path == "/v1/models" and request.method == "GET":
            whole = await self._models(scope)
        elif path == "/ready":
            whole = self._ready()
        elif path == "/metrics":
            whole = Response(prometheus_client.generate_latest(self._registry), media_type=CONTENT_TYPE)
        app = whole or next((app for name, app in self._apps.items() if path == f"/v1/models/{name}"), self._first)
        return await app(scope, receive, send)

    def _app_of(self, body: bytes) -> FastAPI:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return self._first
        name = asked.get("model") if isinstance(asked, dict) else None
        return self._apps.get(name, self._first) if isinstance(name, str) else self._first

    def _ready(self) -> Response:
        reasons = [
            f"{service.settings.model_name}: {why}" for service in self._services if (why := service.not_ready())
        ]
        if reasons:
            return unavailable("; ".join(reasons), "not_ready").response()
        return JSONResponse({"status": "ready"})

    async def _models(self, scope: Scope) -> Response:
        """Return the list of all models, or the first error: all applications have the same keys."""
        found = []
        for app in self._apps.values():
            status, body = await _asked(app, scope)
            if status != 200:
                return Response(body, status, media_type="application/json")
            found += json.loads(body)["data"]
        return JSONResponse({"object": "list", "data": found})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all models, whose names are labels."""
        families: dict[str, Metric] = {}
        for service in self._services:
            for metric in service.metrics.registry.collect():
                if metric.name in families:
                    families[metric.name].samples += metric.samples
                else:
                    families[metric.name] = metric
        yield from families.values()


class _Replayed:
    """Gives a body that was read, and then what the client sends."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _asked(app: ASGIApp, scope: Scope) -> tuple[int, bytes]:
    """Return the status and the body that an application answers to a request without a body."""
    status, body = 500, bytearray()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await app({**scope, "state": {}}, receive, send)
    return status, bytes(body)
