"""What every test may use: the root of the project and the reference data beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from redraft.plugins.library import BUILD, CPU_LIBRARY, Kernels

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


@pytest.fixture(scope="session")
def lyanna_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a random drafter; not to be written to."""
    from tests.runtime.lyanna_bundle import write_lyanna_bundle

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return write_lyanna_bundle(tmp_path_factory.mktemp("lyanna"))


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The kernels built for the CPU by `make kernels-cpu`. Skips only where no C++ compiler could have built them."""
    path = BUILD / CPU_LIBRARY
    if not path.exists() and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler here to build the kernels for the CPU")
    return Kernels(path)
