"""Small random checkpoints of the architectures under test, as Hugging Face directories, their traces and exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from redraft import names, signatures
from redraft.config import BuildConfig
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.graph import tracing
from redraft.export.verifier import VerifierExport, trace_verifier, write_verifier
from redraft.signatures import VerifierShape

CAPACITY = 64
GARBAGE = {"float32": 1e4, "float16": 1e2}
"""It gives finite scores: an added minus infinity hides keys."""
COMMON = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": dict(rope_parameters=LLAMA3_ROPE),
    "mistral": dict(sliding_window=8, num_key_value_heads=1),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(num_key_value_heads=4),
    "gemma2": dict(
        num_hidden_layers=4,
        sliding_window=8,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}


class Graph:
    """Runs an exported verifier without the runtime, with random content in KV buffers."""

    def __init__(self, folder: Path, export: VerifierExport, batch: int, reference: bool = False) -> None:
        self.shape, self.hidden_states = export.shape, export.hidden_states
        self.outputs = [spec.name for spec in signatures.verifier_outputs(export.shape, export.hidden_states)]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        path = str(folder / export.graph)
        if reference:
            evaluator = ReferenceEvaluator(onnx.load(path))
            self.run = lambda feeds: evaluator.run(self.outputs, feeds)
        else:
            session = onnxruntime.InferenceSession(path, options)
            self.run = lambda feeds: session.run(self.outputs, feeds)
        generator = np.random.default_rng(1)
        caches = [n(layer) for layer in range(export.shape.layers) for n in (names.key_cache, names.value_cache)]
        size = (batch, export.shape.kv_heads, CAPACITY, export.shape.head_dim)
        dtype = export.shape.dtype
        self.caches = {n: (generator.standard_normal(size) * GARBAGE[dtype]).astype(dtype) for n in caches}
        self.past = np.zeros(batch, np.int64)

    def call(self, tokens: np.ndarray, parents: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Verify one tree for each sequence (tokens, parents [B, T]) without committing rows."""
        batch, nodes = tokens.shape
        mask = np.zeros((batch, nodes, nodes), bool)
        depth = np.zeros((batch, nodes), np.int64)
        for b in range(batch):
            for i in range(nodes):
                parent = parents[b, i]
                if parent >= 0:
                    mask[b, i] = mask[b, parent]
                    depth[b, i] = depth[b, parent] + 1
                mask[b, i, i] = True
        feeds = {
            names.TOKEN_IDS: tokens, names.POSITIONS: self.past[:, None] + depth, names.TREE_MASK: mask,
            names.CACHE_LEN: self.past.copy(), names.KV_LEN: np.array([self.past.max() + nodes]),
            names.OUTPUT_ROWS: rows, **self.caches,
        }  # fmt: skip
        found = dict(zip(self.outputs, self.run(feeds), strict=True))
        self.caches = {name: found[names.present(name)] for name in self.caches}
        return found

    def prefill(self, prompts: list[list[int]]) -> None:
        """Write each prompt's rows. Shorter prompts get padding rows that are never committed."""
        nodes = max(map(len, prompts))
        tokens = np.array([prompt + [0] * (nodes - len(prompt)) for prompt in prompts])
        chain = np.tile(np.arange(-1, nodes - 1), (len(prompts), 1))
        self.call(tokens, chain, np.zeros((len(prompts), 1), np.int64))
        self.past = np.array([len(prompt) for prompt in prompts])


class Exported(NamedTuple):
    """An exported verifier, its folder and the checkpoint's."""

    verifier: VerifierExport
    folder: Path
    checkpoint: Path

    def model(self) -> onnx.ModelProto:
        """The graph without its weights."""
        return onnx.load(self.folder / self.verifier.graph, load_external_data=False)

    def operators(self) -> Counter[str]:
        """The number of the graph's nodes by operator."""
        return Counter(node.op_type for node in self.model().graph.node)

    def logits(self) -> np.ndarray:
        """The logits of a chain of five tokens."""
        rows = np.arange(5)[None]
        return Graph(self.folder, self.verifier, 1).call(rows + 3, rows - 1, rows)[names.LOGITS]

    def error(self, exact: Exported) -> float:
        """The largest difference of the logits from those of another export, relative to the largest of these."""
        expected = exact.logits()
        return float(np.abs(self.logits() - expected).max() / np.abs(expected).max())


def export_verifier(checkpoint: AnyCheckpoint, out: Path, config: BuildConfig | None = None) -> VerifierExport:
    """Write `out`/verifier.onnx and `out`/weights/ of a checkpoint."""
    config = config or BuildConfig()
    return write_verifier(trace_verifier(checkpoint, config), out, config)


_TRACES: dict[Hashable, ir.Model] = {}


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Trace equal models once. Weights have no part in a trace, so each export fills a copy of the graph with its own.

    For modules that test the steps after tracing.
    """
    trace = tracing.trace

    def shared(module: tracing.VerifierModule, shape: VerifierShape) -> ir.Model:
        key = inputs_of_trace(module, shape)
        if key not in _TRACES:
            _TRACES[key] = trace(module, shape)
        return _TRACES[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace", shared)
        yield


def inputs_of_trace(module: tracing.VerifierModule, shape: VerifierShape) -> Hashable:
    """Everything that a trace depends on: the configuration, the attention of each layer and the values of buffers."""
    network: Any = module.model
    buffers = tuple((name, values.dtype, repr(values.tolist())) for name, values in network.named_buffers())
    attention = repr(module.__dict__["recorded"].layers)
    return network.config.to_json_string(use_diff=False), attention, buffers, module.hidden_states, shape


def config_of(architecture: str, **changes: Any) -> PretrainedConfig:
    """A small configuration of the architecture."""
    return CONFIG_MAPPING[architecture](**(COMMON | ARCHITECTURES.get(architecture, {}) | changes))


def write_checkpoint(folder: Path, architecture: str, shard_size: str = "5GB", **changes: Any) -> Path:
    """Write a random checkpoint with activations of ordinary size. Returns its directory."""
    torch.manual_seed(0)
    dtype = changes.pop("dtype", torch.float32)
    model = AutoModelForCausalLM.from_config(config_of(architecture, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() == 1 else 2.0 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder
