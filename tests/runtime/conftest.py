"""Calls that cost the same on every machine, and the texts that no drafter may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.runtime import Runtime
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import Verifier
from tests.conftest import Once

from .fakes import fix_costs


@pytest.fixture(autouse=True)
def drafters_work(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a drafter or controller raised, since no text shows it, unless marked."""
    errors: list[Exception] = []
    stop = Request.stop_drafting

    def noted(self: Request, error: Exception) -> None:
        errors.append(error)
        stop(self, error)

    monkeypatch.setattr(Request, "stop_drafting", noted)
    yield
    if request.node.get_closest_marker("faulty_drafts") is None:
        assert not errors, errors


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are fixed, and time stands still."""
    fix_costs(monkeypatch)


@pytest.fixture
def unwarmed(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, and requests prepare shapes while they run."""
    monkeypatch.setattr(Verifier, "warm", lambda self: None)


@pytest.fixture(scope="session")
def several(once: Once) -> Path:
    """A bundle with several drafters, for reading only. Its verifier is that of `lyanna_bundle`."""
    from .lyanna_bundle import write_several

    return once(write_several) / "engines"


@pytest.fixture(scope="session")
def plain(lyanna_bundle: Path) -> list[list[int]]:
    """The host's tokens after ALL, without drafts. Some end early, at an end-of-sequence token or a full context."""
    from .lyanna_bundle import ALL, PARAMS

    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        with Runtime.open(lyanna_bundle, threads=1, verify=False) as runtime:
            texts = [list(g.token_ids) for g in runtime.generate(ALL, PARAMS, "none")]
    assert len({len(text) for text in texts}) > 2
    return texts
