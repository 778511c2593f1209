"""What engines are built with on this machine: GPU, TensorRT, plugin."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.config import TensorRtBuild
from redraft.engines.tensorrt.plugin import Plugin, find_plugin
from redraft.engines.tensorrt.target import Target, find_target


@dataclass(frozen=True)
class Tools:
    """What engines are built with: all that a build's result depends on beside the graphs."""

    target: Target
    plugin: Plugin | None

    def digests(self) -> dict[str, str]:
        """Parts of a bundle's build key."""
        gpu = f"{self.target.gpu.name} {self.target.compute_capability}"
        return {"tensorrt": self.target.version, "gpu": gpu, "plugin": self.plugin.digest if self.plugin else ""}


def find_tools(options: TensorRtBuild) -> Tools:
    """GPU, TensorRT and plugin. Raises BackendError for the first that is missing."""
    target = find_target()
    return Tools(target, find_plugin(target.release[0]) if options.attention == "plugin" else None)
