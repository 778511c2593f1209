"""A server that drains or whose runtime is closed, its defaults, and its settings."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2 as httpx
import pytest
from anyio import to_thread

from redraft.errors import UsageError
from redraft.runtime.api import GREEDY
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.runtime.server.app import create_app
from redraft.runtime.server.parameters import Job
from redraft.runtime.server.settings import ServerSettings
from tests.runtime.server.serving import WAIT, ask, client_of, error_of, toy


def test_a_runtime_that_is_closed_is_no_fault_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as runtime:
        client, submit = client_of(runtime), runtime.submit

        def closed(*arguments: Any, **options: Any) -> Any:
            runtime.close()
            return submit(*arguments, **options)

        monkeypatch.setattr(runtime, "submit", closed)
        assert error_of(ask(client), 503)["code"] == "not_running"


def test_metrics_need_no_thread() -> None:
    async def scrape() -> int:
        limiter = to_thread.current_default_thread_limiter()
        limiter.total_tokens = 1
        await limiter.acquire()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await asyncio.wait_for(client.get("/metrics"), WAIT)).status_code

    with toy() as runtime:
        app = create_app(runtime, ServerSettings("toy"))
        assert asyncio.run(scrape()) == 200


def test_requests_have_the_defaults_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as runtime:
        greedy = ask(client_of(runtime)).json()
        assert ask(client_of(runtime)).json()["choices"] == greedy["choices"]
        monkeypatch.setattr(runtime, "model_sampling", lambda: type(GREEDY)(temperature=1.0, stop="c"))
        drawn = ask(client_of(runtime), seed=1).json()
        assert drawn["choices"][0]["finish_reason"] == "stop"
        assert ask(client_of(runtime), temperature=0, stop=[]).json()["choices"] == greedy["choices"]


@pytest.mark.parametrize(
    "wrong",
    [{"model_name": ""}, {"host": ""}, {"port": -1}, {"max_body_bytes": 0}, {"drain_timeout": 0},
     {"request_timeout": float("nan")}, {"api_keys": ("a b",)}, {"api_keys": ("",)}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServerSettings(**{"model_name": "toy", **wrong})


def test_what_is_submitted_for_a_client_that_has_left_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However its task was cancelled, also while its requests are being submitted."""
    begun, go_on = threading.Event(), threading.Event()
    with toy() as runtime:
        service = create_app(runtime, ServerSettings("toy")).state.service
        submit = service._submit

        def slow(*given: Any) -> Any:
            begun.set()
            assert go_on.wait(WAIT)
            return submit(*given)

        monkeypatch.setattr(service, "_submit", slow)

        async def leave() -> None:
            job = Job(SamplingParams(max_tokens=150, ignore_eos=True), SpeculationParams("none"))
            task = asyncio.create_task(service.submit([[97, 98]], job))
            await to_thread.run_sync(begun.wait, WAIT)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            while not service.metrics.sums().ends:
                await asyncio.sleep(0.005)

        asyncio.run(asyncio.wait_for(leave(), WAIT))
        assert dict(service.metrics.sums().ends) == {"abort": 1}
        assert not service._running
