"""Costs of drafts and verifications, and sizes of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from redraft.bench.compare import Run
from redraft.engines.manifest import Manifest
from redraft.runtime import Runtime
from redraft.runtime.cost import MEASURED_KV_LEN, SIZES

_ROUNDS = 25


def costs(runtime: Runtime, runs: Sequence[Run], methods: Sequence[str]) -> dict[str, Any]:
    """Return median milliseconds of a verification by nodes, and mean ones of a step's drafting in these runs."""
    sizes = [size for size in SIZES if size <= runtime.costs.largest]
    verify: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_ROUNDS):
        for size in sizes:
            verify[size].append(runtime.verifier.measure_ms(1, size, MEASURED_KV_LEN))
    drafts = {}
    for name in methods:
        metrics = [run.generations[name].metrics for run in runs]
        spent = sum(m.stage_ms["draft"] + m.stage_ms["resample"] for m in metrics)
        drafts[name] = spent / max(sum(m.num_spec_steps for m in metrics), 1)
    return {
        "kv_len": MEASURED_KV_LEN,
        "verify_ms": {str(size): median(times) for size, times in verify.items()},
        "draft_ms": drafts,
    }


def drafter_sizes(manifest: Manifest, methods: Sequence[str]) -> dict[str, Any]:
    """Return the bytes of every drafter's own weights, the hidden states that it reads, and its largest tree."""
    found = {}
    for name in methods:
        record = manifest.drafters.get(name)
        if record is None:
            continue
        weights = {(ref.file, ref.offset): ref for ref in record.weights if Path(ref.file).stem == name}
        found[name] = {
            "method": record.method, "bytes": sum(ref.length for ref in weights.values()),
            "hidden_states": list(record.hidden_states), "nodes": record.limits.nodes, "depth": record.limits.depth,
        }  # fmt: skip
    return found
