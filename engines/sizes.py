"""Sizes of a bundle on disk, and shares of its numbers by bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from redraft.engines.manifest import GraphRecord, Manifest
from redraft.engines.tensorrt.records import weights_file
from redraft.names import CODES, QUANTIZATION_BLOCK, SCALES, ZEROS, WeightRef

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


def product_bytes(bundle: Path, graph: GraphRecord, weights: Iterable[WeightRef]) -> int:
    """Return the bytes of weights that one token's run of a portable graph reads: all but tables of looked-up rows."""
    import onnx

    nodes = onnx.load(bundle / graph.file, load_external_data=False).graph.node
    read = {name for node in nodes if not node.op_type.startswith("Gather") for name in node.input}
    return sum(ref.length for ref in weights if ref.initializer in read)


def weight_shares(manifest: Manifest) -> Mapping[str, float]:
    """Return shares of the verifier's weights in `4 bits`, `8 bits`, `fp8`, `fp32` and so on, largest first, sum 1.

    Counts numbers, not bytes, without scales and zero points. A parameter stored in two forms counts in each: an
    embedding that is also the head has its rows in fp32 and its product in 8 bits.
    """
    counts = Counter[str]()
    zeros = {
        ref.initializer.removesuffix(ZEROS): ref.shape for ref in manifest.weights if ref.initializer.endswith(ZEROS)
    }
    for ref in manifest.weights:
        if ref.initializer.endswith(CODES):
            rows, blocks, block_bytes = ref.shape
            # 16 bytes hold 32 numbers of 4 bits or 16 of 8 bits; with 8 bits, each block has a byte for its zero point.
            bytewise = blocks > 1 and zeros.get(ref.initializer.removesuffix(CODES), (0, 0))[1] == blocks
            bits = 8 if bytewise else block_bytes * 8 // QUANTIZATION_BLOCK
            counts[f"{bits} bits"] += rows * blocks * block_bytes * 8 // bits
        elif not ref.initializer.endswith((SCALES, ZEROS)) and ref.dtype in _KINDS:
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
