"""The request of a build: its precisions and drafters as text, and the options that repeat it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from redraft.assembly.progress import Reporter
from redraft.config import NATIVE, RANDOM, Backend, BuildConfig, DrafterBuild, Precision, TensorRtBuild
from redraft.errors import UsageError
from redraft.methods import built_methods, find_method, native_method

NO_DRAFTER, ALL_DRAFTERS = "none", "all"
_WHOLE = re.compile(r"-?[0-9]{1,18}")
"""A whole number. The method refuses one that is out of range."""
_WORDS = {"true": True, "false": False}
DRAFTER_FORM = "[ID=]DIR[,KEY=VALUE…]"
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TARGET, KV = "target", "kv"
PRECISION_FORM = "PRECISION[,KEY=VALUE…][,PRECISION…]"
WEIGHT_BITS = (4, 8, 32)
DEFAULT_TOKENS, FULL_TOKENS = 1000, 6000
"""Tokens of all kinds together by default, and with `--quality full`."""


@dataclass(frozen=True)
class BuildRequest:
    """A build as the user asks for it. None and empty values leave the choice to the recipe.

    model:      a recipe, a checkpoint's folder, a GGUF file or a Hugging Face id.
    out:        the bundle. Several precisions make a bundle each, OUT-PRECISION.
    model_path: the recipe's checkpoint, instead of its own source.
    precision:  PRECISION_FORM.   drafters: each DRAFTER_FORM, or `none` or `all`.
    tensorrt:   fields of `TensorRtBuild` by name, only those that the user gave.
    texts:      held-out text by kind; None takes redraft's own if the precision is measured by default.
    tokens:     number of the texts' tokens to measure.
    check:      compare the engines with transformers' model.   force: build even if the bundle is current.
    """

    model: str
    out: Path | None = None
    model_path: Path | None = None
    precision: str | None = None
    backend: Backend | None = None
    random_weights: bool = False
    max_model_len: int | None = None
    drafters: tuple[str, ...] = ()
    tensorrt: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] | None = None
    tokens: int = DEFAULT_TOKENS
    check: bool = True
    force: bool = False


def configurations(request: BuildRequest, recipe: BuildConfig) -> list[BuildConfig]:
    """Return a configuration for each precision: the recipe's, overridden by the request. Raises UsageError.

    Its drafters are the recipe's, for `choose_drafters`.
    """
    precisions = [PrecisionOption(recipe.precision, recipe.target, recipe.bits, recipe.kv)]
    if request.precision is not None:
        precisions = parse_precisions(request.precision)
    common = replace(
        recipe,
        precision="fp32",
        kv=None,
        target=None,
        bits=(),
        backend=request.backend or recipe.backend,
        max_model_len=recipe.max_model_len if request.max_model_len is None else request.max_model_len,
        random_weights=request.random_weights or recipe.random_weights,
    )
    common = replace(common, tensorrt=_tensorrt(common, request.tensorrt))
    return [replace(common, precision=p.precision, kv=p.kv, target=p.target, bits=p.bits) for p in precisions]


def _tensorrt(config: BuildConfig, given: Mapping[str, Any]) -> TensorRtBuild:
    """Return the recipe's engines with the given fields. Raises UsageError if another backend is chosen."""
    if given and not config.for_tensorrt:
        backend = "tensorrt-rtx" if "compute_capability" in given else "tensorrt"
        raise UsageError(f"{_flag(next(iter(given)))} is for TensorRT engines", f"give --backend {backend} with it")
    if config.backend == "tensorrt-rtx":
        if given.get("attention") == "plugin" or "embed_plugin" in given:
            raise UsageError("TensorRT for RTX takes no plugins", "leave --attention and --embed-plugin out")
        given = {**given, "attention": "native"}
    elif "compute_capability" in given:
        raise UsageError("TensorRT builds for the GPU here alone", "give --backend tensorrt-rtx with it")
    return replace(config.tensorrt, **given)


@dataclass(frozen=True)
class PrecisionOption:
    """A precision, its target as a share of perplexity, bits by pattern of weights' names, and the KV's precision."""

    precision: Precision
    target: float | None = None
    bits: tuple[tuple[str, int], ...] = ()
    kv: Literal["fp16"] | None = None


def parse_precisions(text: str) -> list[PrecisionOption]:
    """Return the precisions of `int4,target=2,*lm_head*=8,fp32`, each with the keys after it.

    The key `target` is a rise of perplexity in percent, and `kv` is the precision of keys and values. Other keys are
    patterns of weights' names, as in a shell, with their bits. Raises UsageError for another form and for a repeated
    precision.
    """
    found: list[PrecisionOption] = []
    for word in text.split(","):
        key, equals, value = word.partition("=")
        if not equals:
            if word not in PRECISIONS or word in [one.precision for one in found]:
                raise _not_precision(text, f"{word!r} is no precision, or is repeated")
            found.append(PrecisionOption(next(name for name in PRECISIONS if name == word)))
        elif not found or not key:
            raise _not_precision(text, f"{word!r} belongs after a precision")
        elif key == TARGET:
            if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?", value) or not float(value):
                raise _not_precision(text, f"{word!r} is no rise of perplexity in percent, such as {TARGET}=2.5")
            found[-1] = replace(found[-1], target=float(value) / 100)
        elif key == KV:
            if value != "fp16":
                raise _not_precision(text, f"keys and values are fp32, or fp16 with {KV}=fp16, not {value!r}")
            found[-1] = replace(found[-1], kv="fp16")
        elif value not in map(str, WEIGHT_BITS):
            raise _not_precision(text, f"{word!r} does not give a pattern of weights 4, 8 or 32 bits")
        else:
            found[-1] = replace(found[-1], bits=(*found[-1].bits, (key, int(value))))
    return found


def _not_precision(text: str, why: str) -> UsageError:
    known = ", ".join(PRECISIONS)
    return UsageError(f"--precision {text!r}: {why}", f"give {PRECISION_FORM}, with precisions of {known}")


def choose_drafters(
    config: BuildConfig, drafters: Sequence[str], report: Reporter = lambda message: None
) -> tuple[DrafterBuild, ...]:
    """Return the drafters that `--drafter` options name, else the recipe's; random ones with random weights.

    Each option is [ID=]DIR[,KEY=VALUE…] (`parse_drafter`), or `none` alone, or `all`: every drafter that the recipe has
    a folder for, those too that are not built by default. An option overrides a recipe's settings for the same id.
    Raises like `parse_drafter`.
    """
    if not drafters:
        return _default_drafters(config)
    if NO_DRAFTER in drafters:
        if len(drafters) > 1:
            raise UsageError("--drafter none cannot be used with other --drafter options", "give only one of them")
        return ()
    every = [drafter.id for drafter in config.drafters if drafter.source is not None]
    named = [text for option in drafters for text in (every if option == ALL_DRAFTERS else [option])]
    chosen = tuple(parse_drafter(text, config.drafters, report) for text in named)
    return replace(config, drafters=chosen).drafters


def parse_drafter(text: str, recipe: Sequence[DrafterBuild], report: Reporter = lambda message: None) -> DrafterBuild:
    """Return the drafter of [ID=]DIR[,KEY=VALUE…], with the settings of a recipe's drafter of the same id.

    DIR is a drafter's folder, a model's folder or GGUF file, its Hugging Face id or recipe, `random`, `native`, or the
    id of a recipe's drafter. The default ID is the method's id. Raises UsageError for another form, a repeated key, and
    a path without a file; CheckpointError for a folder without a drafter, a damaged file, and a download that fails.
    """
    place, *pairs = text.split(",")
    values = _values(text, pairs)
    ours = {drafter.id: drafter for drafter in recipe}
    drafter, _, source = place.rpartition("=")
    if not source:
        raise UsageError(
            f"--drafter {text!r}: expected {DRAFTER_FORM}",
            "DIR is a folder, a GGUF file, a Hugging Face id, a recipe, random or native",
        )
    method = values.pop("method", None)
    if source in ours and not drafter:
        drafter, source = source, ours[source].source or ""
        if not source:
            raise UsageError(f"the recipe has no folder for the drafter {drafter!r}", f"give {drafter}=DIR")
        method = method or ours[drafter].method
    path = _checkpoint_of(source, report)
    method = method or named_method(f"--drafter {text!r}", path, drafter)
    if not find_method(method).is_built:
        known = ", ".join(built_methods())
        raise UsageError(f"the method {method} has no drafter in bundles", f"methods with a drafter are {known}")
    drafter = drafter or method
    base = ours.get(drafter)
    options = base.options if base and base.method in (None, method) else {}
    return DrafterBuild(drafter, path, method, {**options, **values})


def _values(text: str, pairs: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if not key or not value or key in values:
            raise UsageError(
                f"--drafter {text!r}: expected {DRAFTER_FORM}", f"{pair!r} is not KEY=VALUE, or is repeated"
            )
        values[key] = int(value) if _WHOLE.fullmatch(value) else _WORDS.get(value, value)
    return values


def _checkpoint_of(source: str, report: Reporter) -> str:
    """Return a drafter's source; of a recipe or a Hugging Face id that is no folder here, its checkpoint."""
    from redraft.assembly.models import HUB_ID, find_checkpoint, find_recipe
    from redraft.export.gguf.checkpoint import SUFFIX

    if Path(source).is_dir() or not (find_recipe(source) or source.endswith(SUFFIX) or HUB_ID.fullmatch(source)):
        return source
    path = find_checkpoint(source, report)
    return source if path == Path(source) else str(path)


def named_method(where: str, source: str, drafter: str) -> str:
    """Return the method of a drafter for which none is given. where: names the drafter in errors.

    Raises UsageError for random weights and for a path without a file, and CheckpointError for a folder without a
    drafter of a known layout. Imports torch for folders and files.
    """
    if source == RANDOM:
        known = ", ".join(built_methods())
        raise UsageError(f"{where}: random weights need a method", f"add method=, one of {known}")
    if source == NATIVE:
        return native_method()
    from redraft.export.checkpoint.safetensors import check_folder
    from redraft.export.gguf.checkpoint import SUFFIX

    if not Path(source).is_dir() and not source.endswith(SUFFIX):
        raise UsageError(
            f"{where}: there is no folder {source}",
            "give a drafter's folder; or a smaller model's folder, GGUF file, recipe or Hugging Face id",
        )
    check_folder(Path(source))
    from redraft.export.drafters import published  # after the check, since it imports torch

    return published.named_method(Path(source), drafter)


def _default_drafters(recipe: BuildConfig) -> tuple[DrafterBuild, ...]:
    """Return the drafters that the recipe builds by default, with random weights if the verifier's are random.

    A recipe may have settings without a folder, which the user gives later.
    """
    drafters = [drafter for drafter in recipe.drafters if not drafter.extra]
    if recipe.random_weights:
        return tuple(replace(drafter, source=RANDOM) for drafter in drafters)
    return tuple(drafter for drafter in drafters if drafter.source is not None)


def options_of(request: BuildRequest, config: BuildConfig) -> tuple[str, ...]:
    """Return the options of `redraft build` that repeat the request in one of its precisions, which `config` has."""
    target = [] if config.target is None else [f"{TARGET}={100 * config.target:g}"]
    kv = [f"{KV}={config.kv}"] if config.kv else []
    precision = ",".join([config.precision, *kv, *target, *(f"{pattern}={bits}" for pattern, bits in config.bits)])
    given = {
        "model_path": request.model_path,
        "precision": precision if request.precision else None,
        "backend": request.backend,
        "max_model_len": request.max_model_len,
        "weights": RANDOM if request.random_weights else None,
        **request.tensorrt,
    }
    words = [(_flag(name), "" if value is True else str(value)) for name, value in given.items() if value is not None]
    words += [("--drafter", text) for text in request.drafters]
    return tuple(word for pair in words for word in pair if word)


def _flag(name: str) -> str:
    """Return the option of `redraft build` for a field of a configuration."""
    return f"--{name.replace('_', '-')}"
