"""The kernels of the CPU build, and those of a GPU if one is here."""

from __future__ import annotations

import pytest

from redraft.plugins.library import Kernels, missing_kernels, open_kernels

from .devices import missing_device


@pytest.fixture(scope="session")
def device_kernels() -> Kernels:
    """The kernels for the GPU. Skips without one, or if none were built; a library that does not load is an error."""
    if reason := missing_device() or missing_kernels():
        pytest.skip(reason)
    return open_kernels()


@pytest.fixture(params=["kernels", pytest.param("device_kernels", marks=pytest.mark.gpu)])
def any_kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of the CPU build, or in tests marked gpu those for the GPU."""
    kernels: Kernels = request.getfixturevalue(request.param)
    return kernels
