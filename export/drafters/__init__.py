"""Drafters as torch modules and graphs, a few modules for each family of methods. They share `layer`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from redraft.methods import ROWS, find_method
from redraft.names import Precision, WeightRef, drafter_graph

if TYPE_CHECKING:
    from redraft.export.drafters.exporter import Exporter


@dataclass(frozen=True)
class ExportedDrafter:
    """One drafter in its verifier's folder: its shape, and the places of weights and tables.

    The file of each graph is `graph_file`.
    """

    shape: Any
    precision: Precision
    weights: tuple[WeightRef, ...]
    tables: tuple[WeightRef, ...]


def find_exporter(method: str) -> Exporter[Any]:
    """Return the exporter of a method: its family's `EXPORTER`."""
    specification, row = find_method(method), ROWS[method]
    exporter: Exporter[Any] = import_module(f"{__name__}.{row.family}").EXPORTER(specification, row)
    return exporter


def graph_file(drafter: str, role: str) -> str:
    """Return the file of a drafter's graph, relative to the bundle."""
    return f"{drafter_graph(drafter, role)}.onnx"
