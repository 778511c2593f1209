"""Options of `redraft build` as text: drafters from options, and options from a configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from redraft.config import NATIVE, RANDOM, BuildConfig, DrafterBuild, Precision
from redraft.errors import UsageError
from redraft.methods import built_methods, find_method, native_method

if TYPE_CHECKING:
    from redraft.assembly.models import Report

NO_DRAFTER, ALL_DRAFTERS = "none", "all"
_WHOLE = re.compile(r"-?[0-9]{1,18}")
"""A whole number. The method refuses one that is out of range."""
DRAFTER_FORM = "[ID=]DIR[,KEY=VALUE…]"
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TARGET = "target"
PRECISION_FORM = "PRECISION[,KEY=VALUE…][,PRECISION…]"
WEIGHT_BITS = (4, 8, 32)


@dataclass(frozen=True)
class PrecisionOption:
    """A precision, its target as a share of perplexity, and bits by pattern of weights' names."""

    precision: Precision
    target: float | None = None
    bits: tuple[tuple[str, int], ...] = ()


def parse_precisions(text: str) -> list[PrecisionOption]:
    """Return the precisions of `int4,target=2,*lm_head*=8,fp32`, each with the keys after it.

    The key `target` is a rise of perplexity in percent. Other keys are patterns of weights' names, as in a shell, with
    their bits. Raises UsageError for another form and for a repeated precision.
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
        elif value not in map(str, WEIGHT_BITS):
            raise _not_precision(text, f"{word!r} does not give a pattern of weights 4, 8 or 32 bits")
        else:
            found[-1] = replace(found[-1], bits=(*found[-1].bits, (key, int(value))))
    return found


def _not_precision(text: str, why: str) -> UsageError:
    known = ", ".join(PRECISIONS)
    return UsageError(f"--precision {text!r}: {why}", f"give {PRECISION_FORM}, with precisions of {known}")


def choose_drafters(
    config: BuildConfig, drafters: Sequence[str], report: Report = lambda message: None
) -> tuple[DrafterBuild, ...]:
    """Return the drafters that `--drafter` options name, else the recipe's; random ones with random weights.

    Each option is [ID=]DIR[,KEY=VALUE…] (`parse_drafter`), or `none` alone, or `all`: every drafter that the recipe has
    a folder for, those too that are not built by default. An option overrides a recipe's settings for the same id.
    Raises like `parse_drafter`.
    """
    if not drafters:
        return _implied(config)
    if NO_DRAFTER in drafters:
        if len(drafters) > 1:
            raise UsageError("--drafter none cannot be used with other --drafter options", "give only one of them")
        return ()
    every = [drafter.id for drafter in config.drafters if drafter.source is not None]
    named = [text for option in drafters for text in (every if option == ALL_DRAFTERS else [option])]
    chosen = tuple(parse_drafter(text, config.drafters, report) for text in named)
    return replace(config, drafters=chosen).drafters


def parse_drafter(text: str, recipe: Sequence[DrafterBuild], report: Report = lambda message: None) -> DrafterBuild:
    """Return the drafter of [ID=]DIR[,KEY=VALUE…], with the settings of a recipe's drafter of the same id.

    DIR is a drafter's folder, a model's folder or GGUF file, its Hugging Face id or recipe, `random`, `native`, or the
    id of a recipe's drafter. The default ID is the method's id. Raises UsageError for another form, an unknown or
    repeated key, and a path without a file; CheckpointError for a folder without a drafter, a damaged file, and a
    download that fails.
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
    located = _located(source, report)
    method = method or _method_of(text, located, drafter)
    specification = find_method(method)
    if not specification.is_built:
        known = ", ".join(built_methods())
        raise UsageError(f"the method {method} has no drafter in bundles", f"methods with a drafter are {known}")
    drafter = drafter or method
    base = ours.get(drafter)
    kept = base.options if base and base.method in (None, method) else {}
    given = None if located == source else source
    chosen = DrafterBuild(drafter, located, method, {**kept, **values}, given=given)
    specification.parse_build(chosen.options, f"--drafter {drafter}")
    return chosen


def option_flag(name: str) -> str:
    """Return the option of `redraft build` for a field of a configuration."""
    return f"--{name.replace('_', '-')}"


def _implied(recipe: BuildConfig) -> tuple[DrafterBuild, ...]:
    """Return the drafters that the recipe builds by default, with random weights if the verifier's are random.

    A recipe may have settings without a folder, which the user gives later.
    """
    drafters = [drafter for drafter in recipe.drafters if not drafter.extra]
    if recipe.random_weights:
        return tuple(replace(drafter, source=RANDOM) for drafter in drafters)
    return tuple(drafter for drafter in drafters if drafter.source is not None)


def _located(source: str, report: Report) -> str:
    """Return a drafter's source; of a recipe or a Hugging Face id that is no folder here, its checkpoint.

    Raises as `find_model` does for GGUF files, recipes and ids.
    """
    from redraft.assembly.models import GGUF, HUB_ID, Place, find_model, find_recipe

    recipe = find_recipe(source)
    if Path(source).is_dir() or not (recipe or source.endswith(GGUF) or HUB_ID.fullmatch(source)):
        return source
    path = find_model(source, recipe, Place(None, False, Path()), report).path
    return source if path == Path(source) else str(path)


def _method_of(text: str, source: str, drafter: str) -> str:
    if source == RANDOM:
        known = ", ".join(built_methods())
        raise UsageError(f"--drafter {text!r}: random weights need a method", f"add method=, one of {known}")
    if source == NATIVE:
        return native_method()
    from redraft.assembly.models import GGUF

    if not Path(source).is_dir() and not source.endswith(GGUF):
        raise UsageError(
            f"--drafter {text!r}: there is no folder {source}",
            "give a drafter's folder; or a smaller model's folder, GGUF file, recipe or Hugging Face id",
        )
    from redraft.export.checkpoint.safetensors import check_folder

    check_folder(Path(source))
    from redraft.export.drafters.published import named_method  # after the check, since it imports torch

    return named_method(Path(source), drafter)


def _values(text: str, pairs: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if not key or not value or key in values:
            raise UsageError(
                f"--drafter {text!r}: expected {DRAFTER_FORM}", f"{pair!r} is not KEY=VALUE, or is repeated"
            )
        values[key] = int(value) if _WHOLE.fullmatch(value) else value
    return values


def options_of(recipe: BuildConfig, config: BuildConfig) -> tuple[str, ...]:
    """Return the options of `redraft build` that change `recipe` into `config`."""
    options: list[str] = []
    if (config.precision, config.target, config.bits) != (recipe.precision, recipe.target, recipe.bits):
        target = [] if config.target is None else [f"{TARGET}={100 * config.target:g}"]
        options += ["--precision", ",".join([config.precision, *target, *(f"{k}={v}" for k, v in config.bits)])]
    if config.backend != recipe.backend:
        options += ["--backend", config.backend]
    if config.max_model_len != recipe.max_model_len:
        options += ["--max-model-len", str(config.max_model_len)]
    if config.random_weights and not recipe.random_weights:
        options += ["--weights", RANDOM]
    for name in ("attention", "batch", "tree_nodes", "compute_capability"):
        if getattr(config.tensorrt, name) != getattr(recipe.tensorrt, name):
            options += [option_flag(name), str(getattr(config.tensorrt, name))]
    for name in ("embed_plugin", "ignore_memory"):
        if getattr(config.tensorrt, name) and not getattr(recipe.tensorrt, name):
            options.append(option_flag(name))
    return (*options, *_drafter_options(recipe, config))


def _drafter_options(recipe: BuildConfig, config: BuildConfig) -> list[str]:
    implied = _implied(replace(recipe, random_weights=config.random_weights))
    if _settings(config.drafters) == _settings(implied):
        return []
    if not config.drafters:
        return ["--drafter", NO_DRAFTER]
    return [word for drafter in config.drafters for word in ("--drafter", _drafter_text(drafter, recipe))]


def _settings(drafters: Sequence[DrafterBuild]) -> list[tuple[str, str | None, dict[str, Any]]]:
    """Return id, source and options of drafters, to compare them. The folder may name the method."""
    return [(drafter.id, drafter.source, dict(drafter.options)) for drafter in drafters]


def _drafter_text(drafter: DrafterBuild, recipe: BuildConfig) -> str:
    base = next((other.options for other in recipe.drafters if other.id == drafter.id), {})
    changed = {key: value for key, value in drafter.options.items() if key not in base or base[key] != value}
    named = {"method": drafter.method} if drafter.source == RANDOM or drafter.method != drafter.id else {}
    pairs = (f"{key}={value}" for key, value in {**named, **changed}.items())
    return ",".join([f"{drafter.id}={drafter.given or drafter.source}", *pairs])
