"""Running a graph that is no bundle: every input and output bound to an array once, then called again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

Array = NDArray[Any]


def open_session(graph: Path, threads: int) -> ort.InferenceSession:
    """Load a graph on the CPU, sequentially executed, with all of ONNX Runtime's optimizations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def bound_call(
    session: ort.InferenceSession, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
) -> Callable[[], None]:
    """A function that runs the session on these arrays; an array under both names is updated in place."""
    binding = session.io_binding()
    values = {id(array): ort.OrtValue.ortvalue_from_numpy(array) for array in (*inputs.values(), *outputs.values())}
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, values[id(array)])
    for name, array in outputs.items():
        binding.bind_ortvalue_output(name, values[id(array)])

    def call() -> None:
        session.run_with_iobinding(binding)

    return call


def zeros(*shape: int) -> NDArray[np.float32]:
    """A float32 array of zeros."""
    return np.zeros(shape, np.float32)
