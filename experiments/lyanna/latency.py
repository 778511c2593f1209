"""Figure 13 of Lyanna's paper: logits in one pass against one row after another, and the time of a draft's parts.

An EAGLE-like draft, which needs its head after every step, is not run but computed from the same measured parts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lyanna.head import TOGETHER, outputs_of, write_stages
from experiments.lyanna.parts import (
    KV_LEN,
    PARTS,
    PENDING_COUNT_ROWS,
    VERIFIED,
    WARM_UP,
    Times,
    cut_calls,
    draft_graph,
    profiled,
    times,
)  # fmt: skip
from experiments.lyanna.text import note
from experiments.sessions import open_session
from experiments.timing import interleaved
from redraft.bench.environment import environment
from redraft.bench.report_inputs import latency_tables
from redraft.engines import Bundle, open_bundle
from redraft.engines.onnxruntime_backend import bound_call
from redraft.errors import BundleError
from redraft.methods.lyanna import METHOD, LyannaShape
from redraft.runtime import Runtime
from redraft.runtime.drafters.lyanna import LyannaDrafter
from redraft.runtime.verifier import Verifier

STEPS = 6
"""Largest N, if the drafter's steps and width are not larger."""
tables = latency_tables  # a part of experiments.lyanna has `measure` and `tables`


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything. Raises BundleError if the bundle has no Lyanna drafter."""
    bundle = open_bundle(options.engines)
    built = bundle.manifest.drafters.get(METHOD.id)
    shape = METHOD.parse_shape(built.shape) if built else None
    if shape is None:
        raise BundleError(f"{options.engines} has no drafter", "build it with `redraft build MODEL --drafter DIR`")
    note("logits")
    logits = logits_times(bundle, shape, options.threads)
    with Runtime.open(options.engines, threads=options.threads) as runtime:
        note("calls in turn")
        turns = turns_with(runtime.verifier, bundle, options.turns)
        note("parts of a draft")
        parts = cut_times(runtime.verifier, bundle, shape, options.threads, options.turns)
        note("profile of a draft")
        profile = profiled(runtime.verifier, bundle, shape, options.threads, options.turns)
    return {
        "environment": environment(options.threads),
        "live_rows": KV_LEN,
        "steps": shape.steps,
        "logits_ms": logits,
        "turns_ms": turns,
        "parts_ms": parts,
        "profile_ms": profile,
        "computed_from_parts_ms": from_parts(parts["layer"]["median"], logits, shape.steps, shape.width),
    }


def logits_times(bundle: Bundle, shape: LyannaShape, threads: int) -> dict[str, dict[str, dict[str, Times]]]:
    """Return times by number of steps N, `one_pass` (N rows) and `iterative` (N times a row), then by stage."""
    found: dict[str, dict[str, dict[str, Times]]] = {}
    draft = bundle.path / bundle.graph(draft_graph(bundle)).file
    with tempfile.TemporaryDirectory() as folder:
        paths = write_stages(draft, shape.hidden, shape.draft_vocabulary, shape.width, Path(folder))
        sessions = {stage: open_session(path, threads) for stage, path in paths.items()}
    for count in range(1, max(STEPS, shape.steps, shape.width) + 1):
        calls: dict[str, Callable[[], None]] = {}
        for stage, session in sessions.items():
            calls[f"one_pass {stage}"] = _call(session, stage, count, shape)
            calls[f"iterative {stage}"] = _repeated(_call(session, stage, 1, shape), count)
        taken = interleaved(calls)
        found[str(count)] = {
            way: {stage: times(taken[f"{way} {stage}"]) for stage in sessions} for way in ("one_pass", "iterative")
        }
    return found


def turns_with(verifier: Verifier, bundle: Bundle, turns: int) -> dict[str, Times]:
    """Time a verification of one row, one of eight, a draft and a resampling, in turn, as in decoding."""
    drafter = LyannaDrafter.create(verifier, {}, bundle, METHOD.id)
    taken: dict[str, list[float]] = {name: [] for name in (*(f"t({n})" for n in VERIFIED), "draft", "resample")}
    for turn in range(WARM_UP + turns):
        for n in VERIFIED:
            spent = verifier.measure_ms(1, n, KV_LEN)
            draft, resample = drafter.measure_ms(PENDING_COUNT_ROWS, KV_LEN)
            if turn >= WARM_UP:
                taken[f"t({n})"].append(spent)
                taken["draft"].append(draft)
                taken["resample"].append(resample)
    return {name: times(values) for name, values in taken.items()}


def cut_times(verifier: Verifier, bundle: Bundle, shape: LyannaShape, threads: int, turns: int) -> dict[str, Times]:
    """Return the time of a draft by part, and of the whole `draft`: differences of the cut graphs' times, in turn."""
    calls = cut_calls(bundle, shape, threads, verifier.max_model_len + shape.steps)
    taken: dict[str, list[float]] = {part: [] for part in calls}
    for turn in range(WARM_UP + turns):
        for part, call in calls.items():
            verifier.measure_ms(1, VERIFIED[-1], KV_LEN)
            start = time.perf_counter()
            call()
            if turn >= WARM_UP:
                taken[part].append((time.perf_counter() - start) * 1e3)
    return differences({part: times(values) for part, values in taken.items()})


def differences(upto: Mapping[str, Times]) -> dict[str, Times]:
    """Return each part's own time from times up to its end, and the whole as `draft`."""
    nothing: Times = dict.fromkeys(upto[PARTS[0]], 0.0)
    before = [nothing, *(upto[part] for part in PARTS)]
    own = {
        part: {kind: upto[part][kind] - earlier[kind] for kind in upto[part]}
        for part, earlier in zip(PARTS, before, strict=False)
    }
    return {**own, "draft": dict(upto[PARTS[-1]])}


def from_parts(layer_ms: float, logits: Mapping[str, Any], steps: int, width: int) -> dict[str, float]:
    """Return drafts computed from medians: the layer's part, and head, softmax and top-k once or after every step.

    An EAGLE-like tree has `width` rows from the second step on; its layer counts as equally slow, which favours it.
    """

    def whole(rows: int, way: str = "one_pass") -> float:
        return float(logits[str(rows)][way][TOGETHER]["median"])

    return {
        "lyanna": layer_ms + whole(steps),
        "eagle_like_chain": layer_ms + whole(steps, "iterative"),
        "eagle_like_tree": layer_ms + whole(1) + (steps - 1) * whole(width),
    }


def _call(session: Any, stage: str, rows: int, shape: LyannaShape) -> Callable[[], None]:
    size = shape.hidden if stage in ("head", TOGETHER) else shape.draft_vocabulary
    values = np.random.default_rng(0).standard_normal((1, rows, size), np.float32)
    return bound_call(session, {"in": values}, outputs_of(stage, rows, shape.draft_vocabulary, shape.width))


def _repeated(call: Callable[[], None], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            call()

    return run
