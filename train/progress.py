"""Progress of a run: a bar or lines on the console, and measurements as lines of JSON in a drafter's run folder."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redraft.train.acceptance import Acceptance, acceptance_of
from redraft.train.batches import Batch
from redraft.train.distillation import Distillation
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.loop import StepReport
from redraft.train.training import Measure

PROGRESS = "progress.jsonl"
_SPEED_WINDOW = 20


class ProgressReport:
    """Callable on each StepReport. Losses are means since the last line; speed is over the last 20 steps."""

    def __init__(self, console: Console, seconds_a_line: float = 20.0) -> None:
        """A terminal `console` gets a bar instead of lines."""
        self._console = console
        self._every = seconds_a_line
        self._last_line = 0.0
        self._losses: dict[str, list[float]] = defaultdict(list)
        self._window: deque[StepReport] = deque(maxlen=_SPEED_WINDOW)
        columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console) if console.is_terminal else None
        self._task = self._bar.add_task("", total=None) if self._bar else None

    def __enter__(self) -> ProgressReport:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, report: StepReport) -> None:
        """Show one step."""
        self._window.append(report)
        for name, value in report.metrics.items():
            self._losses[name].append(value)
        due = self._is_due(last=report.step == report.steps and self._bar is None)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=report.step, total=report.steps, description=self._line(report))
        elif due:
            self._console.print(f"step {report.step}/{report.steps} {self._line(report)}", soft_wrap=True)
        if due:
            self._losses.clear()

    def note(self, line: str) -> None:
        """Show a line."""
        self._console.print(line, soft_wrap=True, markup=False)

    def writing(self, name: str, done: int, rows: int) -> None:
        """Show the verifier's progress in writing a text."""
        if self._is_due(last=done == rows):
            self._console.print(f"writing {name}: {done}/{rows} rows", soft_wrap=True)

    def acceptance(self, step: int, kinds: Mapping[str, Acceptance]) -> None:
        """Show acceptance by kind, top-1/top-4 by depth."""
        for kind, found in kinds.items():
            self._console.print(f"step {step} accepted {kind} {found}", soft_wrap=True)

    def _is_due(self, last: bool) -> bool:
        """Return True if it is time for a line, or `last` is true. The time of the next line follows."""
        now = time.monotonic()
        if due := last or now - self._last_line > self._every:
            self._last_line = now
        return due

    def _line(self, report: StepReport) -> str:
        seconds = sum(r.seconds for r in self._window)
        speed = sum(r.tokens for r in self._window) / seconds
        left_min = (report.steps - report.step) * seconds / len(self._window) / 60
        losses = " ".join(f"{name} {sum(v) / len(v):.3f}" for name, v in sorted(self._losses.items()))
        return f"{losses} | lr {report.lr_factor:.2f} {speed:.0f} tok/s eta {left_min:.1f} min"


class DrafterLog:
    """Callable on each StepReport. Measures every `evaluate_every` steps and after the last one."""

    def __init__(
        self,
        path: Path,
        objective: Distillation,
        held_out: Mapping[str, list[Batch]],
        recipe: DrafterRecipe,
        report: ProgressReport,
        measures: Mapping[str, Measure],
    ) -> None:
        """`held_out` has greedy texts of every kind. Drafts start at the last token of their prompts or later.

        measures: see `redraft.train.training.Training`.
        """
        self._path, self._objective, self._held_out, self._report = path, objective, held_out, report
        self._measures = measures
        self._every = recipe.evaluate_every
        self._losses: dict[str, list[float]] = defaultdict(list)
        self._tokens, self._seconds = 0, 0.0
        self._begun = False

    def __call__(self, step: StepReport) -> None:
        """Show one step. If due, write a line: tokens, seconds, mean losses since the last one, and measurements."""
        if not self._begun:  # drop lines of steps after the resumed checkpoint, which run again
            kept = [json.dumps(line) + "\n" for line in read_progress(self._path) if line["step"] < step.step]
            self._path.write_text("".join(kept), encoding="utf-8")
            self._begun = True
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
        texts = [*chain(*self._held_out.values())]
        line = {
            "step": step,
            "steps": steps,
            "tokens": self._tokens,
            "seconds": round(self._seconds, 3),
            "losses": {name: sum(values) / len(values) for name, values in self._losses.items()},
            "acceptance": {kind: asdict(value) for kind, value in found.items()},
            **{name: measure(self._objective, texts) for name, measure in self._measures.items()},
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._losses.clear()
        self._tokens, self._seconds = 0, 0.0
        self._report.acceptance(step, found)


def read_progress(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's progress, without an incomplete last one."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]
