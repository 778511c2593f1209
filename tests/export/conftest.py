"""Fixtures that share traces, the slow part of an export, and whole exports between tests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any

import onnx_ir as ir
import pytest

from redraft.config import Backend, BuildConfig, Precision
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.graph import tracing
from redraft.export.graph.tracing import VerifierModule
from redraft.export.verifier import export_verifier
from redraft.signatures import VerifierShape
from tests.export.models import Exported, write_checkpoint


@pytest.fixture(scope="session")
def traces() -> dict[Hashable, ir.Model]:
    """The graphs of all models that `traced_once` has traced."""
    return {}


@pytest.fixture(scope="module")
def traced_once(traces: dict[Hashable, ir.Model]) -> Iterator[None]:
    """Trace equal models once. Weights have no part in a trace, so each export fills a copy of the graph with its own.

    For modules that test the steps after tracing.
    """
    trace = tracing.trace

    def shared(module: VerifierModule, shape: VerifierShape) -> ir.Model:
        key = inputs_of_trace(module, shape)
        if key not in traces:
            traces[key] = trace(module, shape)
        return traces[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace", shared)
        yield


@pytest.fixture(scope="module")
def exports(traced_once: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """Exports small random models, each once: `exports(architecture, precision, backend, **sizes)`."""

    @cache
    def checkpoint(architecture: str, **sizes: Any) -> Checkpoint:
        return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp(architecture) / "model", architecture, **sizes))

    @cache
    def export(
        architecture: str, precision: Precision = "fp32", backend: Backend = "onnxruntime", **sizes: Any
    ) -> Exported:
        folder = tmp_path_factory.mktemp(f"{architecture}-{backend}-{precision}")
        config = BuildConfig(precision=precision, backend=backend)
        return Exported(export_verifier(checkpoint(architecture, **sizes), folder, config), folder)

    return export


def inputs_of_trace(module: VerifierModule, shape: VerifierShape) -> Hashable:
    """Everything that a trace depends on: the configuration, the attention of each layer and the values of buffers."""
    network: Any = module.model
    buffers = tuple((name, values.dtype, repr(values.tolist())) for name, values in network.named_buffers())
    attention = repr(module.__dict__["recorded"].layers)
    return network.config.to_json_string(use_diff=False), attention, buffers, module.hidden_states, shape
