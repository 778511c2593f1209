"""Costs of drafts and verifications, and of every drafter its size, its products, and its training."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from redraft import names
from redraft.bench.compare import Run, Totals
from redraft.engines import Bundle
from redraft.engines.manifest import DrafterRecord, Manifest
from redraft.engines.recipes import load_recipe, recipe_names
from redraft.runtime import Runtime
from redraft.runtime.steps.measurements import MEASURED_KV_LEN, SIZES

_ROUNDS = 25
_PRODUCTS = {"MatMul", "Gemm", "MatMulInteger", "FusedMatMul"}
"""Operators whose second input is a matrix of weights, if it is one of the graph's; MatMulNBits has K and N."""


def costs(runtime: Runtime, runs: Sequence[Run], methods: Sequence[str]) -> dict[str, Any]:
    """Return milliseconds in these runs: the median of a verification by nodes, and the drafting of a verified draft.

    Drafts of which nothing was verified count too, so a method that seldom drafts has a high mean.
    """
    verify: dict[int, list[float]] = {size: [] for size in SIZES if size <= runtime.costs.largest}
    for _ in range(_ROUNDS):
        for size, times in verify.items():
            times.append(runtime.verifier.measure_ms(1, size, MEASURED_KV_LEN))
    totals = {name: Totals.of(run.generations[name] for run in runs) for name in methods}
    return {
        "kv_len": MEASURED_KV_LEN,
        "verify_ms": {str(size): median(times) for size, times in verify.items()},
        "draft_ms": {name: one.drafting_ms / max(one.drafts, 1) for name, one in totals.items()},
    }


def drafter_sizes(bundle: Bundle, methods: Sequence[str]) -> dict[str, Any]:
    """Return the size of every drafter of the bundle among the methods.

    bytes: of its own weights.   products: `matrix_products` by graph, none without onnx.   training: `training_of`.
    """
    sizes = {}
    for name in methods:
        record = bundle.manifest.drafters.get(name)
        if record is None:
            continue
        own = re.compile(rf"{re.escape(name)}(\.\w+)?")
        weights = {(ref.file, ref.offset): ref for ref in record.weights if own.fullmatch(Path(ref.file).stem)}
        sizes[name] = {
            "method": record.method, "bytes": sum(ref.length for ref in weights.values()),
            "hidden_states": list(record.hidden_states), "nodes": record.limits.nodes, "depth": record.limits.depth,
            "products": _products(bundle.path, record), "training": training_of(bundle.manifest, name),
        }  # fmt: skip
    return sizes


def _products(folder: Path, record: DrafterRecord) -> dict[str, int]:
    if find_spec("onnx") is None:
        return {}
    graphs = {
        role: graph
        for role, graph in record.graphs.items()
        if not role.endswith((names.SINGLE, names.BATCH, names.OPERATORS))
    }
    by_role = {role: matrix_products(folder / graph.file) for role, graph in graphs.items()}
    return {role: count for role, count in by_role.items() if count}


def matrix_products(graph: Path) -> int:
    """Return multiply-accumulates of one row with each matrix of weights of an ONNX graph, that of each use.

    A call drafts the graph's whole tree. One row a product is a chain without tokens to catch up on; a tree of w nodes
    a level has up to w times as many. Attention's own products do not count. A loop's or a branch's body counts once.
    """
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    shapes: dict[str, Sequence[int]] = {}

    def count(part: Any) -> int:
        shapes.update({tensor.name: tensor.dims for tensor in part.initializer})
        total = 0
        for node in part.node:
            if node.op_type in names.PRODUCTS:
                total += prod(attribute.i for attribute in node.attribute if attribute.name in ("K", "N"))
            elif node.op_type in _PRODUCTS and len(shapes.get(node.input[1], ())) == 2:
                total += prod(shapes[node.input[1]])
            total += sum(count(one.g) for one in node.attribute if one.HasField("g"))
        return total

    return count(model.graph)


def training_of(manifest: Manifest, name: str) -> dict[str, Any] | None:
    """Return a drafter's training steps, tokens and seconds from the folder that it was built from, if it has them."""
    options = [value.partition("=") for value in manifest.options]
    folder = next((source.split(",")[0] for drafter, _, source in options if drafter == name and source), None)
    if not folder and manifest.name in recipe_names():
        build = load_recipe(manifest.name).build
        folder = next((drafter.source for drafter in build.drafters if drafter.id == name), None)
    try:
        values = json.loads((Path(folder or "") / "config.json").read_text(encoding="utf-8"))["training"]
        spent: Mapping[str, Any] = values.get("spent", {})
        return {"steps": values["step"], "tokens": spent.get("tokens"), "seconds": spent.get("seconds")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
