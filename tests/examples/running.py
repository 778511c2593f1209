"""Examples as modules, over toy runtimes."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest

from redraft.runtime import Runtime
from tests.conftest import ROOT
from tests.runtime.fakes import Rule, know_costs, make_runtime, mixing_rule
from tests.runtime.server.serving import TEMPLATE


def load(name: str) -> ModuleType:
    """Return the module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_toys(monkeypatch: pytest.MonkeyPatch, rule: Rule = mixing_rule) -> list[Runtime]:
    """Let `Runtime.open` open toy runtimes. Returns the list of those that were opened."""
    opened: list[Runtime] = []

    def opening(path: object, max_num_seqs: int = 1, **options: Any) -> Runtime:
        opened.append(make_runtime(rule, max_num_seqs=max_num_seqs, template=TEMPLATE))
        return opened[-1]

    know_costs(monkeypatch)
    monkeypatch.setattr(Runtime, "open", opening)
    return opened
