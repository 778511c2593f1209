"""The stored weights of products: the parameters that a product multiplies by, and their values by output."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from redraft.export.checkpoint.base import joined, row_slices
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import Slabs


@dataclass(frozen=True)
class ProductWeight:
    """Parameters that one product multiplies by, their outputs one after the other.

    turned: True for one parameter that is stored [in, out], like GPT-2's `Conv1D`.
    """

    parameters: tuple[str, ...]
    turned: bool = False

    @classmethod
    def of(cls, product: ir.Node, known: Collection[str]) -> ProductWeight | None:
        """Return the weight of a MatMul x W^T, x [W_1; W_2; …]^T or x W, or None if `known` lacks a parameter of it."""
        right = product.inputs[1]
        turn = right.producer() if right is not None else None
        if turn is None:
            values, turned = [right], True
        elif turn.op_type == "Transpose" and turn.inputs[0] is not None:
            joined = turn.inputs[0].producer()
            whole = joined is not None and joined.op_type == "Concat"
            values, turned = (list(joined.inputs) if joined is not None and whole else [turn.inputs[0]]), False
        else:
            return None
        stored = [value for value in values if value is not None and value.is_initializer() and value.name in known]
        matrices = [value for value in stored if value.shape is not None and value.shape.rank() == 2]
        return cls(tuple(value.name or "" for value in matrices), turned) if len(matrices) == len(values) else None

    @property
    def stem(self) -> str:
        """Prefix of the names of this weight's quantized tensors."""
        return self.parameters[0] if len(self.parameters) == 1 else f"{self.parameters[0]}.merged"

    def shape(self, source: AnySource) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        shapes = [source.parameters[name] for name in self.parameters]
        if self.turned:
            return shapes[0][1], shapes[0][0]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def parts(self) -> list[ProductWeight]:
        """Return a weight for each parameter."""
        return [ProductWeight((name,), self.turned) for name in self.parameters]

    def slabs(self, source: AnySource) -> Slabs:
        """Yield the weight [out, in] in fp32, a few outputs at a time.

        Memory holds a turned weight whole: its rows are inputs, each with a number of every output.
        """
        if not self.turned:
            for name in self.parameters:
                yield from source.slabs(name)
            return
        (name,) = self.parameters
        whole = joined(source.slabs(name), source.parameters[name])
        for outputs in row_slices(whole.shape[::-1], whole.itemsize):
            yield np.ascontiguousarray(whole[:, outputs].T)


def feeds(product: ir.Node, last: ir.Node | None) -> bool:
    """Return True if only elementwise operators (softcap, scaling, a cast) are between the product and `last`.

    Exact logits may replace those of some tokens.
    """
    while last is not None and last.op_type in ("Mul", "Tanh", "Div", "Cast", "ScatterElements"):
        last = last.inputs[0].producer() if last.inputs[0] is not None else None
    return last is product


def before_attention(model: ir.Model) -> set[ir.Node]:
    """Return the products that compute queries, keys and values."""
    products, seen = set[ir.Node](), set[ir.Node]()
    pending = [value for node in model.graph if node.op_type == "TreeAttention" for value in node.inputs]
    while pending:
        value = pending.pop()
        node = value.producer() if value is not None else None
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type == "MatMul":
            products.add(node)
        else:
            pending += node.inputs
    return products
