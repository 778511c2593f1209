"""The bundle of decoders that draft, which several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from .decoder_bundle import write_bundle


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `engines`, and the checkpoints that they are made of."""
    return write_bundle(tmp_path_factory.mktemp("decoders"))
