"""Progress of a run: a bar on a terminal, else one plain line every few seconds."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redraft.train.acceptance import Acceptance
from redraft.train.loop import StepReport

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
        now, last = time.monotonic(), report.step == report.steps
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=report.step, total=report.steps, description=self._line(report))
            if now - self._last_line > self._every:
                self._losses.clear()
                self._last_line = now
        elif now - self._last_line > self._every or last:
            self._console.print(f"step {report.step}/{report.steps} {self._line(report)}", soft_wrap=True)
            self._losses.clear()
            self._last_line = now

    def note(self, line: str) -> None:
        """Show a line."""
        self._console.print(line, soft_wrap=True, markup=False)

    def writing(self, name: str, done: int, rows: int) -> None:
        """Show the verifier's progress in writing a text."""
        now = time.monotonic()
        if now - self._last_line > self._every or done == rows:
            self._console.print(f"writing {name}: {done}/{rows} rows", soft_wrap=True)
            self._last_line = now

    def acceptance(self, step: int, kinds: Mapping[str, Acceptance]) -> None:
        """Show acceptance by kind, top-1/top-4 by depth."""
        for kind, found in kinds.items():
            self._console.print(f"step {step} accepted {kind} {found}", soft_wrap=True)

    def _line(self, report: StepReport) -> str:
        seconds = sum(r.seconds for r in self._window)
        speed = sum(r.tokens for r in self._window) / seconds
        left_min = (report.steps - report.step) * seconds / len(self._window) / 60
        losses = " ".join(f"{name} {sum(v) / len(v):.3f}" for name, v in sorted(self._losses.items()))
        return f"{losses} | lr {report.lr_factor:.2f} {speed:.0f} tok/s eta {left_min:.1f} min"
