"""The page at `/`: static files of the folder `page`, which loads nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of each file. Nothing on the page comes from another origin, and no other page may frame it."""


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    tag: str

    def response(self, request: Request) -> Response:
        """Return the file, or status 304 if the browser has it."""
        headers = {**HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_routes() -> APIRouter:
    """Return the routes of the page. Its files are read once, so that no name in a path reaches the disk."""
    found = {path.name: _read(path.name) for path in files(__package__).joinpath("page").iterdir()}
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        """Return the page."""
        return found["index.html"].response(request)

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def part(request: Request, name: str) -> Response:
        """Return a file of the page. Answer 404 for another name."""
        if name not in found:
            raise HTTPException(404)
        return found[name].response(request)

    return routes


def _read(name: str) -> _File:
    content = files(__package__).joinpath("page", name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return _File(content, _TYPES[name[name.rindex(".") :]], tag)
