"""The application: the endpoints of OpenAI and Anthropic, and those by which operators watch a server."""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from redraft import __version__
from redraft.errors import RedraftError
from redraft.runtime.server.anthropic_answer import anthropic_response
from redraft.runtime.server.anthropic_fields import CountTokensRequest, MessagesRequest
from redraft.runtime.server.batch import batch_routes
from redraft.runtime.server.document import complete
from redraft.runtime.server.errors import ApiError, api_error, unavailable
from redraft.runtime.server.fields import ChatRequest, CompletionRequest, DetokenizeRequest, Fields, TokenizeRequest
from redraft.runtime.server.http import HostCheck, KeyCheck
from redraft.runtime.server.metrics import CONTENT_TYPE, ServerMetrics
from redraft.runtime.server.page import page_routes
from redraft.runtime.server.reloading import DrafterReload
from redraft.runtime.server.request_log import RequestLog
from redraft.runtime.server.request_record import REQUEST_ID, current_record
from redraft.runtime.server.responses_fields import ResponsesRequest
from redraft.runtime.server.served import Served
from redraft.runtime.server.service import Service
from redraft.runtime.server.settings import ServerSettings
from redraft.runtime.server.streaming import CLIENT_LEFT
from redraft.runtime.server.translated import TranslatedEndpoints

_LOG = logging.getLogger("redraft.server")
_BODIES: tuple[type[Fields], ...] = (
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountTokensRequest, TokenizeRequest,
    DetokenizeRequest,
)  # fmt: skip
_MESSAGES = "/v1/messages"
_SCHEMAS = "#/components/schemas/"


def create_app(runtime: Served, settings: ServerSettings) -> FastAPI:
    """Return the ASGI application of a server. It does not close the runtime.

    Its `state.service` is the `Service`; with `reload_drafter`, its `state.reload` is the `DrafterReload`.

    Raises BundleError if the bundle's sampling defaults are damaged.
    """
    service = Service(runtime, settings, ServerMetrics(runtime, settings.model_name))
    host_check = HostCheck(settings)
    app = FastAPI(
        title="redraft", version=__version__, openapi_url=None, docs_url=None, redoc_url=None,  # pages load scripts
        dependencies=[Depends(host_check)], redirect_slashes=False,  # a redirect would go to any Host
    )  # fmt: skip
    app.state.service = service
    with_key = [Depends(KeyCheck(settings))]
    app.include_router(_model_routes(TranslatedEndpoints(service)), dependencies=with_key)
    app.include_router(batch_routes(service), dependencies=with_key)
    app.include_router(_operator_routes(service))
    app.include_router(page_routes())
    app.include_router(_document_route(app))
    _handle_errors(app, service, host_check)
    if settings.reload_drafter:
        app.state.reload = DrafterReload(service)
        app.include_router(app.state.reload.routes(), dependencies=with_key)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allow_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )  # fmt: skip
    app.add_middleware(RequestLog, service=service)
    return app


def _model_routes(endpoints: TranslatedEndpoints) -> APIRouter:
    routes = APIRouter()
    routes.post("/v1/chat/completions", **_takes(ChatRequest))(endpoints.chat)
    routes.post("/v1/completions", **_takes(CompletionRequest))(endpoints.complete)
    routes.post("/v1/responses", **_takes(ResponsesRequest))(endpoints.respond)
    routes.post(_MESSAGES, **_takes(MessagesRequest))(endpoints.message)
    routes.post(f"{_MESSAGES}/count_tokens", **_takes(CountTokensRequest))(endpoints.count_tokens)
    routes.post("/tokenize", **_takes(TokenizeRequest))(endpoints.tokenize)
    routes.post("/detokenize", **_takes(DetokenizeRequest))(endpoints.detokenize)
    routes.get("/v1/models")(endpoints.models)
    routes.get("/v1/models/{name:path}")(endpoints.model)
    return routes


def _operator_routes(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Answer as long as the process can."""
        return {"status": "ok"}

    @routes.get("/ready")
    async def ready() -> dict[str, str]:
        """Answer 503 with the reason if the server cannot work on requests."""
        if reason := service.not_ready():
            raise unavailable(reason, "not_ready")
        return {"status": "ready"}

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics for Prometheus. They need no thread, since requests may hold all of them."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of redraft."""
        return {"version": __version__}

    return routes


def _document_route(app: FastAPI) -> APIRouter:
    """Return the route of the OpenAPI document, which its first request builds in a thread."""
    routes = APIRouter()
    text = cache(lambda: json.dumps(_document(app)))

    @routes.get("/openapi.json", include_in_schema=False)
    def openapi() -> Response:
        return Response(text(), media_type="application/json")

    return routes


def _handle_errors(app: FastAPI, service: Service, host_check: HostCheck) -> None:
    """Give every error the form of its API, and count the requests that were refused."""

    async def refused(request: Request, error: Exception) -> Response:
        found = error if isinstance(error, ApiError) else api_error(error)  # type: ignore[arg-type]
        if (record := current_record()) is not None:
            record.error = found.code
        if found.code and (found.status < 500 or found.status == 503) and request.url.path != "/ready":
            service.metrics.refused(found.code)
        return error_response(request, found)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        try:
            await host_check(request)
        except ApiError as other_host:
            return await refused(request, other_host)
        found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        response = error_response(request, found)
        response.headers.update(error.headers or {})
        return response

    async def failed(request: Request, error: Exception) -> Response:
        _LOG.error("a request failed by a fault of the server", exc_info=error)
        response = error_response(request, ApiError(500, "the server failed", code="internal_error"))
        if (record := current_record()) is not None:  # this response passes the middleware by
            response.headers.update(record.headers)
        return response

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RedraftError, refused)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, failed)


def error_response(request: Request, error: ApiError) -> Response:
    """Return an error in the form of the API that the request uses."""
    return anthropic_response(error) if request.url.path.startswith(_MESSAGES) else error.response()


def _takes(model: type[Fields]) -> dict[str, Any]:
    """Return options of an endpoint that reads its body itself."""
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}, "response_class": JSONResponse}


def _document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the models of all bodies and answers."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_SCHEMAS + "{model}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return complete(document, app.state.service.settings)
