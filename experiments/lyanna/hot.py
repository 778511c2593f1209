"""Table 2 of Lyanna's paper: token information of hot tokens alone against that of all, in training and after it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.lyanna.acceptance import RULES
from experiments.lyanna.objectives import HotObjective
from experiments.lyanna.training import DEPTHS, FULL, Measured, Texts, mean_of_depths, open_texts, train_variant
from redraft.bench.environment import environment
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.lyanna import LyannaConfig
from redraft.export.drafters.lyanna_token_info import hot_tokens
from redraft.train.acceptance import conditional_acceptance

PRUNED_SHARES = (1.0, 0.5, 0.25, 0.12)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train with all tokens and with the hot share alone, and prune the published drafter if one is given."""
    texts = open_texts(options)
    size = max(1, round(options.share * texts.verifier.vocab_size))
    hot = hot_tokens(torch.from_numpy(texts.counts), size)
    full, _ = train_variant(texts, FULL)
    restricted, _ = train_variant(texts, f"hot-{size}", hot=hot)
    return {
        "environment": environment(options.threads),
        "recipe": texts.recipe.to_dict(),
        "vocabulary": texts.verifier.vocab_size,
        "hot_tokens": size,
        "occurrences_covered": float(texts.counts[hot].sum() / texts.counts.sum()),
        "depths": DEPTHS,
        "training": {"hot": points(restricted), "all": points(full)},
        "pruned": pruned(texts, options.drafter, PRUNED_SHARES) if options.drafter else None,
    }


def points(measured: Measured) -> dict[str, dict[str, float]]:
    """Return mean acceptance over kinds and the first steps, by the step of training."""
    return {str(line["step"]): {rule: mean_of_depths(line["acceptance"], rule) for rule in RULES} for line in measured}


def pruned(texts: Texts, folder: Path, shares: Sequence[float]) -> list[dict[str, Any]]:
    """Return acceptance of a published drafter with token information cut to the hottest shares of the vocabulary.

    Raises CheckpointError if it is damaged or of another verifier.
    """
    checkpoint, verifier = DrafterCheckpoint.open(folder), texts.verifier
    config = checkpoint.configure(LyannaConfig)
    checkpoint.check_verifier(config, verifier.hidden_size, verifier.vocab_size, verifier.identity)
    objective = HotObjective(verifier.model, config, hot_tokens(torch.zeros(config.vocab_size), 1))
    counts = checkpoint.load(objective.drafter)
    first = texts.recipe.self_text.prompt_tokens - 1
    found = []
    for share in shares:
        size = max(1, round(share * config.vocab_size))
        objective.keep(hot_tokens(counts, size))
        kinds = {kind: asdict(conditional_acceptance(objective, rows, first)) for kind, rows in texts.held_out.items()}
        means = {rule: mean_of_depths(kinds, rule) for rule in RULES}
        found.append({"share": share, "hot_tokens": size, "kinds": kinds, "mean": means})
    return found


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return tables by the step of training, and by the share that a published drafter keeps."""
    training = result["training"]
    name = f"hot ({result['hot_tokens']})"
    rows = [["steps", "rule", name, "all", "hot less all"]]
    rows += [
        [step, words, *_pair(training["hot"][step][rule], training["all"][step][rule])]
        for step in training["all"]
        for rule, words in RULES.items()
    ]
    covered = f"{100 * result['occurrences_covered']:.1f} % of the occurrences"
    found = {f"mean acceptance over {result['depths']} steps, trained with hot tokens ({covered}) and with all": rows}
    if result["pruned"]:
        whole = result["pruned"][0]["mean"]
        after = [["share", "tokens", "rule", "acceptance", f"{100 * result['pruned'][0]['share']:.0f} %", "difference"]]
        after += [
            [f"{100 * part['share']:.0f} %", str(part["hot_tokens"]), words, *_pair(part["mean"][rule], whole[rule])]
            for part in result["pruned"]
            for rule, words in RULES.items()
        ]
        found[f"mean acceptance over {result['depths']} steps of the published drafter, pruned after training"] = after
    return found


def _pair(share: float, against: float) -> list[str]:
    return [f"{100 * share:.2f} %", f"{100 * against:.2f} %", f"{100 * (share - against):+.2f}"]
