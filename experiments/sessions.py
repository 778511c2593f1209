"""Opening a graph that is no bundle as an engine would be: same options, same pages, so that graphs compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from redraft.engines.huge_pages import huge_pages


def open_session(graph: Path, threads: int) -> ort.InferenceSession:
    """Load a graph on the CPU, sequentially executed, with all of ONNX Runtime's optimizations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    with huge_pages():
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def zeros(*shape: int) -> NDArray[np.float32]:
    """A float32 array of zeros."""
    return np.zeros(shape, np.float32)
