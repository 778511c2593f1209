"""Figures 1 and 2a of the GammaTune paper from a comparison of controllers, as PNG and SVG."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import pstdev
from typing import Any

from redraft.bench.plots import figure, saved
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.tree import depths_of


@dataclass(frozen=True)
class Step:
    """A step of one text: its position, the length of its draft, and how many of its tokens were accepted."""

    position: int
    drafted: int
    accepted: int


def steps_of(runtime: Runtime, prompt: Sequence[int], params: SamplingParams, how: SpeculationParams) -> list[Step]:
    """Return the steps of decoding a prompt."""
    file = io.StringIO()
    runtime.generate([prompt], params, how, trace=file)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    return [
        Step(line["position"] - len(prompt) + 1, max(depths_of(line["parents"])), len(line["path"]))
        for line in lines
        if "position" in line
    ]


def draw_throughput(result: Mapping[str, Any], title: str, folder: Path) -> list[Path]:
    """Draw Figure 1: mean tokens a second of each controller, with the deviation over the first lengths."""
    drawn, axes = figure(7, 4)
    names = list(result["controllers"])
    rates = [[one["tokens_per_second"] for one in result["controllers"][name]["lengths"].values()] for name in names]
    means = [sum(each) / len(each) for each in rates]
    axes.bar(names, means, yerr=[pstdev(each) for each in rates], capsize=4, color="#80b1d3")
    axes.axhline(result["plain_tokens_per_second"], color="#636363", linestyle="--", label="plain decoding")
    axes.set(ylabel="tokens a second", title=title, ylim=(0, None))
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend()
    return saved(drawn, folder, "throughput")


def draw_steps(steps: Mapping[str, Sequence[Step]], title: str, folder: Path) -> list[Path]:
    """Draw Figure 2a: accepted tokens at each step of one text. One row a controller, with the draft's length."""
    drawn, rows = figure(9, 1.2 + 1.6 * len(steps), len(steps))
    for axes, (name, each) in zip(rows if len(steps) > 1 else [rows], steps.items(), strict=True):
        numbers = range(1, len(each) + 1)
        axes.bar(numbers, [step.accepted for step in each], width=1.0, color="#80b1d3", label="accepted")
        axes.step(numbers, [step.drafted for step in each], where="mid", color="#fb8072", label="drafted")
        axes.set(ylabel="tokens", ylim=(0, None))
        axes.set_title(name, fontsize=9, loc="left")
        axes.xaxis.get_major_locator().set_params(integer=True)
    drawn.axes[0].legend(fontsize=8, ncols=2)
    drawn.axes[-1].set_xlabel("step")
    drawn.suptitle(title)
    return saved(drawn, folder, "steps")
