"""Compare the logits of redraft's bundles with those of optimum's own ONNX export.

    python -m experiments.optimum_oracle [--work build/optimum_oracle]

Optimum's export shares no code with redraft. It needs an older transformers, and its graph has no KV cache. The script
installs it into an environment of its own, build/optimum-onnx. It writes small random checkpoints there, exports each
both ways, and runs both graphs in fp32. It prints one JSON object. It exits with status 1 if logits differ.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer, models

from redraft.assembly.scoring import Scorer
from redraft.engines.bundle import open_bundle
from redraft.types import FloatArray, IntArray

ENVIRONMENT = Path("build/optimum-onnx")
PINS = (
    "torch==2.13.0", "transformers==4.57.6", "optimum==2.1.0", "optimum-onnx==0.1.0", "onnx==1.23.2",
    "onnxruntime==1.31.1", "tokenizers==0.22.2", "huggingface_hub==0.36.2", "numpy==2.4.6", "setuptools==84.2.1",
)  # fmt: skip
"""optimum-onnx 0.1.0 needs transformers older than 4.58 and optimum 2.1."""

TOLERANCE = 1e-3
"""Largest difference, as a share of the spread of the logits (largest minus smallest)."""
VOCABULARY, CONTEXT, TEXTS = 97, 128, 4
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rope_theta": 500.0,
}  # fmt: skip
GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {"llama": LLAMA, "qwen2": LLAMA, "gpt2": GPT}

WRITE = """
import json, sys, torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
kind, values, folder = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**json.loads(values), bos_token_id=1, eos_token_id=2))
for parameter in model.parameters():  # norms and biases, too, get values that a wrong graph cannot guess
    parameter.data += 0.2 * torch.randn_like(parameter)
model.save_pretrained(folder)
"""


def main() -> int:
    """Return the exit status: 0 if the logits of all architectures agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("build/optimum_oracle"), help="Folder for checkpoints and graphs."
    )
    work = parser.parse_args().work
    install()
    found = {kind: compare(kind, values, work / kind) for kind, values in ARCHITECTURES.items()}
    print(json.dumps({"versions": PINS, "tolerance": TOLERANCE, "architectures": found}, indent=2))
    return int(any(row["share_of_spread"] > TOLERANCE for row in found.values()))


def install() -> None:
    """Make the environment of optimum's export, unless one of the same versions is there."""
    stamp = ENVIRONMENT / "installed.txt"
    if stamp.is_file() and stamp.read_text() == "\n".join(PINS):
        return
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    run(ENVIRONMENT / "bin" / "pip", "install", "--quiet", *PINS)
    stamp.write_text("\n".join(PINS))


def compare(kind: str, values: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """Return the largest difference of the logits of one architecture, and the spread of the logits. Replaces
    `folder`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint, plain, bundle = folder / "checkpoint", folder / "onnx", folder / "bundle"
    run(ENVIRONMENT / "bin" / "python", "-c", WRITE, kind, json.dumps(values), checkpoint)
    optimum_cli = ENVIRONMENT / "bin" / "optimum-cli"
    run(optimum_cli, "export", "onnx", "--model", checkpoint, "--task", "text-generation", plain)
    write_tokenizer(checkpoint)
    run(Path(sys.executable).parent / "redraft", "build", checkpoint, "-o", bundle, "--eval-text", "none", "--force")
    texts = np.random.default_rng(0).integers(3, VOCABULARY, (TEXTS, CONTEXT))
    expected, got = plain_logits(plain / "model.onnx", texts), bundle_logits(bundle, texts)
    difference, spread = float(np.abs(got - expected).max()), float(np.ptp(expected))
    return {"largest_difference": difference, "spread": spread, "share_of_spread": difference / spread}


def plain_logits(graph: Path, texts: IntArray) -> FloatArray:
    """Return logits [B, T, V] of optimum's graph."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    inputs = {
        "input_ids": texts,
        "attention_mask": np.ones_like(texts),
        "position_ids": np.arange(texts.shape[1])[None].repeat(len(texts), 0),
    }
    taken = {node.name: inputs[node.name] for node in session.get_inputs()}
    logits: FloatArray = session.run(["logits"], taken)[0]
    return logits


def bundle_logits(bundle: Path, texts: IntArray) -> FloatArray:
    """Return logits [B, T, V] of redraft's verifier, which reads a text in chunks and keeps keys and values in
    between.
    """
    scorer = Scorer(open_bundle(bundle))
    return np.stack([np.concatenate([chunk.copy() for chunk in scorer.logits(text.tolist())]) for text in texts])


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one word a token. A bundle needs one, and the comparison does not use it."""
    vocabulary = {f"w{token}": token for token in range(VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def run(*command: object) -> None:
    """Run a command; print its output and exit if it fails."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(str(part) for part in command[:4])} failed:\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    sys.exit(main())
