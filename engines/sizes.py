"""Sizes of a bundle on disk, and shares of its numbers by bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from redraft.engines.device import byte_size
from redraft.engines.manifest import GraphRecord, Manifest
from redraft.engines.tensorrt_records import weights_file
from redraft.names import CODES, ROWS, SCALES, SMOOTHING, VERIFIER, ZEROS, WeightRef

_KINDS = {
    "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "I8": "8 bits", "I4": "4 bits",
}  # fmt: skip


def total_bytes(manifest: Manifest) -> int:
    """Return the bytes of all files of a bundle."""
    return sum(file.size for file in manifest.files.values())


def own_bytes(bundle: Path, manifest: Manifest) -> int:
    """Return the bytes without hard links to files of the checkpoint or of another bundle."""
    return sum(file.size for name, file in manifest.files.items() if (bundle / name).stat().st_nlink == 1)


def engine_bytes(manifest: Manifest) -> tuple[int, int]:
    """Bytes of a bundle's TensorRT engines, and of the weights that were copied to merge them for TensorRT."""
    if manifest.tensorrt is None:
        return 0, 0
    engines = manifest.tensorrt.engines
    copies = [weights_file(graph) for graph in engines if weights_file(graph) in manifest.files]
    built = [engine.file for engine in engines.values()]
    return sum(manifest.files[file].size for file in built), sum(manifest.files[file].size for file in copies)


def weight_bytes(manifest: Manifest) -> int:
    """Return the bytes of the files from which the verifier and the drafters read weights and tables."""
    records = manifest.drafters.values()
    refs = [*manifest.weights, *(ref for record in records for ref in (*record.weights, *record.tables))]
    engines = manifest.tensorrt.engines.values() if manifest.tensorrt else ()
    files = {engine.file for engine in engines} or {ref.file for ref in refs}
    return sum(manifest.files[file].size for file in files)


def kv_bytes(manifest: Manifest, slots: int) -> int:
    """Return the bytes of the verifier's keys and values in so many slots, all of them full."""
    shape = manifest.shape
    return byte_size(shape.kv_dtype, (2 * shape.layers, slots, shape.kv_heads, manifest.max_model_len, shape.head_dim))


def product_bytes(bundle: Path, graph: GraphRecord, weights: Iterable[WeightRef]) -> int:
    """Return the bytes of weights that one token's run of a portable graph reads: all but tables of looked-up rows."""
    import onnx

    nodes = onnx.load(bundle / graph.file, load_external_data=False).graph.node
    read = {name for node in nodes if not node.op_type.startswith("Gather") for name in node.input}
    return sum(ref.length for ref in weights if ref.initializer in read)


def weight_shares(bundle: Path, manifest: Manifest) -> Mapping[str, float]:
    """Return shares of the verifier's weights in `4 bits`, `8 bits`, `fp8`, `fp32` and so on, largest first, sum 1.

    Counts stored numbers, not bytes, without scales and zero points. Rows that are looked up in a product's codes count
    once.
    """
    import onnx

    nodes = onnx.load(bundle / manifest.graphs[VERIFIER].file, load_external_data=False).graph.node
    products = (node for node in nodes if node.op_type == "MatMulNBits")
    bits = {node.input[1]: next(a.i for a in node.attribute if a.name == "bits") for node in products}
    counts, seen = Counter[str](), set[tuple[str, int]]()
    for ref in sorted(manifest.weights, key=lambda ref: ref.initializer.endswith(ROWS)):
        place = (ref.file, ref.offset)
        if place in seen or ref.initializer.endswith((SCALES, ZEROS, SMOOTHING)):
            continue
        seen.add(place)
        if ref.initializer.endswith((CODES, ROWS)):
            of_code = bits.get(ref.initializer, 8)
            counts[f"{of_code} bits"] += math.prod(ref.shape) * 8 // of_code
        elif ref.dtype in _KINDS:
            counts[_KINDS[ref.dtype]] += math.prod(ref.shape)
    whole = sum(counts.values())
    return {kind: count / whole for kind, count in counts.most_common()}


def describe_shares(shares: Mapping[str, float]) -> str:
    """Return shares in words: `78.2 % in 4 bits, 20.9 % in 8 bits, 0.9 % in fp32`."""
    return ", ".join(f"{100 * share:.1f} % in {kind}" for kind, share in shares.items())


def describe_size(total: int, own: int) -> str:
    """Return a size in words: `154.2 MB`, or `699.0 MB, of which 154.2 MB are its own and the rest hard links`."""
    if own == total:
        return f"{total / 1e6:.1f} MB"
    return f"{total / 1e6:.1f} MB, of which {own / 1e6:.1f} MB are its own and the rest hard links"
