"""Sessions of graphs that belong to no bundle."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from redraft.engines.onnxruntime_backend import session_options


def session_of(graph: Path) -> ort.InferenceSession:
    """Load a graph on one thread, like engines."""
    return ort.InferenceSession(str(graph), session_options(1, "error"), providers=["CPUExecutionProvider"])
