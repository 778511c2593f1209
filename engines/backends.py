"""Check that this machine can build engines for a backend, and name the package to install if it cannot."""

from __future__ import annotations

from importlib.util import find_spec

from redraft.config import BuildConfig
from redraft.engines.tensorrt.target import INSTALL
from redraft.engines.tensorrt.tools import find_tools
from redraft.errors import BackendError

_INSTEAD = "build with --backend onnxruntime (BACKEND=onnxruntime)"


def check_buildable(config: BuildConfig) -> None:
    """Raise BackendError naming the package to install if this machine cannot build this configuration."""
    if config.backend != "tensorrt":
        return
    if find_spec("tensorrt") is None:
        raise BackendError("backend tensorrt needs TensorRT, which is not installed", f"{INSTALL}, or {_INSTEAD}")
    find_tools(config)
