"""Times verifications of a batch on the CPU with packed rows, and with every tree padded to the largest one.

    python -m experiments.packed_rows --engines build/engines/DIR [DIR …] [--sequences 8] [--nodes 16] [--rounds 30]

The calls of both forms take turns. The padded form is lowered again from the bundle's portable graph. The table has
medians in milliseconds, and the quartiles of the ratio of two calls that follow each other.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from redraft import names
from redraft.bench.command import markdown_table, one_line_errors
from redraft.engines import open_bundle
from redraft.engines.bundle import Bundle
from redraft.engines.host_device import HostDevice
from redraft.engines.lowering import lower_batch
from redraft.runtime.steps.verifier import Verifier, blank, open_verifier


@contextmanager
def padded(bundle: Bundle) -> Iterator[Bundle]:
    """Yield a bundle whose graph for batches has the portable graph's signature. Its weights are links."""
    with tempfile.TemporaryDirectory(dir=bundle.path.parent) as folder:
        for file in bundle.manifest.files:
            target = Path(folder) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if file != f"{names.VERIFIER_BATCH}.onnx":
                os.link(bundle.path / file, target)
        record = lower_batch(Path(folder), bundle.graph(names.VERIFIER), names.VERIFIER_BATCH)
        assert record is not None, "a verifier without attention"
        graphs = {**bundle.manifest.graphs, names.VERIFIER_BATCH: record}
        yield Bundle(Path(folder), replace(bundle.manifest, graphs=graphs))


def opened(bundle: Bundle, sequences: int, rows: int, threads: int | None) -> Verifier:
    """Return the verifier of the graph for batches."""
    device = HostDevice(bundle, threads, step_graphs=False, verifier_graph=names.VERIFIER_BATCH)
    return open_verifier(bundle, device, sequences, rows)


def verify_ms(verifier: Verifier, sizes: Sequence[int], kv_len: int) -> float:
    """Return milliseconds of a verification of chains of these sizes after `kv_len` rows."""
    trees, cache_len = [blank(size) for size in sizes], [kv_len] * len(sizes)
    start = time.perf_counter()
    step = verifier.steps.tree(trees, cache_len)
    step.fill(cache_len, trees, [])
    step.run(False)
    return (time.perf_counter() - start) * 1e3


def rows_of(path: Path, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows of a bundle."""
    bundle, sequences, nodes = open_bundle(path, verify=False), options.sequences, options.nodes
    half = sequences // 2
    mixes = (
        [nodes] + [1] * (sequences - 1), [nodes] * half + [1] * (sequences - half), [1] * sequences,
        [nodes] * sequences,
    )  # fmt: skip
    with padded(bundle) as other:
        rows = options.kv_len + nodes
        verifiers = [opened(one, sequences, rows, options.threads) for one in (other, bundle)]
        for mix in mixes:
            for verifier in verifiers:
                verify_ms(verifier, mix, options.kv_len)
            times = np.array([
                [verify_ms(verifier, mix, options.kv_len) for verifier in verifiers] for _ in range(options.rounds)
            ])  # fmt: skip
            before, after = np.median(times, axis=0)
            low, high = np.percentile(times[:, 0] / times[:, 1], (25, 75))
            name = " + ".join(f"{mix.count(size)} of {size}" for size in dict.fromkeys(mix))
            kind = bundle.manifest.precision
            counts = f"{len(mix) * max(mix)}", f"{sum(mix)}"
            yield kind, name, *counts, f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, nargs="+", required=True, help="engine bundles")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=16, help="nodes of the largest tree")
    parser.add_argument("--kv-len", type=int, default=256, help="committed rows of each sequence")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    header = ("precision", "trees", "padded rows", "packed rows", "padded ms", "packed ms", "padded / packed")
    with one_line_errors():
        print(markdown_table([header, *(row for path in options.engines for row in rows_of(path, options))]))


if __name__ == "__main__":
    main()
