"""Around the endpoints: limits of bodies, names of the server, and API keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re

from starlette.requests import Request

from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.settings import ServerSettings

_JSON = "application/json"
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_PROBED = ("/health", "/ready", "/metrics")
"""Probes and Prometheus ask for these by an address that nobody knows before."""


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Return a request's body. Raises ApiError for one that is not JSON (415), too large (413) or too slow (408).

    A page of another origin cannot send JSON unless the server allows its origin.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON:
        raise ApiError(415, f"the body must be JSON: send the header Content-Type: {_JSON}", code="not_json")
    most = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout:g} seconds"
        raise ApiError(408, message, code="body_timeout") from None
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes", code="body_too_large")


class HostCheck:
    """Refuses requests that name another server. A page can make its own name one of a loopback address, and the
    browser then takes the answers for the page's own. On other addresses than loopback ones, every name may be used for
    what probes and Prometheus ask: it tells no text of a request.
    """

    def __init__(self, settings: ServerSettings) -> None:
        own = f"[{settings.host}]" if ":" in settings.host else settings.host
        is_loopback = _is_loopback(settings.host)
        is_checked = bool(settings.allow_hosts) or is_loopback
        self._open = () if is_loopback else _PROBED
        self._names = {name.lower() for name in (*_LOCAL, own, *settings.allow_hosts)} if is_checked else None

    async def __call__(self, request: Request) -> None:
        """Raise ApiError (403) for a `Host` that the server does not have."""
        host = request.headers.get("host", "")
        name = re.sub(r":\d*$", "", host).lower()
        if self._names is not None and name not in self._names and request.scope["path"] not in self._open:
            raise ApiError(
                403, f"this server does not answer for the host {name[:80]!r}; --allow-host allows it",
                code="host_not_allowed",
            )  # fmt: skip


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class KeyCheck:
    """Refuses requests without one of the API keys. All keys are compared, each in constant time."""

    def __init__(self, settings: ServerSettings) -> None:
        self._digests = [_digest(key) for key in settings.api_keys]

    async def __call__(self, request: Request) -> None:
        """Raise ApiError (401) for a request without a key, if there are keys. Either of two headers may have it."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        bearer = key.strip() if scheme.lower() == "bearer" else ""
        given = [_digest(bearer), _digest(request.headers.get("x-api-key", ""))]
        if self._digests and not sum([hmac.compare_digest(one, digest) for one in given for digest in self._digests]):
            raise ApiError(
                401, "this server needs an API key: send the header Authorization: Bearer KEY", code="invalid_api_key"
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
