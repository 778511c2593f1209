"""`--reload-drafter`: SIGHUP, or a request, reads the bundle's drafters again while the server answers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from redraft.errors import RedraftError
from redraft.runtime.server.errors import ApiError, without_paths
from redraft.runtime.server.fields import Fields, parse
from redraft.runtime.server.http import read_body
from redraft.runtime.server.service import Service

_LOG = logging.getLogger("redraft.server")


class ReloadRequest(Fields):
    """The body of /v1/drafters/reload, which has no fields."""


class DrafterReload:
    """Reads the drafters of the server's bundle again, once at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def reload(self) -> tuple[str, ...]:
        """Return the ids of the drafters that changed. Logs the result. Raises RedraftError if all stay as they are."""
        async with self._lock:
            try:
                changed = await to_thread.run_sync(self._service.runtime.reload_drafters)
            except RedraftError as error:
                _LOG.error("the drafters stay as they are: %s", error)
                raise
        _LOG.info("drafters read again; changed: %s", ", ".join(changed) or "none")
        return changed

    def begin(self) -> None:
        """Begin to reload in this event loop, for a signal's handler."""
        task = asyncio.ensure_future(self._logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _logged(self) -> None:
        try:
            await self.reload()
        except RedraftError:
            pass  # it is in the log
        except Exception:  # noqa: BLE001 - a signal has no caller
            _LOG.exception("the drafters could not be read again")

    async def answer(self, request: Request) -> dict[str, Any]:
        """Read the bundle's drafters again. The answer has the ids of those that changed, and all methods."""
        settings = self._service.settings
        parse(ReloadRequest, await read_body(request, settings), settings.allow_unknown_fields)
        try:
            changed = await self.reload()
        except RedraftError as error:
            raise ApiError(409, without_paths(str(error)), code="reload_failed") from error
        return {"changed": changed, "methods": self._service.runtime.methods}

    def routes(self) -> APIRouter:
        """Return the route of the request."""
        routes = APIRouter()
        schema = {"type": "object", "title": ReloadRequest.__name__}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        routes.post("/v1/drafters/reload", openapi_extra={"requestBody": body})(self.answer)
        return routes
