"""The verifier of most tests."""

from __future__ import annotations

import pytest

from .tiny import Verifier, make_verifier


@pytest.fixture(scope="session")
def little_verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    return make_verifier(tmp_path_factory.mktemp("little"))
