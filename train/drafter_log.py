"""A drafter's progress: losses and held-out acceptance, on the console and as lines of JSON in the run folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from redraft.train.acceptance import acceptance_of, greedy_draft_logit_scale
from redraft.train.batches import Batch
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.loop import StepReport
from redraft.train.progress import ProgressReport
from redraft.train.training import DrafterObjective, Measure, Training


def measures_of(training: Training) -> dict[str, Measure]:
    """Return the measured fields of a method's configuration: those of every method, and its own."""
    return {"draft_logit_scale": greedy_draft_logit_scale, **training.measures}


class DrafterLog:
    """Callable on each StepReport. Measures every `evaluate_every` steps and after the last one."""

    def __init__(
        self,
        path: Path,
        objective: DrafterObjective,
        held_out: Mapping[str, list[Batch]],
        recipe: DrafterRecipe,
        report: ProgressReport,
        measures: Mapping[str, Measure],
    ) -> None:
        """`held_out` has greedy texts of every kind. Drafts start at the last token of their prompts or later.

        measures: see `measures_of`.
        """
        self._path, self._objective, self._held_out, self._report = path, objective, held_out, report
        self._measures = measures
        self._every = recipe.evaluate_every
        self._losses: dict[str, list[float]] = defaultdict(list)
        self._tokens, self._seconds = 0, 0.0
        self._begun = False

    def __call__(self, step: StepReport) -> None:
        """Show one step. If due, write a line: tokens, seconds, mean losses since the last one, and measurements."""
        if not self._begun:
            self._drop_from(step.step)
        self._report(step)
        for name, value in step.metrics.items():
            self._losses[name].append(value)
        self._tokens += step.tokens
        self._seconds += step.seconds
        if step.step % self._every == 0 or step.step == step.steps:
            self._measure(step.step, step.steps)

    def finish(self, steps: int) -> None:
        """Measure the last of `steps` steps if the run ended before it was measured."""
        if all(line["step"] < steps for line in read_progress(self._path)):
            self._measure(steps, steps)

    def _measure(self, step: int, steps: int) -> None:
        found = {kind: acceptance_of(self._objective, batches) for kind, batches in self._held_out.items()}
        line = {
            "step": step,
            "steps": steps,
            "tokens": self._tokens,
            "seconds": round(self._seconds, 3),
            "losses": {name: sum(values) / len(values) for name, values in self._losses.items()},
            "acceptance": {kind: asdict(value) for kind, value in found.items()},
            **{
                name: measure(self._objective, chain(*self._held_out.values()))
                for name, measure in self._measures.items()
            },
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._losses.clear()
        self._tokens, self._seconds = 0, 0.0
        self._report.acceptance(step, found)

    def _drop_from(self, step: int) -> None:
        """Drop lines of steps after the resumed checkpoint, which run again."""
        kept = [json.dumps(line) + "\n" for line in read_progress(self._path) if line["step"] < step]
        self._path.write_text("".join(kept), encoding="utf-8")
        self._begun = True


def read_progress(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's progress, without an incomplete last one."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]
