"""The kernels of the CPU build, those of a GPU if one is here, and attention on CPUs by each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from redraft.plugins.library import Kernels, missing_kernels, open_kernels
from redraft.plugins.operators import Operators

from .attention import ISAS, Attention
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


@pytest.fixture(scope="session")
def attention(operators_library: Operators) -> Attention:
    """The kernels of `make operators`."""
    return Attention(operators_library.path)


@pytest.fixture(params=ISAS)
def used_attention(request: pytest.FixtureRequest, attention: Attention) -> Iterator[Attention]:
    """The library with one instruction set in use, then again with the best."""
    best = attention.isa
    if not attention.use(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield attention
    attention.use(best)
