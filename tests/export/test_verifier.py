"""For every architecture, the graph's logits of random trees equal those of transformers, path by path.

The graph is cheap: one product for products that share an input, single operators, no useless nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft import names, signatures
from tests.export.models import Exported, Graph

Export = Callable[..., Exported]
STATES = ("last", "0")
LAYERS = 2
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


@pytest.fixture
def export(exports: Export) -> Export:
    """Exports an architecture in a precision, with hidden states of the first layer and the last."""
    return partial(exports, hidden_states=STATES, num_hidden_layers=LAYERS)


@pytest.fixture(params=("llama", "qwen2", "qwen3", "gemma2", "mixtral"))
def exported(request: pytest.FixtureRequest, export: Export) -> Exported:
    """The export of an architecture."""
    return export(request.param)


def check_against_transformers(
    exported: Exported, lengths: tuple[int, ...], nodes: int, tolerance: float = TOLERANCE, reference: bool = False
) -> None:
    graph = Graph(exported.folder, exported.verifier, len(lengths), reference)
    generator = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(
        exported.checkpoint, attn_implementation="eager", dtype=torch.float32
    ).eval()
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
            for state, layer in zip(STATES, (-1, 1), strict=True):
                np.testing.assert_allclose(
                    found[names.hidden_states(state)][b, node], expected.hidden_states[layer][0, -1],
                    atol=tolerance, rtol=tolerance,
                )  # fmt: skip


@pytest.mark.parametrize(("lengths", "nodes"), [((17,), 2), ((13, 5, 30), 9)])
def test_random_trees_equal_transformers(exported: Exported, lengths: tuple[int, ...], nodes: int) -> None:
    check_against_transformers(exported, lengths, nodes)


@pytest.mark.parametrize("exported", ["cohere"], indirect=True)
def test_an_embedding_that_rotates_neighbours_stays_the_models_own(exported: Exported) -> None:
    check_against_transformers(exported, (12, 7), nodes=5)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 2), ("mixtral", 3)])
def test_fp16_trees_equal_transformers_to_rounding(architecture: str, layers: int, export: Export) -> None:
    """KV buffers and features are fp16, logits are fp32. Norms with an offset and experts have their own casts."""
    exported = export(architecture, "fp16", dtype=torch.float16, num_hidden_layers=layers)
    check_against_transformers(exported, (12, 7), nodes=5, tolerance=HALF_TOLERANCE)


def test_bf16_graph_is_valid_and_bf16_throughout(export: Export) -> None:
    """ONNX Runtime has no kernels for bf16, so the checker infers the type of every value."""
    exported = export("llama", "bf16")
    onnx.checker.check_model(str(exported.folder / exported.verifier.graph), full_check=True)
    graph = exported.model().graph
    found = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert found.pop(names.LOGITS) == onnx.TensorProto.FLOAT
    floating = {kind for name, kind in found.items() if name.startswith(("kv.", "hidden_states."))}
    assert floating == {onnx.TensorProto.BFLOAT16}


@pytest.mark.parametrize("exported", ["gemma2"], indirect=True)
def test_reference_evaluator_agrees(exported: Exported) -> None:
    """The function body gives equal results outside ONNX Runtime."""
    check_against_transformers(exported, (12, 7), nodes=5, reference=True)


def test_the_graph_is_valid_and_its_signature_the_contract(exported: Exported) -> None:
    verifier = exported.verifier
    onnx.checker.check_model(str(exported.folder / verifier.graph), full_check=True)
    graph = exported.model().graph

    def described(values):
        return [(v.name, tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)) for v in values]

    outputs = signatures.verifier_outputs(verifier.shape, STATES)
    assert described(graph.input) == [(s.name, s.shape) for s in signatures.verifier_inputs(verifier.shape)]
    assert described(graph.output) == [(s.name, s.shape) for s in outputs]


def test_llama_is_products_norms_and_attention(export: Export) -> None:
    """A layer has four products, no Reshape, only Transposes of weights, and single operators for rotary and norms."""
    count = export("llama").operators()
    expected = {
        "MatMul": 4 * LAYERS + 1, "Transpose": 4 * LAYERS + 1, "TreeAttention": LAYERS, "RotaryEmbedding": 2 * LAYERS,
        "RMSNormalization": 2 * LAYERS + 1, "Concat": 2 * LAYERS, "Split": 2 * LAYERS, "Mul": 2 * LAYERS,
    }  # fmt: skip
    assert {name: count[name] for name in expected} == expected
    assert not {"Reshape", "Cast", "Slice", "Shape", "Expand", "Pow", "ReduceMean", "Cos", "Sin", "Range"} & set(count)


def test_biases_are_merged_too_and_a_tied_head_is_stored_once(export: Export) -> None:
    assert "lm_head.weight" not in {tensor.name for tensor in export("qwen2").model().graph.initializer}
    count = export("qwen2").operators()
    assert count["MatMul"] == 4 * LAYERS + 1
    assert count["Concat"] == 3 * LAYERS
    assert not {"Reshape", "Cast", "Slice", "Shape"} & set(count)


def test_head_norms_cost_two_reshapes_each(export: Export) -> None:
    count = export("qwen3").operators()
    assert count["RMSNormalization"] == 4 * LAYERS + 1
    assert count["Reshape"] == 4 * LAYERS
    assert count["Transpose"] == count["MatMul"]


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.05), ("int4", 0.4)])
def test_every_product_is_quantized(export: Export, precision: str, most: float) -> None:
    """The rows of its weights, of 48, 64 and 80 numbers, end in incomplete blocks."""
    exported, exact = export("llama", precision), export("llama")
    count = exported.operators()
    assert count["MatMulNBits"] == 4 * LAYERS + 1
    assert not {"MatMul", "Transpose"} & set(count)
    assert 1e-5 < exported.error(exact) < most


def test_experts_do_not_merge_into_one_product(export: Export) -> None:
    """Each expert has one gate-and-up product and one down product."""
    assert export("mixtral").operators()["MatMul"] == LAYERS * (2 + 1 + 2 * 4) + 1
