"""For every architecture, the graph's logits of random trees equal those of transformers, path by path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft import names, signatures
from redraft.config import BuildConfig
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.verifier import export_verifier
from tests.export.models import ARCHITECTURES, Graph, write_checkpoint

TOLERANCE = 1e-4
HALF_TOLERANCE = 8e-2


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
            for state, layer in (("last", -1), ("1", 2)):
                state_found, state_expected = (
                    found[names.hidden_states(state)][b, node],
                    expected.hidden_states[layer][0, -1],
                )
                np.testing.assert_allclose(state_found, state_expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("lengths", "nodes"), [((17,), 2), ((21,), 9), ((13, 5, 30), 9)])
def test_random_trees_equal_transformers(exported, lengths, nodes):
    source, out, export = exported
    check_against_transformers(source, Graph(out, export, len(lengths)), lengths, nodes)


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


def test_the_graph_is_valid_and_its_signature_the_contract(exported):
    _, out, export = exported
    onnx.checker.check_model(str(out / export.graph), full_check=True)
    graph = onnx.load(out / export.graph, load_external_data=False).graph

    def described(values):
        return [(v.name, tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)) for v in values]

    assert described(graph.input) == [(s.name, s.shape) for s in signatures.verifier_inputs(export.shape)]
    assert described(graph.output) == [
        (s.name, s.shape) for s in signatures.verifier_outputs(export.shape, export.hidden_states)
    ]
