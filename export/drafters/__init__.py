"""Drafters as torch modules and graphs, one file for each method. They share `layer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

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


@dataclass(frozen=True)
class Exporter:
    """The functions by which a method writes graphs and tables of a drafter.

    trained: (id, DrafterCheckpoint, VerifierExport, Identity, folder, options, progress).
    random:  (id, the verifier's transformers configuration, VerifierExport, folder, options, progress).
    checkpoint: (id, the checkpoint of a decoder, VerifierExport, folder, options, progress), if the method takes one.
    All raise CheckpointError for a drafter that does not fit, and UsageError for options that do not.
    """

    trained: Callable[..., ExportedDrafter]
    random: Callable[..., ExportedDrafter]
    checkpoint: Callable[..., ExportedDrafter] | None = None


def find_exporter(method: str) -> Exporter:
    """Return the exporter of a method: `EXPORTER` of its own file."""
    exporter: Exporter = import_module(f"redraft.export.drafters.{method}_graphs").EXPORTER
    return exporter


def graph_file(drafter: str, role: str) -> str:
    """Return the file of a drafter's graph, relative to the bundle."""
    return f"{drafter_graph(drafter, role)}.onnx"
