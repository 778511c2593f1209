"""What MODEL names: a recipe, a checkpoint folder, or a Hugging Face id to download."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from redraft.cli.console import Report
from redraft.config import BuildConfig
from redraft.errors import CheckpointError, UsageError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk, the name that a bundle of it takes, and how its recipe builds it.

    source: what the user named, so that an error can repeat the command.
    """

    name: str
    source: str
    path: Path
    build: BuildConfig


def find_model(model: str, report: Report) -> Model:
    """Resolve what the user named, downloading a Hugging Face id.

    Raises UsageError where it is none of the three, CheckpointError where the download fails.
    """
    from redraft.engines.recipes import load_recipe, recipe_names

    if Path(model).is_dir():
        return Model(Path(model).resolve().name, model, Path(model), BuildConfig())
    if model in recipe_names() or model.endswith(".toml"):
        recipe = load_recipe(model)
        path = Path(recipe.source) if Path(recipe.source).is_dir() else _download(recipe.source, report)
        return Model(recipe.name, model, path, recipe.build)
    if HUB_ID.fullmatch(model):
        return Model(model.rpartition("/")[2], model, _download(model, report), BuildConfig())
    known = ", ".join(recipe_names())
    raise UsageError(f"no model {model!r}", f"give a checkpoint folder, a Hugging Face id, or a recipe ({known})")


def _download(hub_id: str, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    report(f"downloading {hub_id}")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no folder {hub_id!r} here and no such model on the Hugging Face Hub",
            "check the name, or log in to the Hub",
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"no folder {hub_id!r} here, and the Hugging Face Hub cannot be reached",
            "download the model elsewhere and give its folder",
        ) from error
