"""The bundle of decoders that draft, which several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Once

from .decoder_bundle import write_bundle


@pytest.fixture(scope="session")
def folder(once: Once) -> Path:
    """A folder with `engines`, and the checkpoints that they are made of; for reading only."""
    return once(write_bundle)
