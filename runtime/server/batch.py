"""`GET /batch`: the requests that run or wait now, as the page at `/` shows them. It has no text and no user."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from redraft.runtime.requests.request import Request
from redraft.runtime.server.service import Service

MOST_REQUESTS = 64
"""Requests that an answer lists."""


def batch_routes(service: Service) -> APIRouter:
    """Return the route of the batch."""
    routes = APIRouter()

    @routes.get("/batch")
    async def batch() -> dict[str, Any]:
        """Return the requests that run or wait, without texts, and the server's counters since it began."""
        return batch_of(service)

    return routes


def batch_of(service: Service) -> dict[str, Any]:
    """Return the batch of a server, at most MOST_REQUESTS of its requests.

    slots:    requests that may run at once.   running, waiting: numbers of requests.
    kv_cache_usage: filled share of the rows, from 0 to 1.
    tokens, steps: of all answers since the server began.   decode_ms, plain_decode_ms: as the metrics
              `decode_seconds` and `plain_decode_seconds`, of which both grow only while drafts adapt.
    requests: `row_of` each.
    """
    runtime, now = service.runtime, time.perf_counter()
    health, gain, sums = runtime.health, runtime.gain, service.metrics.sums()
    waiting = min(health.waiting, health.requests)  # another thread changes them
    return {
        "slots": runtime.slots,
        "running": health.requests - waiting,
        "waiting": waiting,
        "kv_cache_usage": health.kv_usage,
        "tokens": sums.tokens,
        "steps": sums.steps,
        "decode_ms": gain.spent_ms,
        "plain_decode_ms": gain.plain_ms,
        "requests": [row_of(request, now, runtime.replica_of(request)) for request in runtime.running[:MOST_REQUESTS]],
    }


def row_of(request: Request, now: float, replica: str | None) -> dict[str, Any]:
    """Return the figures of a request. now: seconds of `time.perf_counter`.

    state: `waiting` without a slot, `prompt` while rows of its tokens are computed, then `decoding`.
    rows:  rows in the KV cache.   seconds: since it arrived.   replica: the one that works on it, if there are some.
    """
    counters = request.counters
    state = "waiting" if request.slot < 0 else "prompt" if request.missing_rows > 0 else "decoding"
    return {
        "state": state,
        "method": request.speculation.method,
        "prompt_tokens": request.prompt_length,
        "tokens": len(request.tokens) - request.prompt_length,
        "rows": request.num_computed_tokens,
        "steps": counters.steps,
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "seconds": round(now - request.started, 3),
        **({} if replica is None else {"replica": replica}),
    }
