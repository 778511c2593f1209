"""The CPU build of the kernels, made by `make kernels-cpu`."""

from __future__ import annotations

import shutil

import pytest

from redraft.plugins.library import BUILD, CPU_LIBRARY, Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The kernels on the CPU. Skips only where no C++ compiler could have built them."""
    path = BUILD / CPU_LIBRARY
    if not path.exists() and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler here to build the kernels for the CPU")
    return Kernels(path)
