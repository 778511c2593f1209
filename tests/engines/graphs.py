"""A small random decoder as a verifier graph, equal to the exporter's node for node, built without transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from redraft import names, signatures
from redraft.engines.tensorrt.native import DECOMPOSABLE
from redraft.signatures import VerifierShape

_TYPES = {"int64": TensorProto.INT64, "bool": TensorProto.BOOL, "float32": TensorProto.FLOAT}


@dataclass(frozen=True)
class Decoder:
    """Sizes and features of a random decoder. `mlp` is the width of the feed-forward layer."""

    layers: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 32
    mlp: int = 48
    vocabulary: int = 61
    max_positions: int = 64
    hidden_states: tuple[str, ...] = ("last",)
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    softcap: float = 0.0
    swish: bool = False
    biased_norm: bool = False
    sinks: bool = False
    seed: int = 0

    @property
    def shape(self) -> VerifierShape:
        return VerifierShape(
            self.layers, self.kv_heads, self.head_dim, self.hidden, self.vocabulary, self.max_positions
        )


class _Graph:
    """Nodes and initializers in the order of their addition. The caller names values."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(decoder.seed)

    def node(self, op: str, inputs: list[str], *outputs: str, domain: str = "", **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, list(outputs), domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, values: object, dtype: type = np.int64) -> str:
        if name not in {tensor.name for tensor in self.initializers}:
            self.initializers.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        values = self._random.standard_normal(shape) / np.sqrt(shape[-1])
        return self.constant(name, values, np.float32)

    def gain(self, name: str, size: int) -> str:
        return self.constant(name, 1 + self._random.standard_normal(size) * 0.1, np.float32)

    def product(self, x: str, out: str, *weights: tuple[str, int], inner: int) -> str:
        """x times the transpose of the stacked weights, each in the checkpoint's layout [outer, inner]."""
        stored = [self.weight(name, outer, inner) for name, outer in weights]
        if len(stored) > 1:
            stored = [self.node("Concat", stored, f"{out}.stack", axis=0)]
        return self.node("MatMul", [x, self.node("Transpose", stored, f"{out}.weight", perm=[1, 0])], out)


def for_onnxruntime(file: Path) -> Path:
    """Take TensorRT's own attribute out of a prepared graph, in place: ONNX Runtime refuses those it does not know."""
    model = onnx.load(file, load_external_data=False)
    for node in model.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != DECOMPOSABLE]
        del node.attribute[:]
        node.attribute.extend(kept)
    onnx.save(model, file)
    return file


def restore_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the plugin's nodes of a prepared graph the operator's body again, in place."""
    from redraft.export.graph.tree_attention import bodies

    for node in model.graph.node:
        if node.op_type == names.TREE_ATTENTION:
            node.domain = names.TREE_ATTENTION_DOMAIN
            del node.attribute[-2:]
    model.functions.extend(bodies(False))
    model.opset_import.append(helper.make_opsetid(names.TREE_ATTENTION_DOMAIN, 1))
    return model


def verifier_model(decoder: Decoder) -> onnx.ModelProto:
    """The portable graph, with the bodies of `redraft::TreeAttention`."""
    graph = _Graph(decoder)
    _tables(graph)
    hidden = graph.node("Gather", [graph.weight("embed", decoder.vocabulary, decoder.hidden), names.TOKEN_IDS], "h0")
    for layer in range(decoder.layers):
        hidden = _layer(graph, layer, hidden)
    last = graph.node(
        "RMSNormalization",
        [hidden, graph.gain("norm", decoder.hidden)],
        names.hidden_states("last"),
        axis=-1,
        epsilon=1e-5,
    )
    rows = graph.node("Unsqueeze", [names.OUTPUT_ROWS, graph.constant("last_axis", [2])], "rows")
    wide = graph.node("Expand", [rows, graph.constant("wide", [1, 1, decoder.hidden])], "rows.wide")
    picked = graph.node("GatherElements", [last, wide], "picked", axis=1)
    graph.product(picked, names.LOGITS, ("head", decoder.vocabulary), inner=decoder.hidden)
    return _model(graph)


def _tables(graph: _Graph) -> None:
    d = graph.decoder
    angles = np.arange(d.max_positions)[:, None] / 10000 ** (np.arange(0, d.head_dim, 2) / d.head_dim)
    graph.constant("cos", np.cos(angles), np.float32)
    graph.constant("sin", np.sin(angles), np.float32)


def _layer(graph: _Graph, layer: int, x: str) -> str:
    d, p = graph.decoder, f"l{layer}."
    y = graph.node("RMSNormalization", [x, graph.gain(p + "norm1", d.hidden)], p + "y", axis=-1, epsilon=1e-5)
    out = graph.product(_attention(graph, layer, y), p + "o", (p + "wo", d.hidden), inner=d.q_heads * d.head_dim)
    if d.biased_norm:
        out = graph.node("Add", [out, graph.gain(p + "o_bias", d.hidden)], p + "o_biased")
        out = graph.node("RMSNormalization", [out, graph.gain(p + "norm_o", d.hidden)], p + "o_normed", axis=-1)
    x = graph.node("Add", [x, out], p + "x1")
    y = graph.node("RMSNormalization", [x, graph.gain(p + "norm2", d.hidden)], p + "z", axis=-1, epsilon=1e-5)
    graph.product(y, p + "gate_up", (p + "wg", d.mlp), (p + "wu", d.mlp), inner=d.hidden)
    graph.node("Split", [p + "gate_up", graph.constant("halves", [d.mlp, d.mlp])], p + "gate", p + "up", axis=-1)
    if d.swish:
        graph.node("Swish", [p + "gate"], p + "act")
    else:
        graph.node("Mul", [p + "gate", graph.node("Sigmoid", [p + "gate"], p + "sigmoid")], p + "act")
    graph.node("Mul", [p + "act", p + "up"], p + "mlp")
    down = graph.product(p + "mlp", p + "down", (p + "wd", d.hidden), inner=d.mlp)
    return graph.node("Add", [x, down], names.hidden_states(str(layer)) if str(layer) in d.hidden_states else p + "x2")


def _attention(graph: _Graph, layer: int, y: str) -> str:
    d, p = graph.decoder, f"l{layer}."
    q, kv = d.q_heads * d.head_dim, d.kv_heads * d.head_dim
    qkv = graph.product(y, p + "qkv", (p + "wq", q), (p + "wk", kv), (p + "wv", kv), inner=d.hidden)
    if d.qkv_bias:
        qkv = graph.node("Add", [qkv, graph.weight(p + "bias", q + 2 * kv)], p + "qkv_biased")
    graph.node("Split", [qkv, graph.constant("parts", [q, kv, kv])], p + "q", p + "k", p + "v", axis=-1)
    rotated = [
        graph.node(
            "RotaryEmbedding",
            [_head_norm(graph, p + name, heads), "cos", "sin", names.POSITIONS],
            f"{p}{name}.rotated",
            num_heads=heads,
        )
        for name, heads in (("q", d.q_heads), ("k", d.kv_heads))
    ]
    key, value = names.key_cache(layer), names.value_cache(layer)
    sinks = [graph.gain(p + "sinks", d.q_heads)] if d.sinks else []
    return graph.node(
        names.TREE_ATTENTION,
        [*rotated, p + "v", key, value, names.TREE_MASK, names.POSITIONS, names.CACHE_LEN, names.KV_LEN, *sinks],
        p + "attended",
        names.present(key),
        names.present(value),
        domain=names.TREE_ATTENTION_DOMAIN,
        scale=float(d.head_dim**-0.5),
        softcap=d.softcap,
        window=d.windows[layer] if d.windows else 0,
        q_heads=d.q_heads,
        kv_heads=d.kv_heads,
    )


def _head_norm(graph: _Graph, x: str, heads: int) -> str:
    d = graph.decoder
    if not d.qk_norm:
        return x
    split = graph.node("Reshape", [x, graph.constant(f"heads{heads}", [0, 0, heads, d.head_dim])], x + ".heads")
    normed = graph.node("RMSNormalization", [split, graph.gain(x + ".gain", d.head_dim)], x + ".normed", axis=-1)
    return graph.node("Reshape", [normed, graph.constant("flat", [0, 0, -1])], x + ".flat")


def _model(graph: _Graph) -> onnx.ModelProto:
    from redraft.export.graph.tree_attention import OPSET, bodies

    d = graph.decoder
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, _TYPES[spec.dtype], spec.shape) for spec in specs]
        for specs in (signatures.verifier_inputs(d.shape), signatures.verifier_outputs(d.shape, d.hidden_states))
    )
    if "last" not in d.hidden_states:
        raise ValueError("the test decoder always names its last features")
    return helper.make_model(
        helper.make_graph(graph.nodes, "verifier", inputs, outputs, graph.initializers),
        functions=bodies(any(d.windows), sinks=d.sinks),
        opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid(OPSET.domain, 1)],
        ir_version=11,
    )


def save_verifier(decoder: Decoder, folder: Path) -> Path:
    """Write the portable graph of `decoder` to folder/verifier.onnx."""
    path = folder / "verifier.onnx"
    onnx.save(verifier_model(decoder), path)
    return path


def stored_outside(decoder: Decoder, folder: Path, backwards: bool = False) -> Path:
    """The portable graph with its weights in a file, as the exporter writes them, or in the opposite order."""
    model = onnx.load(save_verifier(decoder, folder))
    if backwards:
        model.graph.initializer.reverse()
    onnx.save(model, folder / "verifier.onnx", save_as_external_data=True, location="weights.bin", size_threshold=64)
    return folder / "verifier.onnx"
