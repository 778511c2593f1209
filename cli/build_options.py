"""What is built: a recipe with what the command line says instead; and the options that would say so again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any

from redraft.config import RANDOM, BuildConfig, LyannaBuild, TensorRtBuild
from redraft.errors import UsageError

NO_DRAFTER = "none"
_OWN_FLAGS = {"source": "--lyanna", "token_info": "--token-info"}


class Precision(StrEnum):
    """Of the matrix products."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


class TokenInfo(StrEnum):
    """Of Lyanna's drafter."""

    fp16 = "fp16"
    int8 = "int8"
    fp8 = "fp8"
    lowrank = "lowrank"


class Backend(StrEnum):
    """What runs the engines."""

    onnxruntime = "onnxruntime"
    tensorrt = "tensorrt"


class Attention(StrEnum):
    """Who computes attention in TensorRT engines."""

    plugin = "plugin"
    native = "native"


class Weights(StrEnum):
    """Where the weights come from."""

    checkpoint = "checkpoint"
    random = "random"


def choose(
    recipe: BuildConfig,
    precision: Precision | None,
    backend: Backend | None,
    weights: Weights,
    max_model_len: int | None,
) -> BuildConfig:
    """The recipe's configuration with what the command line says instead."""
    return replace(
        recipe,
        precision=precision.value if precision else recipe.precision,
        backend=backend.value if backend else recipe.backend,
        max_model_len=recipe.max_model_len if max_model_len is None else max_model_len,
        random_weights=weights is Weights.random or recipe.random_weights,
    )


def choose_lyanna(
    config: BuildConfig, source: str | None, token_info: TokenInfo | None, options: Sequence[str] = ()
) -> LyannaBuild | None:
    """The recipe's drafter with what the command line says instead. None where there is none.

    options: KEY=VALUE, fields of `LyannaBuild`. Raises UsageError for what is none of them or does not fit.
    """
    if source is None:
        chosen = _implied(config, config.random_weights)
    else:
        chosen = replace(config.lyanna or LyannaBuild(), source=source) if source != NO_DRAFTER else None
    values = _values(options) | ({"token_info": token_info.value} if token_info else {})
    if not values:
        return chosen
    if chosen is None:
        flag = "--token-info" if token_info else "--drafter-option"
        raise UsageError(f"{flag} is for a Lyanna drafter, and none is built", "give --lyanna DIR")
    return replace(chosen, **values)


def choose_tensorrt(
    config: BuildConfig, attention: Attention | None, embed_plugin: bool, batch: int | None, tree_nodes: int | None,
    ignore_memory: bool = False,
) -> TensorRtBuild:  # fmt: skip
    """The recipe's engines with what the command line says instead. Raises UsageError beside another backend."""
    said = {
        "attention": attention and attention.value, "embed_plugin": embed_plugin or None, "batch": batch,
        "tree_nodes": tree_nodes, "ignore_memory": ignore_memory or None,
    }  # fmt: skip
    values: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if values and config.backend != "tensorrt":
        raise UsageError(f"{_flag(next(iter(values)))} is for TensorRT engines", "give --backend tensorrt with it")
    return replace(config.tensorrt, **values)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _implied(recipe: BuildConfig, random_weights: bool) -> LyannaBuild | None:
    """The drafter that is built where nothing is said: a random one beside random weights.

    A recipe may have settings without a drafter: they wait for one.
    """
    if recipe.lyanna is None or (recipe.lyanna.source is None and not random_weights):
        return None
    return replace(recipe.lyanna, source=RANDOM) if random_weights else recipe.lyanna


def _values(options: Sequence[str]) -> dict[str, Any]:
    known = [field.name for field in fields(LyannaBuild) if field.name not in _OWN_FLAGS]
    values: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in known or not value:
            raise UsageError(f"--drafter-option {option!r}: expected KEY=VALUE", f"keys are {', '.join(known)}")
        values[key] = int(value) if value.isdecimal() else value
    return values


def options_of(recipe: BuildConfig, config: BuildConfig) -> tuple[str, ...]:
    """The options of `redraft build` that make `config` of `recipe`."""
    options: list[str] = []
    if config.precision != recipe.precision:
        options += ["--precision", config.precision]
    if config.backend != recipe.backend:
        options += ["--backend", config.backend]
    if config.max_model_len != recipe.max_model_len:
        options += ["--max-model-len", str(config.max_model_len)]
    if config.random_weights and not recipe.random_weights:
        options += ["--weights", Weights.random.value]
    for name in ("attention", "batch", "tree_nodes"):
        if getattr(config.tensorrt, name) != getattr(recipe.tensorrt, name):
            options += [_flag(name), str(getattr(config.tensorrt, name))]
    for name in ("embed_plugin", "ignore_memory"):
        if getattr(config.tensorrt, name) and not getattr(recipe.tensorrt, name):
            options.append(_flag(name))
    return (*options, *_drafter_options(recipe, config))


def _drafter_options(recipe: BuildConfig, config: BuildConfig) -> list[str]:
    chosen, implied = config.lyanna, _implied(recipe, config.random_weights)
    if chosen is None or chosen.source is None:
        return ["--lyanna", NO_DRAFTER] if implied else []
    options = [] if implied and implied.source == chosen.source else ["--lyanna", chosen.source]
    base = replace(recipe.lyanna or LyannaBuild(), source=chosen.source)
    if chosen.token_info != base.token_info:
        options += ["--token-info", chosen.token_info]
    for name in (field.name for field in fields(LyannaBuild) if field.name not in _OWN_FLAGS):
        if getattr(chosen, name) != getattr(base, name):
            options += ["--drafter-option", f"{name}={getattr(chosen, name)}"]
    return options
