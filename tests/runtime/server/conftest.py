"""A toy runtime and a client of its server, whose steps have known costs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from tests.runtime.fakes import know_costs
from tests.runtime.server.serving import client_of, toy


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    know_costs(monkeypatch)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with toy() as found:
        yield found


@pytest.fixture
def client(runtime: Runtime) -> TestClient:
    return client_of(runtime)


@pytest.fixture(scope="module")
def shared() -> Iterator[TestClient]:
    """A client of one server for all tests of a file."""
    with toy() as found:
        yield client_of(found)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found
