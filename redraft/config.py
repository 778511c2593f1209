"""Configuration that a recipe file, the command line and Python all build: frozen, validated, unknown keys refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from redraft.errors import UsageError

Precision = Literal["fp32", "int8", "int4"]
Backend = Literal["onnxruntime"]
T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` from `values`, refusing unknown keys by name."""
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"{where}: unknown key {', '.join(unknown)}", f"known keys are {', '.join(sorted(known))}")
    return cls(**values)


@dataclass(frozen=True)
class BuildConfig:
    """How a bundle is built from a checkpoint.

    precision:       of the matrix products: fp32, or weight-only int8 or int4.
    backend:         what runs the engines.
    context:         capacity in tokens; None takes the model's own limit.
    taps:            feature outputs wanted by drafters (`last`, or a layer number).
    random_weights:  use the checkpoint's shapes with random weights, for latency work only.
    """

    precision: Precision = "fp32"
    backend: Backend = "onnxruntime"
    context: int | None = None
    taps: tuple[str, ...] = ()
    random_weights: bool = False

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise UsageError(f"unknown precision {self.precision!r}", f"choose one of {', '.join(get_args(Precision))}")
        if self.backend not in get_args(Backend):
            raise UsageError(f"unknown backend {self.backend!r}", f"choose one of {', '.join(get_args(Backend))}")
        if not isinstance(self.taps, tuple) or not all(isinstance(tap, str) for tap in self.taps):
            raise UsageError(f"taps must be a list of strings, not {self.taps!r}")
        if self.context is not None and not isinstance(self.context, int):
            raise UsageError(f"context must be a number of tokens, not {self.context!r}")
        if self.context is not None and self.context < 2:
            raise UsageError(f"context must be at least 2 tokens, not {self.context}", "raise --context")
