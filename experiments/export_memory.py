"""Memory of exporting and opening a checkpoint beyond the libraries' own, for a model larger than the memory limit.

    python -m experiments.export_memory --gigabytes 2
    python -m experiments.export_memory --recipe vicuna-7b

With a recipe, `export_recipe` measures the whole of `redraft build` at that model's shape. Otherwise it writes a Llama
checkpoint of random fp32 weights in several shards, one tensor at a time. One fresh process exports it, and another
opens the engines. Peaks are of resident memory. `above_libraries` subtracts the memory of the process after it loaded
torch, transformers and the exporter (for opening: ONNX Runtime). Pages of memory-mapped files count while they are
resident.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments import export_recipe
from experiments.random_checkpoint import write_shards
from redraft import signatures
from redraft.bench.command import run
from redraft.bench.environment import environment
from redraft.engines.lowering import lower_single
from redraft.engines.manifest import GraphRecord

SHARD_BYTES = 500_000_000
WIDE, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, CONTEXT = 2048, 5632, 32, 8, 64, 32000, 2048
"""A layer of these sizes is 45 M parameters."""

MEASURE = """
import json, sys
def peak_bytes():
    lines = [line.split(":") for line in open("/proc/self/status")]
    return {key: int(value.split()[0]) * 1024 for key, value in lines if key in ("VmHWM", "VmRSS")}
"""
EXPORT = (
    MEASURE
    + """
import torch, transformers, onnxscript
from pathlib import Path
from redraft.export import quiet_export
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.verifier import export_verifier
quiet_export()
before = peak_bytes()["VmRSS"]
export_verifier(Checkpoint.open(sys.argv[1]), Path(sys.argv[2]))
print(json.dumps({"libraries_bytes": before, "peak_bytes": peak_bytes()["VmHWM"]}))
"""
)
OPEN = (
    MEASURE
    + """
import onnxruntime
from redraft.engines.host_memory import huge_pages
before = peak_bytes()["VmRSS"]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 2
with huge_pages():
    session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
held = peak_bytes()
print(json.dumps({"libraries_bytes": before, "peak_bytes": held["VmHWM"], "resident_bytes": held["VmRSS"]}))
"""
)


def main() -> dict[str, Any]:
    """Write, export, open; with a recipe, write and build."""
    options = _arguments()
    if options.recipe:
        return export_recipe.measure(options.recipe, options.folder)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="export-memory-") as folder:
        checkpoint, engines = Path(folder, "checkpoint"), Path(folder, "engines")
        checkpoint.mkdir()
        engines.mkdir()
        written, layers = write_checkpoint(checkpoint, int(options.gigabytes * 1e9))
        shards = len(list(checkpoint.glob("*.safetensors")))
        exported = _measured(EXPORT, checkpoint, engines)
        opened = _measured(OPEN, engines / _lowered(engines, layers).file)
        on_disk = sum(path.stat().st_size for path in engines.rglob("*") if path.stat().st_nlink == 1)
    return {
        "environment": environment(2),
        "checkpoint_bytes": written,
        "shards": shards,
        "bundle_bytes_not_linked": on_disk,
        "export": exported,
        "open": opened,
    }


def _lowered(engines: Path, layers: int) -> GraphRecord:
    """Return the graph that a runtime for one sequence opens, made next to the portable one."""
    shape = signatures.VerifierShape(layers, KV_HEADS, HEAD_DIM, WIDE, VOCABULARY, CONTEXT)
    record = GraphRecord("verifier.onnx", signatures.verifier_inputs(shape), signatures.verifier_outputs(shape, ()))
    lowered = lower_single(engines, record)
    assert lowered is not None
    return lowered


def write_checkpoint(folder: Path, least_bytes: int) -> tuple[int, int]:
    """Write a random fp32 Llama of at least `least_bytes` and one layer. Returns its bytes and its layers."""
    layers = max(1, -(-(least_bytes - _bytes(_outer())) // _bytes(_layer(0))))
    tensors = [*_outer().items(), *(item for index in range(layers) for item in _layer(index).items())]
    write_shards(folder, dict(tensors), "F32", SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    return _bytes(dict(tensors)), layers


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDE, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip


def _outer() -> dict[str, tuple[int, ...]]:
    return {
        "model.embed_tokens.weight": (VOCABULARY, WIDE),
        "lm_head.weight": (VOCABULARY, WIDE),
        "model.norm.weight": (WIDE,),
    }


def _layer(index: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDE),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDE),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDE),
        "self_attn.o_proj": (WIDE, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, WIDE),
        "mlp.up_proj": (INNER, WIDE),
        "mlp.down_proj": (WIDE, INNER),
        "input_layernorm": (WIDE,),
        "post_attention_layernorm": (WIDE,),
    }
    return {f"model.layers.{index}.{name}.weight": shape for name, shape in shapes.items()}


def _bytes(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(4 * int(np.prod(shape)) for shape in tensors.values())


def _measured(program: str, *arguments: Path) -> dict[str, int]:
    """Run `program` in a fresh interpreter and add the memory above its libraries."""
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], check=True, stdout=subprocess.PIPE)
    values: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return {**values, "above_libraries_bytes": values["peak_bytes"] - values["libraries_bytes"]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="smallest size of the checkpoint")
    parser.add_argument("--recipe", help="build this recipe's model instead, with a drafter")
    parser.add_argument("--folder", type=Path, help="folder for it; the system's temporary folder by default")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
