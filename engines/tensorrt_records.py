"""TensorRT engines in a bundle's manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from redraft.names import TensorSpec

Attention = Literal["plugin", "native"]
"""Implementation of `redraft::TreeAttention`: our plugin, or TensorRT's own layers."""


def weights_file(graph: str) -> str:
    """Return the name of the file for weights that only the prepared graph has: those that are merged by copying."""
    return f"{graph}.tensorrt.weights"


@dataclass(frozen=True)
class Range:
    """Sizes of one input in a profile: smallest, tuned for, largest.

    An input with sizes as values (`kv_len` without the plugin) has a range of values.
    """

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """One optimization profile: ranges by input. Fixed inputs are left out."""

    name: str
    inputs: Mapping[str, Range]

    def sizes(self, inputs: Sequence[TensorSpec], which: Literal["min", "opt", "max"]) -> dict[str, int]:
        """Return the smallest, tuned or largest size of every symbol of a graph's inputs."""
        shapes = {spec.name: spec.shape for spec in inputs}
        return {
            dim: size
            for name, ranges in self.inputs.items()
            for dim, size in zip(shapes[name], getattr(ranges, which), strict=True)
            if isinstance(dim, str)
        }


@dataclass(frozen=True)
class EngineRecord:
    """One engine of a bundle. `graph` is the file that was parsed; `profiles` are in the engine's order."""

    file: str
    graph: str
    profiles: tuple[Profile, ...]


@dataclass(frozen=True)
class TensorRtRecord:
    """The TensorRT and GPU that the engines are for, and the plugin that they need.

    plugin:        SHA-256 of the plugin's library; empty if TensorRT computes attention itself.
    plugin_file:   its file in the bundle; empty without a plugin, or if it is part of the engines.
    engines:       by graph name.
    """

    version: str
    gpu: str
    compute_capability: str
    attention: Attention
    plugin: str = ""
    plugin_file: str = ""
    engines: Mapping[str, EngineRecord] = field(default_factory=dict)
