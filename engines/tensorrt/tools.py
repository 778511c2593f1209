"""The tools that build engines on this machine: GPU, TensorRT, plugin."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.config import BuildConfig
from redraft.engines.tensorrt.plugin import Plugin, find_plugin
from redraft.engines.tensorrt.products import PRODUCTS
from redraft.engines.tensorrt.target import Target, check_native, check_precision, find_target


@dataclass(frozen=True)
class Tools:
    """The tools of a build: with the graphs, they decide its result."""

    target: Target
    plugin: Plugin | None

    def digests(self) -> dict[str, str]:
        """Parts of a bundle's build key."""
        gpu = f"{self.target.gpu.name} {self.target.compute_capability}"
        return {"tensorrt": self.target.version, "gpu": gpu, "plugin": self.plugin.digest if self.plugin else ""}


def find_tools(config: BuildConfig) -> Tools:
    """Return GPU, TensorRT and plugin. Raises BackendError if one is missing or does not support the build."""
    product = PRODUCTS[config.backend]
    target = find_target(product=product, capability=config.tensorrt.compute_capability)
    check_precision(config.precision, target.gpu)
    if config.tensorrt.attention == "plugin" and not product.ahead:
        return Tools(target, find_plugin(target.release[0]))
    check_native(target.release)
    return Tools(target, None)
