"""Options of `redraft build`: a recipe overridden by the command line, and the options that repeat a build."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any

from redraft.assembly.options import PrecisionOption, option_flag
from redraft.config import BuildConfig, TensorRtBuild
from redraft.errors import UsageError


class Amount(StrEnum):
    """How much text the quality is measured on."""

    short = "short"
    full = "full"


class Backend(StrEnum):
    """The backend that runs the engines."""

    onnxruntime = "onnxruntime"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"


class Attention(StrEnum):
    """Implementation of attention in TensorRT engines."""

    plugin = "plugin"
    native = "native"


class Weights(StrEnum):
    """Source of the weights."""

    checkpoint = "checkpoint"
    random = "random"


def choose(
    recipe: BuildConfig,
    precision: PrecisionOption | None,
    backend: Backend | None,
    weights: Weights,
    max_model_len: int | None,
) -> BuildConfig:
    """Return the recipe's configuration overridden by the command line."""
    chosen = precision or PrecisionOption(recipe.precision, recipe.target, recipe.bits)
    return replace(
        recipe,
        precision=chosen.precision,
        target=chosen.target,
        bits=chosen.bits,
        backend=backend.value if backend else recipe.backend,
        max_model_len=recipe.max_model_len if max_model_len is None else max_model_len,
        random_weights=weights is Weights.random or recipe.random_weights,
    )


def choose_tensorrt(
    config: BuildConfig, attention: Attention | None, embed_plugin: bool, batch: int | None, tree_nodes: int | None,
    ignore_memory: bool = False, compute_capability: str | None = None,
) -> TensorRtBuild:  # fmt: skip
    """Return the recipe's engines overridden by the command line. Raises UsageError if another backend is chosen."""
    given = {
        "attention": attention and attention.value, "embed_plugin": embed_plugin or None, "batch": batch,
        "tree_nodes": tree_nodes, "ignore_memory": ignore_memory or None, "compute_capability": compute_capability,
    }  # fmt: skip
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if values and not config.for_tensorrt:
        backend = "tensorrt" if compute_capability is None else "tensorrt-rtx"
        raise UsageError(
            f"{option_flag(next(iter(values)))} is for TensorRT engines", f"give --backend {backend} with it"
        )
    if config.backend == "tensorrt-rtx":
        if attention is Attention.plugin or embed_plugin:
            raise UsageError("TensorRT for RTX takes no plugins", "leave --attention and --embed-plugin out")
        values["attention"] = Attention.native.value
    elif compute_capability is not None:
        raise UsageError("TensorRT builds for the GPU here alone", "give --backend tensorrt-rtx with it")
    return replace(config.tensorrt, **values)
