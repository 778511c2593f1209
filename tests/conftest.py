"""What every test may use: the root of the project and the reference data beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference data kept beside the project; skips where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside the project: reference checkpoints and prompts are not here")
    return folder
