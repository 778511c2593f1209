"""TensorRT's two products, and all that differs between them: everything else of this package is for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """One product.

    backend:  its name in options and manifests.     title: its name in messages.
    module:   its Python package.                    install: how to get it.
    oldest, newest_major: versions that are supported.
    ahead:    its engines are for a compute capability and are built without a GPU. What depends on the GPU is compiled
              when an engine first runs, and kept in a runtime cache. It takes no plugins and no timing cache.
    """

    backend: str
    title: str
    module: str
    oldest: tuple[int, int]
    newest_major: int
    install: str
    ahead: bool = False


PACKAGE = "tensorrt>=10.9,<12"
"""TensorRT's package for pip."""
TENSORRT = Product(
    "tensorrt", "TensorRT", "tensorrt", (10, 9), 11, f"run `pip install '{PACKAGE}'`, or use NVIDIA's container"
)
RTX = Product(
    "tensorrt-rtx", "TensorRT for RTX", "tensorrt_rtx_bindings", (1, 7), 1, "run `pip install 'redraft[tensorrt-rtx]'`",
    ahead=True,
)  # fmt: skip
PRODUCTS: Mapping[str, Product] = {product.backend: product for product in (TENSORRT, RTX)}
