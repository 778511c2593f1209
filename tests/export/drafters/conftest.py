"""The verifier of most tests, and faster traces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from onnxscript.values import TracedOnnxFunction

from .tiny import Verifier, make_verifier


@pytest.fixture(scope="session")
def little_verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    return make_verifier(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="session", autouse=True)
def operators_parsed_once() -> Iterator[None]:
    """Each trace parses the Python sources of 500 operators again, in a fifth of its time. They do not change."""
    parsed: Any = TracedOnnxFunction.function_ir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TracedOnnxFunction, "function_ir", property(cache(parsed.fget)))
        yield
