"""Drafters as torch modules and graphs, one file for each method. They share `layer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from redraft.config import Precision
from redraft.names import WeightRef, drafter_graph


@dataclass(frozen=True)
class ExportedDrafter:
    """One drafter in its verifier's folder: its shape, and the places of weights and tables.

    The file of each graph is `graph_file`.
    """

    shape: Any
    precision: Precision
    weights: tuple[WeightRef, ...]
    tables: tuple[WeightRef, ...]


class NativeDrafter(Protocol):
    """A drafter inside of a verifier's checkpoint."""

    @property
    def description(self) -> str:
        """One line about it."""

    @property
    def hidden_states(self) -> tuple[str, ...]:
        """The verifier's hidden states that it reads."""

    @property
    def files(self) -> tuple[str, ...]:
        """The checkpoint's files that hold it, sorted."""


@dataclass(frozen=True)
class NativeExporter:
    """The functions for drafters inside of verifiers' checkpoints.

    find:   the verifier's checkpoint -> NativeDrafter.
    export: (id, the verifier's checkpoint, VerifierExport, folder, options, progress).
    Both raise CheckpointError if the checkpoint has none, or an incomplete one.
    """

    find: Callable[[Any], NativeDrafter]
    export: Callable[..., ExportedDrafter]


@dataclass(frozen=True)
class Exporter:
    """The functions by which a method writes graphs and tables of a drafter.

    configure: (DrafterCheckpoint, options) -> DrafterConfig. It needs no verifier, so a build calls it first.
    trained: (id, DrafterCheckpoint, VerifierExport, Identity, folder, options, progress).
    random:  (id, the verifier's transformers configuration, VerifierExport, folder, options, progress).
    checkpoint: (id, the checkpoint of a decoder, VerifierExport, folder, options, progress), if the method takes one.
    native:  for drafters inside of verifiers' checkpoints, if the method has such.
    All raise CheckpointError for a drafter that does not fit, and UsageError for options that do not.
    """

    configure: Callable[[Any, Any], Any]
    trained: Callable[..., ExportedDrafter]
    random: Callable[..., ExportedDrafter]
    checkpoint: Callable[..., ExportedDrafter] | None = None
    native: NativeExporter | None = None


def find_exporter(method: str) -> Exporter:
    """Return the exporter of a method: `EXPORTER` of its own file."""
    exporter: Exporter = import_module(f"redraft.export.drafters.{method}_graphs").EXPORTER
    return exporter


def graph_file(drafter: str, role: str) -> str:
    """Return the file of a drafter's graph, relative to the bundle."""
    return f"{drafter_graph(drafter, role)}.onnx"
