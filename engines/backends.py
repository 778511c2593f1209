"""What can build engines on this machine, and what to install where it cannot."""

from __future__ import annotations

from importlib.util import find_spec

from redraft.config import Backend
from redraft.errors import BackendError

_INSTEAD = "build with --backend onnxruntime (BACKEND=onnxruntime)"


def check_buildable(backend: Backend) -> None:
    """Raise BackendError where engines for `backend` cannot be built here, naming what to install."""
    if backend != "tensorrt":
        return
    if find_spec("tensorrt") is None:
        raise BackendError(
            "backend tensorrt needs TensorRT, which is not installed", f"run `pip install tensorrt`, or {_INSTEAD}"
        )
    raise BackendError("TensorRT is installed, but this version of redraft writes ONNX graphs only", _INSTEAD)
