"""Publish a run folder: the verifier as a Hugging Face checkpoint, and its heads as a drafter's folder inside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.multi_head.evaluate import greedy_texts
from experiments.multi_head.run import load_run
from experiments.tiny.publish import save_verifier
from experiments.tiny.run import load_stream
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity, save_drafter
from redraft.methods.multi_head import METHOD
from redraft.records import from_plain
from redraft.train.acceptance import rank_accuracies
from redraft.train.mtp import MTP_KEY
from redraft.train.objectives.multi_head import MultiHeadObjective
from redraft.train.verifier_model import open_verifier

_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSES.md", "heldout", "prompts")
"""What the variant has from the verifier that it began with."""


def publish(run: Path, start: Path, out: Path) -> Path:
    """Write the verifier (bf16) in `out`, with the tokenizer, prompts and held-out text of `start`, and its heads.

    Heads have matrices in 8 bits. The accuracies for their tree are measured on greedy texts of the new verifier that
    begin with held-out text. Returns the heads' folder, `out`/multi_head.
    """
    objective, recipe, step = load_run(run, start)
    trained = objective.drafter.state_dict()
    out.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        _copy(start / name, out / name)
    save_verifier(objective.model, out)
    _drop_module(out / "config.json")

    verifier = open_verifier(out, "cpu")
    measured = MultiHeadObjective(verifier.model, objective.drafter.config)
    layers = {name: tensor for name, tensor in trained.items() if name.startswith("layers.")}
    measured.drafter.load_state_dict({**measured.drafter.state_dict(), **layers})  # the norm is the published one
    texts = greedy_texts(verifier, out / "heldout", measured.lookahead)
    shares = rank_accuracies(measured, [batch for batches in texts.values() for batch in batches])
    config = from_plain(
        type(objective.drafter.config), {**vars(objective.drafter.config), "rank_accuracies": shares}, str(run)
    )
    counts = _counts(run, recipe.weights, config.vocab_size)
    training: dict[str, Any] = {"recipe": recipe.to_dict(), "step": step, "joint": True}
    heads, identity = out / METHOD.id, Identity.of(Checkpoint.open(out))
    save_drafter(heads, METHOD.id, config, identity, measured.drafter, counts, training, storage="int8")
    return heads


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copy(source, target)


def _drop_module(path: Path) -> None:
    """Remove from config.json the multi-token-prediction module that the variant does not have."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    values.pop(MTP_KEY, None)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _counts(run: Path, kinds: Mapping[str, float], vocabulary: int) -> torch.Tensor:
    """Return each token's count in the run's texts."""
    return torch.from_numpy(sum(np.bincount(load_stream(run, kind), minlength=vocabulary) for kind in kinds))
