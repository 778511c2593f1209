"""For every architecture, the graph's logits of random trees equal those of transformers, path by path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from transformers import AutoModelForCausalLM

from redraft import names, signatures
from redraft.config import BuildConfig
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.verifier import VerifierExport, export_verifier
from tests.export.models import ARCHITECTURES, write_checkpoint

TOLERANCE = 1e-4
HALF_TOLERANCE = 8e-2
CAPACITY = 64
GARBAGE = {"float32": 1e4, "float16": 1e2}
"""It gives finite scores: an added minus infinity hides keys."""


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


def random_tree(generator: np.random.Generator, nodes: int) -> np.ndarray:
    """Parents of a random tree, -1 for the root."""
    return np.array([-1] + [int(generator.integers(0, i)) for i in range(1, nodes)])


def path_to(parents: np.ndarray, node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


OTHERS = {
    "nemotron": dict(partial_rotary_factor=0.5),
    "gpt2": dict(num_key_value_heads=4, head_dim=12),
    "olmo2": dict(),
    "cohere": dict(),
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exported(request, tmp_path_factory):
    """(checkpoint folder, export folder, export) of one architecture, hidden states of the first layer and the last."""
    source = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    out = tmp_path_factory.mktemp("graph")
    return source, out, export_verifier(Checkpoint.open(source), out, BuildConfig(hidden_states=("last", "1")))


def check_against_transformers(
    source: Path, graph: Graph, lengths: tuple[int, ...], nodes: int, tolerance: float = TOLERANCE
) -> None:
    generator = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", dtype=torch.float32).eval()
    prompts = [generator.integers(3, 97, n).tolist() for n in lengths]
    graph.prefill(prompts)
    parents = np.stack([random_tree(generator, nodes) for _ in lengths])
    tokens = generator.integers(3, 97, (len(lengths), nodes))
    rows = np.stack([generator.permutation(nodes)[: nodes - 1] for _ in lengths])
    found = graph.call(tokens, parents, rows)
    for b, prompt in enumerate(prompts):
        for r, node in enumerate(rows[b]):
            path = prompt + tokens[b, path_to(parents[b], node)].tolist()
            with torch.no_grad():
                expected = model(torch.tensor([path]), output_hidden_states=True)
            np.testing.assert_allclose(found[names.LOGITS][b, r], expected.logits[0, -1], atol=tolerance, rtol=0)
            if not graph.hidden_states:
                continue
            np.testing.assert_allclose(
                found[names.hidden_states("last")][b, node],
                expected.hidden_states[-1][0, -1],
                atol=tolerance,
                rtol=tolerance,
            )
            np.testing.assert_allclose(
                found[names.hidden_states("1")][b, node],
                expected.hidden_states[2][0, -1],
                atol=tolerance,
                rtol=tolerance,
            )


@pytest.mark.parametrize("lengths", [(21,), (13, 5, 30)], ids=["batch1", "batch3"])
def test_random_trees_equal_transformers(exported, lengths):
    source, out, export = exported
    check_against_transformers(source, Graph(out, export, len(lengths)), lengths, nodes=9)


def test_one_node_equals_transformers(exported):
    source, out, export = exported
    check_against_transformers(source, Graph(out, export, 1), (17,), nodes=2)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral"])
def test_fp16_trees_equal_transformers_to_rounding(tmp_path, architecture):
    """KV buffers and features are fp16, logits are fp32. Norms with an offset and experts have their own casts."""
    source = write_checkpoint(tmp_path / "model", architecture, dtype=torch.float16)
    export = export_verifier(
        Checkpoint.open(source), tmp_path, BuildConfig(precision="fp16", hidden_states=("last", "1"))
    )
    check_against_transformers(source, Graph(tmp_path, export, 2), (12, 7), nodes=5, tolerance=HALF_TOLERANCE)


def test_bf16_graph_is_valid_and_bf16_throughout(tmp_path):
    """ONNX Runtime has no kernels for bf16, so the checker infers the type of every value."""
    source = write_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    export = export_verifier(Checkpoint.open(source), tmp_path, BuildConfig(precision="bf16", hidden_states=("last",)))
    onnx.checker.check_model(str(tmp_path / export.graph), full_check=True)
    graph = onnx.load(tmp_path / export.graph, load_external_data=False).graph
    found = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert found.pop(names.LOGITS) == onnx.TensorProto.FLOAT
    floating = {kind for name, kind in found.items() if name.startswith(("kv.", "hidden_states."))}
    assert floating == {onnx.TensorProto.BFLOAT16}


@pytest.mark.parametrize("exported", ["gemma2"], indirect=True)
def test_reference_evaluator_agrees(exported):
    """The function body gives equal results outside ONNX Runtime."""
    source, out, export = exported
    check_against_transformers(source, Graph(out, export, 2, reference=True), (12, 7), nodes=5)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures(tmp_path, architecture):
    """Partial rotary embedding, learned positions, norms after the blocks, interleaved rotary embedding."""
    source = write_checkpoint(tmp_path / "model", architecture, **OTHERS[architecture])
    export = export_verifier(Checkpoint.open(source), tmp_path)
    check_against_transformers(source, Graph(tmp_path, export, 2), (12, 7), nodes=5)


def test_graph_is_valid_onnx(exported):
    _, out, export = exported
    onnx.checker.check_model(str(out / export.graph), full_check=True)


def test_signature_is_the_contract(exported):
    _, out, export = exported
    graph = onnx.load(out / export.graph, load_external_data=False).graph

    def described(values):
        return [(v.name, tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)) for v in values]

    assert described(graph.input) == [(s.name, s.shape) for s in signatures.verifier_inputs(export.shape)]
    assert described(graph.output) == [
        (s.name, s.shape) for s in signatures.verifier_outputs(export.shape, export.hidden_states)
    ]
