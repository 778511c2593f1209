"""Milliseconds of one verification by the tokens verified: a bundle's graphs, their products alone, a naive graph.

    python -m experiments.cost_curve --engines build/engines/tiny --checkpoint assets/tiny

One run times all in turn, with the same KV rows. `products` are those of the bundle, in its precision:
`relative_to_one` is their part of t(n)/t(1). `capacity_ratio` is the bundle's time over a buffer of 4096 rows divided
by its time over 256. It shows if verifying costs the used rows or the whole buffer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.sessions import open_session, zeros
from experiments.timing import interleaved, medians
from redraft import names, signatures
from redraft.assembly.scoring import fill_chain
from redraft.bench.command import run, sizes
from redraft.bench.environment import environment
from redraft.engines import Bundle, open_bundle, open_calls
from redraft.engines.calls import Calls
from redraft.engines.onnxruntime_backend import bound_call
from redraft.export import quiet_export

KV_ROWS = 200
CAPACITY = 512
SMALL_CAPACITY, LARGE_CAPACITY = 256, 4096
CAPACITY_TOKENS = (1, 8)
DEFAULT_SIZES = (1, 2, 4, 8, 12, 16)

Runs = dict[int, Callable[[], None]]


def main() -> dict[str, Any]:
    """Take the measurements that the options ask for."""
    arguments = _arguments()
    bundle = open_bundle(arguments.engines)
    graphs = {f"bundle {name}": bundle_calls(bundle, name, arguments, CAPACITY) for name in verifier_graphs(bundle)}
    with tempfile.TemporaryDirectory() as temporary:
        graphs["products"] = products_calls(bundle, Path(temporary) / "products.onnx", arguments)
        if arguments.checkpoint:
            graphs["naive"] = naive_calls(arguments, arguments.keep or Path(temporary))
        times = {n: interleaved({name: calls[n] for name, calls in graphs.items()}) for n in arguments.sizes}
    curve = {str(n): {name: float(np.median(ms)) for name, ms in by_name.items()} for n, by_name in times.items()}
    return {
        "environment": environment(arguments.threads),
        "live_rows": KV_ROWS,
        "capacity": CAPACITY,
        "milliseconds": curve,
        "least_milliseconds": {str(n): {name: min(ms) for name, ms in found.items()} for n, found in times.items()},
        "relative_to_one": {str(n): _relative(curve, n) for n in arguments.sizes},
        "capacity_ratio": capacity_ratio(bundle, arguments),
    }


def verifier_graphs(bundle: Bundle) -> list[str]:
    """Return names of the verifier's graphs that the bundle has."""
    return [
        name
        for name in (names.VERIFIER_SINGLE, names.VERIFIER_FAST, names.VERIFIER_BATCH)
        if name in bundle.manifest.graphs
    ]


def capacity_ratio(bundle: Bundle, arguments: argparse.Namespace) -> dict[str, float]:
    """Return time over a large buffer divided by that over a small one, by graph and tokens, for equal KV rows."""
    ratios = {}
    for name in verifier_graphs(bundle):
        small, large = (
            bundle_calls(bundle, name, arguments, rows, CAPACITY_TOKENS) for rows in (SMALL_CAPACITY, LARGE_CAPACITY)
        )
        for n in CAPACITY_TOKENS:
            times = medians({"small": small[n], "large": large[n]})
            ratios[f"{name}, {n} tokens"] = times["large"] / times["small"]
    return ratios


def bundle_calls(
    bundle: Bundle, name: str, arguments: argparse.Namespace, capacity: int, counts: tuple[int, ...] | None = None
) -> Runs:
    """Return a call for each size of the bundle's graph, with logits of every row, over buffers of `capacity` rows."""
    engine = open_calls(bundle, name, arguments.threads)
    _bind_caches(engine, bundle.manifest.shape, capacity)
    batch = {"B": 1} if name in (names.VERIFIER, names.VERIFIER_BATCH) else {}
    calls: Runs = {}
    for n in counts or arguments.sizes:
        call = engine.prepare(**batch, T=n, R=n)
        fill_chain(call, np.ones(n, np.int64), KV_ROWS)
        calls[n] = call.run
    return calls


def naive_calls(arguments: argparse.Namespace, folder: Path) -> Runs:
    """Return a call for each size of the naive graph of the checkpoint, exported to `folder` unless it is there."""
    graph = folder / "naive.onnx"
    if not graph.exists():
        from experiments.naive_graph import export_naive

        quiet_export()
        export_naive(arguments.checkpoint, graph, CAPACITY)
    session = open_session(graph, arguments.threads)
    outputs = session.get_outputs()
    caches = {spec.name: zeros(*spec.shape) for spec in session.get_inputs()[4:]}
    updated = dict(zip((spec.name for spec in outputs[2:]), caches.values(), strict=True))
    calls: Runs = {}
    for n in arguments.sizes:
        mask = np.zeros((1, 1, n, CAPACITY), bool)
        mask[0, 0, :, : KV_ROWS + n] = np.tri(n, KV_ROWS + n, KV_ROWS, dtype=bool)
        inputs = {
            "token_ids": np.ones((1, n), np.int64),
            "positions": np.arange(KV_ROWS, KV_ROWS + n)[None],
            "cache_len": np.array([KV_ROWS]),
            "mask": mask,
        }
        fresh = {spec.name: zeros(1, n, spec.shape[2]) for spec in outputs[:2]}
        calls[n] = bound_call(session, {**inputs, **caches}, {**fresh, **updated})
    return calls


def products_calls(bundle: Bundle, graph: Path, arguments: argparse.Namespace) -> Runs:
    """Return a call for each size of the matrix products of the verifier, written to `graph`."""
    from experiments.products import write_products

    write_products(bundle.path / bundle.graph(verifier_graphs(bundle)[0]).file, graph)
    session = open_session(graph, arguments.threads)
    calls: Runs = {}
    for n in arguments.sizes:
        inputs, outputs = (
            {spec.name: zeros(n, spec.shape[1]) for spec in specs}
            for specs in (session.get_inputs(), session.get_outputs())
        )
        calls[n] = bound_call(session, inputs, outputs)
    return calls


def _bind_caches(engine: Calls, shape: signatures.VerifierShape, capacity: int) -> None:
    for layer in range(shape.layers):
        for cache in (names.key_cache(layer), names.value_cache(layer)):
            engine.bind(cache, zeros(1, shape.kv_heads, capacity, shape.head_dim))


def _relative(curve: dict[str, dict[str, float]], n: int) -> dict[str, float]:
    return {name: time / curve[str(min(map(int, curve)))][name] for name, time in curve[str(n)].items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("--checkpoint", type=Path, help="its checkpoint: time a naive graph of it too")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the naive graph for the next run")
    parser.add_argument("--sizes", type=sizes, default=DEFAULT_SIZES, help="tokens verified at once, such as 1,4,8")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
