"""A drafter whose graphs are exported once for all tests of TensorRT's graphs."""

from __future__ import annotations

import pytest

from tests.export.drafters.tiny import Exported, export, make_verifier


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A chain of three steps. Tests write other graphs next to the portable ones."""
    folder = tmp_path_factory.mktemp("chain")
    (folder / "verifier").mkdir()
    return export(folder, make_verifier(folder / "verifier"))
