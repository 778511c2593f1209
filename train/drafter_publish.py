"""Writes the folder to export from a drafter's run folder: configuration, weights, and a card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redraft.errors import TrainingError
from redraft.export.drafters.checkpoint import Storage, save_drafter
from redraft.methods import find_method as specification
from redraft.records import from_plain
from redraft.train.acceptance import WIDTH
from redraft.train.checkpoint import load_checkpoint
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.drafter_log import measures_of, read_progress
from redraft.train.drafter_run import COUNTS, PROGRESS, draft_vocabulary
from redraft.train.objectives import find_training
from redraft.train.run import data_facts
from redraft.train.run_facts import RUN, RunFacts
from redraft.train.trained_drafter import run_facts, trained_drafter

_TEMPLATE = Path(__file__).parent / "drafter_card_template.md"
_OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "AdamW",
    "scaled_adam": "Adam, its steps divided by the rms of a matrix's inputs",
}
_STORAGES = {"bf16": "is bf16", "int8": "has matrices in 8 bits, other weights in bf16"}


def publish_drafter(run: Path, out: Path, storage: Storage | None = None) -> dict[str, Any]:
    """Write the folder `out`. Returns its record of the training. Raises TrainingError if the run is incomplete.

    storage: of its matrices; None takes the method's own.
    """
    facts, state = run_facts(run), load_checkpoint(run)
    method = find_training(facts.method)
    storage = storage or method.storage
    recipe = method.recipe.from_dict(state["recipe"], str(run))
    module = trained_drafter(run, facts, state)
    fields = tuple(measures_of(method))
    measured = _last_measurement(run, facts.method, int(state["step"]), fields)
    config = from_plain(method.config, {**facts.config, **{name: measured[name] for name in fields}}, str(run / RUN))
    facts_of_run = data_facts(run)
    training = {
        "recipe": recipe.to_dict(),
        "step": int(state["step"]),
        "spent": state["spent"],
        "data": {k: {n: v for n, v in f.items() if n != "held_out"} for k, f in facts_of_run["kinds"].items()},
        "coverage": facts_of_run["coverage"],
        "measured": {key: measured[key] for key in ("step", "acceptance")},
        **({"start": facts.start} if facts.start else {}),
    }
    counts = _counts(run)
    vocabulary = draft_vocabulary(config, counts)
    save_drafter(
        out, facts.method, config, facts.verifier, module, torch.from_numpy(counts), training,
        None if vocabulary.is_whole else vocabulary.tokens, storage,
    )  # fmt: skip
    card = _card(facts, recipe, training, sum(p.numel() for p in module.parameters()), storage)
    (out / "README.md").write_text(card, encoding="utf-8")
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


def _card(
    facts: RunFacts, recipe: DrafterRecipe, training: Mapping[str, Any], parameters: int, storage: Storage
) -> str:  # fmt: skip
    values = recipe.to_dict()
    rates = (
        f"Muon for matrices (learning rate {recipe.matrix_lr}), AdamW for the rest ({recipe.embedding_lr})"
        if recipe.optimizer == "muon"
        else f"{_OPTIMIZERS[recipe.optimizer]} (learning rate {recipe.lr})"
    )
    measured, data = training["measured"]["acceptance"], training["data"]
    depths = max((len(kind["top"]) for kind in measured.values()), default=0)
    written = any("written" in kind["tokens"] for kind in data.values())
    rows = values["self_text"]
    return _TEMPLATE.read_text(encoding="utf-8").format(
        **{**rows, **values},
        method_name=facts.method,
        command=specification(facts.method).command,
        storage=_STORAGES[storage],
        parameters=parameters / 1e6,
        weights_digest=" ".join(digest[:12] for digest in facts.verifier.weights),
        start=f" It began with the drafter whose weights have the digest {facts.start[:12]}…." if facts.start else "",
        step=training["step"],
        batches=_written_batches(recipe, training) if written else _document_batches(recipe, training),
        rates=rates,
        decay_percent=100 * recipe.decay_share,
        table="\n".join(f"    {name} = {json.dumps(value)}" for name, value in values["drafter"].items()),
        data=_written_data(data) if written else _document_data(data, rows, recipe.held_out_every),
        vocabulary=_vocabulary(recipe, training["coverage"]),
        measured_step=training["measured"]["step"],
        width=WIDTH,
        head="".join(f" depth {d} |" for d in range(1, depths + 1)),
        rule="---|" * depths,
        figures="\n".join(_figures_row(kind, found) for kind, found in measured.items()),
    )


def _document_batches(recipe: DrafterRecipe, training: Mapping[str, Any]) -> str:
    tokens = training["step"] * recipe.batch_tokens / 1e6
    return (
        f"{recipe.batch_tokens} tokens, {tokens:.1f} M in all, in rows of {recipe.seq_len} and of "
        f"{recipe.decay_seq_len} in the decay"
    )


def _written_batches(recipe: DrafterRecipe, training: Mapping[str, Any]) -> str:
    tokens, texts = (sum(kind["tokens"][name] for kind in training["data"].values()) for name in ("all", "texts"))
    seen = training["step"] * recipe.texts / texts * tokens / 1e6
    return f"{recipe.texts} whole texts, {seen:.1f} M tokens with their prompts in all"


def _document_data(data: Mapping[str, Any], rows: Mapping[str, Any], held_out_every: int) -> str:
    lines = [
        f"Rows of the verifier's own text are {rows['prompt_tokens']} tokens of a training document and "
        f"{rows['new_tokens']} tokens that the",
        "verifier adds. For the kind `self`, it sampled the first tokens too. One document in "
        f"{held_out_every} was held out whole.\n",
        "| kind | documents | their tokens | tokens of greedy rows, prompts included | of sampled rows |",
        "|---|---|---|---|---|",
    ]
    for kind, facts in data.items():
        tokens = (f"{facts['tokens'].get(source, 0):,}" for source in ("text", "greedy", "sampled"))
        lines.append(f"| {kind} | {facts.get('documents', 0)} | {' | '.join(tokens)} |")
    return "\n".join(lines)


def _written_data(data: Mapping[str, Any]) -> str:
    lines = [
        "The verifier's answers to questions, written by `redraft train text`.\n",
        "| kind | texts | tokens of answers | tokens with prompts |",
        "|---|---|---|---|",
    ]
    for kind, facts in data.items():
        tokens = facts["tokens"]
        lines.append(f"| {kind} | {tokens['texts']:,} | {tokens['written']:,} | {tokens['all']:,} |")
    return "\n".join(lines)


def _vocabulary(recipe: DrafterRecipe, coverage: Mapping[str, float]) -> str:
    """Return a paragraph about the draft vocabulary; empty if the drafter drafts all tokens."""
    if not (size := recipe.drafter.draft_vocabulary):
        return ""
    shares = ", ".join(f"{100 * share:.2f} % in {int(tokens):,}" for tokens, share in coverage.items())
    return f"\nIt drafts the {size:,} most frequent tokens of its texts. Of the tokens of these texts are: {shares}.\n"


def _figures_row(kind: str, found: Mapping[str, Any]) -> str:
    shares = (f"{top:.3f} / {wide:.3f}" for top, wide in zip(found["top"], found["wide"], strict=True))
    return f"| {kind} | {' | '.join(shares)} |"
