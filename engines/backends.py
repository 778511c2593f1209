"""Check that this machine can build engines for a backend, and name the package to install if it cannot."""

from __future__ import annotations

from importlib.util import find_spec

from redraft.config import BuildConfig
from redraft.engines.tensorrt.products import PRODUCTS
from redraft.engines.tensorrt.tools import Tools, find_tools
from redraft.errors import BackendError

_INSTEAD = "build with --backend onnxruntime (BACKEND=onnxruntime)"


def check_buildable(config: BuildConfig) -> Tools | None:
    """Return the tools of a build for TensorRT, None for another backend.

    Raises BackendError naming the package to install if this machine cannot build this configuration.
    """
    if not config.for_tensorrt:
        return None
    product = PRODUCTS[config.backend]
    if find_spec(product.module) is None:
        raise BackendError(
            f"backend {product.backend} needs {product.title}, which is not installed",
            f"{product.install}, or {_INSTEAD}",
        )
    return find_tools(config)
