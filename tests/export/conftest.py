"""A fixture that shares exports of small random models between tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from redraft.config import Backend, BuildConfig, Precision
from redraft.export.checkpoint.safetensors import Checkpoint
from tests.export.models import Exported, export_verifier, traced_once, write_checkpoint

__all__ = ["traced_once"]


@pytest.fixture(scope="module")
def exports(traced_once: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """Exports small random models, each once: `exports(architecture, precision, backend, hidden_states, **sizes)`."""

    @cache
    def checkpoint(architecture: str, **sizes: Any) -> Checkpoint:
        return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp(architecture) / "model", architecture, **sizes))

    @cache
    def export(
        architecture: str, precision: Precision = "fp32", backend: Backend = "onnxruntime",
        hidden_states: tuple[str, ...] = (), **sizes: Any,
    ) -> Exported:  # fmt: skip
        folder = tmp_path_factory.mktemp(f"{architecture}-{backend}-{precision}")
        config = BuildConfig(precision=precision, backend=backend, hidden_states=hidden_states)
        source = checkpoint(architecture, **sizes)
        return Exported(export_verifier(source, folder, config), folder, source.path)

    return export
