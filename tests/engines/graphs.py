"""A small random decoder as a verifier graph, with the exporter's operators, built without transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from redraft import names, signatures
from redraft.engines.tensorrt.native import DECOMPOSABLE
from redraft.names import Dtype
from redraft.signatures import VerifierShape

_TYPES = {"int64": TensorProto.INT64, "bool": TensorProto.BOOL, "float32": TensorProto.FLOAT,
          "float16": TensorProto.FLOAT16}  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    """Sizes and features of a random decoder. `mlp` is the width of the feed-forward layer.

    factors: True if the inputs of products that follow norms and gates are multiplied by constants.
    sizes_of_inputs: True if it reshapes rows by the sizes of other inputs, as exported graphs may.
    """

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
    factors: bool = False
    sizes_of_inputs: bool = False
    kv: Dtype | None = None
    seed: int = 0

    @property
    def shape(self) -> VerifierShape:
        sizes = self.layers, self.kv_heads, self.head_dim, self.hidden, self.vocabulary, self.max_positions
        return VerifierShape(*sizes, kv=self.kv)


class _Graph:
    """Nodes and initializers in the order of their addition. Values without a name get a number."""

    def __init__(self, seed: int, factors: bool = False) -> None:
        self.factors = factors
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._random = np.random.default_rng(seed)

    def node(self, op: str, *inputs: str, out: str = "", outputs: tuple[str, ...] = (), **attributes: object) -> str:
        """Add a node. Returns its output, or its first one."""
        made = outputs or (out or f"{op}.{len(self.nodes)}",)
        domain = names.TREE_ATTENTION_DOMAIN if op == names.TREE_ATTENTION else ""
        self.nodes.append(helper.make_node(op, inputs, made, domain=domain, **attributes))
        return made[0]

    def constant(self, name: str, values: object, dtype: type = np.float32) -> str:
        self.initializers[name] = numpy_helper.from_array(np.asarray(values, dtype), name)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(f"ints.{values}", values, np.int64)

    def weight(self, name: str, *shape: int) -> str:
        return self.constant(name, self._random.standard_normal(shape) / np.sqrt(shape[-1]))

    def gain(self, name: str, size: int) -> str:
        return self.constant(name, 1 + self._random.standard_normal(size) * 0.1)

    def norm(self, x: str, gain: str, size: int, out: str = "") -> str:
        return self.node("RMSNormalization", x, self.gain(gain, size), out=out, axis=-1, epsilon=1e-5)

    def product(self, x: str, inner: int, out: str = "", **outer: int) -> str:
        """x times the transpose of the stacked weights, each in the checkpoint's layout [outer, inner].

        With `factors`, x is multiplied by constants before, the same for all products of as many inputs.
        """
        if self.factors:
            x = self.node("Mul", x, self.gain(f"factors.{inner}", inner))
        stored = [self.weight(name, size, inner) for name, size in outer.items()]
        stack = self.node("Concat", *stored, axis=0) if len(stored) > 1 else stored[0]
        return self.node("MatMul", x, self.node("Transpose", stack, perm=[1, 0]), out=out)

    def split(self, x: str, **sizes: int) -> tuple[str, ...]:
        """Parts of the last axis, by name."""
        self.node("Split", x, self.ints(*sizes.values()), outputs=tuple(sizes), axis=-1)
        return tuple(sizes)


def verifier_model(decoder: Decoder) -> onnx.ModelProto:
    """The portable graph, with the bodies of `redraft::TreeAttention`."""
    from redraft.export.graph.tree_attention import OPSET, bodies

    d, graph = decoder, _Graph(decoder.seed, decoder.factors)
    angles = np.arange(d.max_positions)[:, None] / 10000 ** (np.arange(0, d.head_dim, 2) / d.head_dim)
    graph.constant("cos", np.cos(angles))
    graph.constant("sin", np.sin(angles))
    x = graph.node("Gather", graph.weight("embed", d.vocabulary, d.hidden), names.TOKEN_IDS)
    if d.sizes_of_inputs:
        sequences = graph.node("Shape", names.value_cache(0), start=0, end=1)
        tokens = graph.node("Shape", names.POSITIONS, start=1)
        x = graph.node("Reshape", x, graph.node("Concat", sequences, tokens, graph.ints(d.hidden), axis=0))
    for layer in range(d.layers):
        x = _layer(graph, d, layer, x)
    last = graph.norm(x, "norm", d.hidden, names.hidden_states("last"))
    rows = graph.node("Expand", graph.node("Unsqueeze", names.OUTPUT_ROWS, graph.ints(2)), graph.ints(1, 1, d.hidden))
    graph.product(graph.node("GatherElements", last, rows, axis=1), d.hidden, names.LOGITS, head=d.vocabulary)
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, _TYPES[spec.dtype], spec.shape) for spec in specs]
        for specs in (signatures.verifier_inputs(d.shape), signatures.verifier_outputs(d.shape, d.hidden_states))
    )
    return helper.make_model(
        helper.make_graph(graph.nodes, "verifier", inputs, outputs, list(graph.initializers.values())),
        functions=bodies(any(d.windows), sinks=d.sinks, half=d.kv is not None),
        opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid(OPSET.domain, 1)],
        ir_version=11,
    )


def _layer(graph: _Graph, d: Decoder, layer: int, x: str) -> str:
    p = f"l{layer}."
    attended = _attention(graph, d, layer, graph.norm(x, f"{p}norm1", d.hidden))
    out = graph.product(attended, d.q_heads * d.head_dim, **{f"{p}wo": d.hidden})
    if d.biased_norm:
        out = graph.norm(graph.node("Add", out, graph.gain(f"{p}o_bias", d.hidden)), f"{p}norm_o", d.hidden)
    x = graph.node("Add", x, out)
    packed = graph.product(graph.norm(x, f"{p}norm2", d.hidden), d.hidden, **{f"{p}wg": d.mlp, f"{p}wu": d.mlp})
    gate, up = graph.split(packed, **{f"{p}gate": d.mlp, f"{p}up": d.mlp})
    act = graph.node("Swish", gate) if d.swish else graph.node("Mul", gate, graph.node("Sigmoid", gate))
    down = graph.product(graph.node("Mul", act, up), d.mlp, **{f"{p}wd": d.hidden})
    return graph.node("Add", x, down, out=names.hidden_states(str(layer)) if str(layer) in d.hidden_states else "")


def _attention(graph: _Graph, d: Decoder, layer: int, x: str) -> str:
    p, q, kv = f"l{layer}.", d.q_heads * d.head_dim, d.kv_heads * d.head_dim
    packed = graph.product(x, d.hidden, **{f"{p}wq": q, f"{p}wk": kv, f"{p}wv": kv})
    if d.qkv_bias:
        packed = graph.node("Add", packed, graph.weight(f"{p}bias", q + 2 * kv))
    parts = graph.split(packed, **{f"{p}q": q, f"{p}k": kv, f"{p}v": kv})
    rotated = [
        graph.node("RotaryEmbedding", _head_norm(graph, d, part, heads), "cos", "sin", names.POSITIONS, num_heads=heads)
        for part, heads in zip(parts, (d.q_heads, d.kv_heads), strict=False)
    ]
    caches = names.key_cache(layer), names.value_cache(layer)
    sinks = [graph.gain(f"{p}sinks", d.q_heads)] if d.sinks else []
    return graph.node(
        names.TREE_ATTENTION, *rotated, parts[2], *caches,
        names.TREE_MASK, names.POSITIONS, names.CACHE_LEN, names.KV_LEN, *sinks,
        outputs=(f"{p}attended", *map(names.present, caches)), scale=float(d.head_dim**-0.5), softcap=d.softcap,
        window=d.windows[layer] if d.windows else 0, q_heads=d.q_heads, kv_heads=d.kv_heads,
    )  # fmt: skip


def _head_norm(graph: _Graph, d: Decoder, x: str, heads: int) -> str:
    if not d.qk_norm:
        return x
    split = graph.node("Reshape", x, graph.ints(0, 0, heads, d.head_dim))
    return graph.node("Reshape", graph.norm(split, f"{x}.gain", d.head_dim), graph.ints(0, 0, -1))


def save_verifier(decoder: Decoder, folder: Path) -> Path:
    """Write the portable graph of `decoder` to folder/verifier.onnx."""
    path = folder / "verifier.onnx"
    onnx.save(verifier_model(decoder), path)
    return path


def stored_outside(decoder: Decoder, folder: Path, backwards: bool = False) -> Path:
    """The portable graph with its weights in a file, as the exporter writes them, or in the opposite order."""
    model = verifier_model(decoder)
    if backwards:
        model.graph.initializer.reverse()
    path = folder / "verifier.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    return path


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
