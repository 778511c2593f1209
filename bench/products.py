"""The floor under a verifier's time: its matrix products and nothing else, each over its own weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 24
IR_VERSION = 11
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Product:
    """`count` products of [T, rows] by [rows, columns], one a layer."""

    name: str
    rows: int
    columns: int
    count: int


def products_of(config: dict[str, Any]) -> tuple[Product, ...]:
    """The products of a Llama-like decoder with q, k, v joined and gate, up joined. Raises KeyError."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return (
        Product("qkv", hidden, (heads + 2 * kv_heads) * size, layers),
        Product("out", heads * size, hidden, layers),
        Product("gate_up", hidden, 2 * inner, layers),
        Product("down", inner, hidden, layers),
        Product("head", hidden, config["vocab_size"], 1),
    )


def weight_bytes(products: tuple[Product, ...]) -> int:
    """Bytes of all weights in fp32."""
    return sum(4 * p.rows * p.columns * p.count for p in products)


def write_products(products: tuple[Product, ...], out: Path) -> None:
    """Write a graph with an input `{name}.in` [T, rows] a kind and an output `{name}.{i}` [T, columns] a product."""
    random = np.random.default_rng(0)
    nodes, weights, outputs = [], [], []
    for product in products:
        for index in range(product.count):
            name = f"{product.name}.{index}"
            weight = random.standard_normal((product.rows, product.columns), np.float32)
            weights.append(numpy_helper.from_array(weight, f"{name}.weight"))
            nodes.append(helper.make_node("MatMul", [f"{product.name}.in", f"{name}.weight"], [name]))
            outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", product.columns]))
    inputs = [helper.make_tensor_value_info(f"{p.name}.in", TensorProto.FLOAT, ["T", p.rows]) for p in products]
    graph = helper.make_graph(nodes, "products", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.save(model, out)
