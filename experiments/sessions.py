"""Opening a graph without a bundle like an engine: same options, same pages, so that graphs compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from redraft.engines.host_memory import huge_pages
from redraft.engines.onnxruntime_backend import session_options


def open_session(
    graph: Path | bytes, threads: int, entries: Mapping[str, str] | None = None, profile: str | None = None
) -> ort.InferenceSession:
    """Load a graph on the CPU with the options of engines.

    entries: configuration by key.   profile: beginning of the name of the file that gets ONNX Runtime's profile.
    """
    options = session_options(threads, "error")
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    with huge_pages():
        return ort.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), options, providers=["CPUExecutionProvider"]
        )


def zeros(*shape: int) -> NDArray[np.float32]:
    """Return a float32 array of zeros."""
    return np.zeros(shape, np.float32)
