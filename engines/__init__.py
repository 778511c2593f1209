"""Engine bundles: what is on disk, opening it, and running its graphs."""

from __future__ import annotations

from redraft import names
from redraft.engines.base import Engine
from redraft.engines.bundle import Bundle, BundleWriter, open_bundle

__all__ = ["Bundle", "BundleWriter", "open_bundle", "open_engine"]


def open_engine(bundle: Bundle, graph: str = names.VERIFIER, threads: int | None = None) -> Engine:
    """Load a graph of the bundle on the bundle's own backend. Raises BundleError."""
    from redraft.engines import onnxruntime_backend

    return onnxruntime_backend.open_engine(bundle, graph, threads)
