"""One bundle with a drafter for all tests, and a cache folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from .lyanna_bundle import write_lyanna_bundle


@pytest.fixture(scope="session")
def lyanna_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a random drafter; not to be written to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return write_lyanna_bundle(tmp_path_factory.mktemp("lyanna"))
