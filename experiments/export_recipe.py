"""Time and peak memory of `redraft build` for a recipe's model at its true shape, with a Lyanna drafter, from shards.

The checkpoint has random weights in the type of the recipe's precision; the drafter has bf16, like trained ones. The
peak is of the whole process, libraries included. Pages of memory-mapped files count while they are resident.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models

from experiments.random_checkpoint import write_safetensors, write_shards
from redraft import names
from redraft.bench.environment import environment
from redraft.cpus import default_threads
from redraft.engines.recipes import Recipe, load_recipe
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.weight_files import STORED
from redraft.export.drafters.checkpoint import CONFIG_FILE as DRAFTER_CONFIG
from redraft.export.drafters.checkpoint import TOKEN_COUNTS, WEIGHTS_FILE, Identity
from redraft.export.drafters.lyanna import LyannaDrafter, configuration_of
from redraft.export.graph import tracing
from redraft.methods.lyanna import METHOD

SHARD_BYTES = 5_000_000_000
_BUILD = "from redraft.cli.main import main; main()"


def measure(name: str, parent: Path | None) -> dict[str, Any]:
    """Write both checkpoints below `parent`, build them, remove all. Raises CalledProcessError if a build fails."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="export-memory-") as folder:
        model, drafter, engines = (Path(folder, part) for part in ("model", "drafter", "engines"))
        recipe = load_recipe(name)
        write_model(model, recipe)
        write_drafter(drafter, model, recipe)
        checkpoint = Checkpoint.open(model)
        built = _built("build", name, "--model-path", model, "--drafter", drafter, "-o", engines)
        not_linked = sum(path.stat().st_size for path in engines.rglob("*") if path.stat().st_nlink == 1)
    return {
        "environment": environment(default_threads().count),
        "recipe": name,
        "precision": recipe.build.precision,
        "checkpoint_bytes": checkpoint.parameter_bytes,
        "shards": len(checkpoint.files),
        "bundle_bytes_not_linked": not_linked,
        **built,
    }


def write_model(folder: Path, recipe: Recipe) -> None:
    """Write a checkpoint of the recipe's shape with a tokenizer that knows one word."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(recipe.shape)))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / names.TOKENIZER_FILE))
    config = model_config.load_config(Checkpoint.open(folder, weights=False))
    with tracing.empty_model(Architecture.of(config), 2, names.ELEMENTS[recipe.build.precision]) as network:
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    write_shards(folder, shapes, STORED[recipe.build.precision], SHARD_BYTES)


def write_drafter(folder: Path, model: Path, recipe: Recipe) -> None:
    """Write a drafter's folder for that checkpoint."""
    folder.mkdir()
    checkpoint = Checkpoint.open(model)
    verifier = model_config.load_config(checkpoint)
    options = next((drafter.options for drafter in recipe.build.drafters if drafter.method == METHOD.id), {})
    settings = configuration_of(verifier, verifier.vocab_size, steps=options.get("steps", 0))
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in LyannaDrafter(settings).state_dict().items()}
    dtypes = {**dict.fromkeys(shapes, "BF16"), TOKEN_COUNTS: "I64"}
    write_safetensors(folder / WEIGHTS_FILE, {**shapes, TOKEN_COUNTS: (verifier.vocab_size,)}, dtypes)
    identity = asdict(Identity.of(checkpoint))
    values = {"method": METHOD.id, "config": asdict(settings), "verifier": identity, "training": {}}
    (folder / DRAFTER_CONFIG).write_text(json.dumps(values))


def _built(*arguments: object) -> dict[str, Any]:
    """Run `redraft` with these arguments; return seconds and peak of its process."""
    start = time.monotonic()
    command = [sys.executable, "-c", _BUILD, *map(str, arguments), "--backend", "onnxruntime"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": round(time.monotonic() - start, 1), "peak_bytes": usage.ru_maxrss * 1024}
