"""Writes a run's drafter as a folder to export (configuration, weights, a card), or as a checkpoint of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment
from torch import nn

from redraft.errors import CheckpointError, TrainingError, UsageError
from redraft.export.drafters.checkpoint import Storage, save_drafter
from redraft.methods import find_method as specification
from redraft.train.acceptance import WIDTH
from redraft.train.data import DATA
from redraft.train.drafter_run import COUNTS, draft_vocabulary
from redraft.train.loop import load_checkpoint
from redraft.train.objectives import find_training
from redraft.train.progress import PROGRESS, read_progress
from redraft.train.trained_drafter import RunFacts, TrainedDrafter
from redraft.train.verifier_model import VerifierModel

_TEMPLATE = Path(__file__).parent / "drafter_card_template.md"
_STORAGES = {"bf16": "is bf16", "int8": "has matrices in 8 bits, other weights in bf16"}


def publish_drafter(run: Path, out: Path, storage: Storage | None = None) -> dict[str, Any]:
    """Write the folder `out`. Returns its record of the training. Raises TrainingError if the run is incomplete.

    storage: of its matrices; None takes the method's own.
    """
    facts, state = RunFacts.of(run), load_checkpoint(run)
    method = find_training(facts.method)
    storage = storage or method.storage
    recipe = method.recipe.from_dict(state["recipe"], str(run))
    module = facts.module(run, state)
    fields = tuple(method.measures)
    measured = _last_measurement(run, facts.method, int(state["step"]), fields)
    config = facts.configuration(run, **{name: measured[name] for name in fields})
    data = json.loads((run / DATA).read_text(encoding="utf-8"))
    training = {
        "recipe": recipe.to_dict(),
        "step": int(state["step"]),
        "spent": state["spent"],
        "data": {k: {n: v for n, v in f.items() if n != "held_out"} for k, f in data["kinds"].items()},
        "coverage": data["coverage"],
        "measured": {key: measured[key] for key in ("step", "acceptance")},
        **({"start": facts.start} if facts.start else {}),
    }
    counts = _counts(run)
    vocabulary = draft_vocabulary(config, counts)
    save_drafter(
        out, facts.method, config, facts.verifier, module, torch.from_numpy(counts), training,
        None if vocabulary.is_whole else vocabulary.tokens, storage,
    )  # fmt: skip
    (out / "README.md").write_text(_card(facts, training, module, storage), encoding="utf-8")
    return training


def _last_measurement(run: Path, method: str, step: int, fields: Sequence[str]) -> dict[str, Any]:
    """Return the latest line of progress up to this step that has these fields."""
    lines = [line for line in read_progress(run / PROGRESS) if line["step"] <= step and line.keys() >= {*fields}]
    if not lines:
        raise TrainingError(
            f"the run in {run} has no measurement up to step {step}",
            f"continue with `redraft train {specification(method).command} … --out {run} --resume`, which measures",
        )
    return lines[-1]


def _counts(run: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        counts: np.ndarray[Any, np.dtype[np.int64]] = np.load(run / COUNTS)
    except (OSError, ValueError):
        raise TrainingError(f"{run / COUNTS} is missing or damaged", "train again") from None
    return counts


def _card(facts: RunFacts, training: Mapping[str, Any], module: nn.Module, storage: Storage) -> str:
    """Return the card of a drafter. Texts of `redraft train text` are counted by kind, `written` has their sums."""
    sizes = [kind["tokens"] for kind in training["data"].values()]
    written = {name: sum(size[name] for size in sizes) for name in ("texts", "all")} if "written" in sizes[0] else None
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    return template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        **training,
        facts=facts,
        command=specification(facts.method).command,
        storage=_STORAGES[storage],
        parameters=sum(p.numel() for p in module.parameters()),
        written=written,
        table={name: json.dumps(value) for name, value in training["recipe"]["drafter"].items()},
        width=WIDTH,
        depths=max((len(kind["top"]) for kind in training["measured"]["acceptance"].values()), default=0),
    )


def publish_model(folder: Path, out: Path, verifier: VerifierModel, text_files: Sequence[str]) -> None:
    """Write a run's or a published drafter as a model with the verifier's embedding and whole head, in fp32.

    text_files: names of the files of `verifier.texts` to copy: tokenizer, chat template, special tokens. Raises
    UsageError if the drafter is no model of its own, and CheckpointError if it belongs to another verifier.
    """
    found = TrainedDrafter.open(folder)
    if found.training.whole is None:
        raise UsageError(f"the drafter in {folder} is not a model of its own", "publish it without --format")
    if found.verifier != verifier.identity:
        raise CheckpointError(
            f"{folder} was trained for another verifier", "give the --verifier that it was trained for"
        )
    out.mkdir(parents=True, exist_ok=True)
    for file in text_files:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(verifier.texts / file, out / file)
    found.training.whole(found.module, verifier).save_pretrained(out)
    for written in out.glob("*.safetensors"):
        written.chmod(0o644)  # safetensors makes files readable for their owner only
