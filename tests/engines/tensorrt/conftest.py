"""A bundle with a drafter, for all tests of TensorRT's graphs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from redraft.engines import Bundle, open_bundle
from tests.export.drafters.tiny import Exported, export, make_verifier


@pytest.fixture(scope="session")
def drafted(lyanna_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A chain drafts. Tests write other graphs next to the portable ones."""
    folder = tmp_path_factory.mktemp("drafted") / "bundle"
    shutil.copytree(lyanna_bundle, folder, copy_function=os.link)
    return open_bundle(folder, verify=False)


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A chain of three steps. Tests write other graphs next to the portable ones."""
    folder = tmp_path_factory.mktemp("chain")
    (folder / "verifier").mkdir()
    return export(folder, make_verifier(folder / "verifier"))
