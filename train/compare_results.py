"""Figures of a comparison: each run's result, from its progress and checkpoint, and the table of all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from redraft.train.draft_columns import frequencies
from redraft.train.drafter_run import COUNTS
from redraft.train.loop import CHECKPOINT, load_checkpoint
from redraft.train.progress import PROGRESS, read_progress


@dataclass(frozen=True)
class Result:
    """A run's figures.

    parameters: trained ones.   tokens, seconds: of its training.
    acceptance: by kind and depth, the share of drafts whose likeliest token is the verifier's, given the ones before.
    wide: the share with the verifier's token among the likeliest of a level (`train.acceptance.WIDTH`).
    chain_tokens: by kind, mean tokens of a step with chains of as many drafted tokens: 1 + Σ_d Π_{i ≤ d} acceptance_i.
    progress: of every evaluation, its training `step`, the mean `loss` since the one before, and by kind `chain_tokens`
    and `accuracy`, the mean over depths of acceptance.   frequencies: see `draft_columns.frequencies`, of its texts.
    Results of older versions have neither, and runs of older versions no loss.
    """

    name: str
    seed: int
    method: str
    parameters: int
    tokens: int
    seconds: float
    acceptance: Mapping[str, Sequence[float]]
    wide: Mapping[str, Sequence[float]]
    chain_tokens: Mapping[str, float]
    progress: Sequence[Mapping[str, Any]] = ()
    frequencies: Sequence[tuple[float, float]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @property
    def mean_tokens(self) -> float:
        """The mean of `chain_tokens` over kinds."""
        return fmean(self.chain_tokens.values())

    def tokens_of(self, depth: int) -> float:
        """Return the same for chains of at most so many drafted tokens."""
        return fmean(_chain_tokens({kind: found[:depth] for kind, found in self.acceptance.items()}).values())


def is_finished(folder: Path) -> bool:
    """Return True if a run has trained and measured its last step."""
    lines = read_progress(folder / PROGRESS)
    return bool(lines) and lines[-1]["step"] == lines[-1]["steps"] and (folder / CHECKPOINT).exists()


def result_of(name: str, seed: int, method: str, folder: Path) -> Result:
    """Return the result of a finished run."""
    lines, state = read_progress(folder / PROGRESS), load_checkpoint(folder)
    acceptance, wide = (_shares(lines[-1], rule) for rule in ("top", "wide"))
    return Result(
        name,
        seed,
        method,
        parameters=sum(tensor.numel() for tensor in state["objective"].values()),
        tokens=state["spent"]["tokens"],
        seconds=state["spent"]["seconds"],
        acceptance=acceptance,
        wide=wide,
        chain_tokens=_chain_tokens(acceptance),
        progress=tuple(_evaluation(line) for line in lines),
        frequencies=frequencies(np.load(folder / COUNTS)) if (folder / COUNTS).exists() else (),
    )


def _shares(line: Mapping[str, Any], rule: str) -> dict[str, Sequence[float]]:
    """Return the acceptance by kind and depth of a line of progress."""
    return {kind: found[rule] for kind, found in line["acceptance"].items()}


def _chain_tokens(acceptance: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {kind: 1 + sum(accumulate(shares, mul)) for kind, shares in acceptance.items()}


def _evaluation(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of progress as an entry of `Result.progress`."""
    acceptance = _shares(line, "top")
    accuracy = {kind: fmean(shares) if shares else 0.0 for kind, shares in acceptance.items()}
    loss = {"loss": line["losses"]["loss"]} if "loss" in line["losses"] else {}
    return {"step": line["step"], "chain_tokens": _chain_tokens(acceptance), "accuracy": accuracy, **loss}


def results_table(results: Sequence[Result]) -> str:
    """Return a table of the mean over seeds of every run: size, cost, first token's acceptance, tokens of a step."""
    by_name: dict[str, list[Result]] = {}
    for one in results:
        by_name.setdefault(one.name, []).append(one)
    kinds = list(results[0].chain_tokens)
    rows = [("run", "seeds", "parameters", "tokens", "seconds", "first", *kinds, "mean", "least", "most")]
    for name, runs in by_name.items():
        means = [one.mean_tokens for one in runs]
        first = fmean(shares[0] for one in runs for shares in one.acceptance.values())
        tokens = [f"{fmean(one.chain_tokens[kind] for one in runs):.3f}" for kind in kinds]
        rows.append((
            name, str(len(runs)), f"{runs[0].parameters:,}", f"{fmean(one.tokens for one in runs):,.0f}",
            f"{fmean(one.seconds for one in runs):,.0f}", f"{first:.3f}", *tokens, f"{fmean(means):.3f}",
            f"{min(means):.3f}", f"{max(means):.3f}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([
        *lines, "first: acceptance of the first drafted token. Kinds and mean: tokens a step of drafted chains.",
        "least, most: of the seeds' means.",
    ])  # fmt: skip
