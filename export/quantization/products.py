"""Products over stored weights as ONNX Runtime's `MatMulNBits`, and looked-up rows as its `GatherBlockQuantized`.

A product of a form with offsets has, after its inputs x, the sum of each block of x:

    y = sum over blocks of scale * (code - zero) * x  +  offset * (sum of the block's x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from threading import Lock

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from redraft import names
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import ONNX_TYPES, NewTensor, Slabs
from redraft.export.quantization import product_forms
from redraft.export.quantization.product_forms import UNROUNDED, Form, ProductPlan
from redraft.export.quantization.product_weights import ProductWeight, before_attention, feeds
from redraft.export.quantization.rounding import SYMMETRIC, Grid
from redraft.names import WeightRef

MICROSOFT = "com.microsoft"
ROW_BLOCKS = (128, 64, 32)
"""Sizes of blocks of looked-up rows, the best first. Rows are not multiplied, so that only their size counts."""


def quantize_products(
    model: ir.Model, source: AnySource, plan: ProductPlan, output: str, shared: Iterable[WeightRef] = (),
    keep_attention: bool = True,
) -> list[NewTensor]:  # fmt: skip
    """Replace products over stored weights by MatMulNBits, and lookups of their rows by GatherBlockQuantized.

    With int4, the product of `output` keeps 8 bits, and with `keep_attention` those of queries, keys and values: these
    are few weights, but cause half of the loss of 4 bits (docs/log.md). Products of weights that are in `shared` as
    codes use these. Returns the tensors to write, and those of `shared` that are used.
    """
    return _Quantizer(model, source, plan, {ref.initializer: ref for ref in shared}).run(output, keep_attention)


def use_shared(model: ir.Model, source: AnySource, shared: Iterable[WeightRef]) -> list[NewTensor]:
    """Let products and lookups whose weights are in `shared` as codes use these. Returns the used tensors."""
    refs = {ref.initializer: ref for ref in shared}
    return _Quantizer(model, source, None, refs).run("", False)


@dataclass
class _Encoded:
    """Codes, scales and zero points of one product, made when the first of them is read and freed after the last."""

    make: Callable[[], tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]]

    def __post_init__(self) -> None:
        self._lock, self._arrays = Lock(), dict[int, NDArray[np.generic]]()

    def prepare(self) -> None:
        """Make the arrays, if they are not there."""
        with self._lock:
            if not self._arrays:
                self._arrays = dict(enumerate(self.make()))

    def take(self, number: int) -> Slabs:
        """Yield one of the arrays, and free it."""
        self.prepare()
        yield self._arrays.pop(number)


class _Quantizer:
    """Rewrites one graph."""

    def __init__(
        self, model: ir.Model, source: AnySource, plan: ProductPlan | None, shared: Mapping[str, WeightRef]
    ) -> None:
        self._model, self._source, self._plan, self._shared = model, source, plan, shared
        self._made: dict[str, NewTensor] = {}
        self._rows: dict[str, Form] = {}

    def run(self, output: str, keep_attention: bool) -> list[NewTensor]:
        """Rewrite products, then lookups, which may share a product's codes."""
        graph, known = self._model.graph, self._source.parameters
        attended = before_attention(self._model) if keep_attention else set()
        logits = next((value.producer() for value in graph.outputs if value.name == output), None)
        nodes = [node for node in graph if node.op_type == "MatMul"]
        products = [(node, weight) for node in nodes if (weight := ProductWeight.of(node, known))]
        kept = {weight.stem for node, weight in products if node in attended or feeds(node, logits)}
        for node, weight in products:
            self._product(node, weight, weight.stem in kept)
        for node in [node for node in graph if node.op_type == "Gather"]:
            self._lookup(node)
        common.RemoveUnusedNodesPass()(self._model)
        if self._made:
            self._model.opset_imports[MICROSOFT] = 1
        return list(self._made.values())

    def _product(self, node: ir.Node, weight: ProductWeight, kept: bool) -> None:
        """Replace one product, its parts of one form together."""
        if f"{weight.stem}{names.CODES}" in self._shared and len(weight.parameters) == 1:
            self._replace(node, weight, [(weight, self._shared_form(weight.stem))], self._shared_factors(weight.stem))
            return
        if self._plan is None:
            return
        factors = self._factors(weight)
        forms = [(part, self._plan.form(part, self._source, factors is not None, kept)) for part in weight.parts()]
        groups = [
            (ProductWeight(tuple(p for part, _ in parts for p in part.parameters), weight.turned), form)
            for form, parts in ((form, list(parts)) for form, parts in groupby(forms, key=lambda item: item[1]))
        ]
        if all(form.bits == UNROUNDED for _, form in groups):
            return
        self._replace(node, weight, groups, factors)

    def _shared_form(self, stem: str) -> Form:
        """Return the form of codes that another graph made. Only weights of 8 bits without offsets are shared."""
        return Form(8, self._shared[f"{stem}{names.CODES}"].shape[2])

    def _shared_factors(self, stem: str) -> NDArray[np.float32] | None:
        """Return a stand-in for factors whose inverse another graph has stored."""
        found = self._shared.get(f"{stem}{names.SMOOTHING}")
        return None if found is None else np.ones(found.shape, np.float32)

    def _factors(self, weight: ProductWeight) -> NDArray[np.float32] | None:
        assert self._plan is not None
        return self._plan.smoothing.get(weight.parameters[0])

    def _replace(
        self, node: ir.Node, weight: ProductWeight, groups: list[tuple[ProductWeight, Form]],
        factors: NDArray[np.float32] | None,
    ) -> None:  # fmt: skip
        """Replace a product by one for each group of parts, whose results are joined."""
        graph, x, result = self._model.graph, node.inputs[0], node.outputs[0]
        assert x is not None
        inputs = weight.shape(self._source)[1]
        new: list[ir.Node] = []
        if factors is not None:
            inverse = self._tensor(
                NewTensor(f"{weight.stem}{names.SMOOTHING}", "F32", (inputs,), lambda: iter([1 / factors]))
            )
            new.append(ir.node("Mul", [x, inverse]))
            new[-1].outputs[0].shape, new[-1].outputs[0].type = x.shape, x.type
            x = new[-1].outputs[0]
        parts: list[ir.Value] = []
        for group, form in groups:
            if form.bits == UNROUNDED:
                parts.append(self._unrounded(group, node, new))
                continue
            given = self._with_sums(x, form, inputs, new) if form.offsets else x
            tensors = [self._tensor(tensor) for tensor in self._coded(group, form, factors)]
            rows = group.shape(self._source)[0]
            attributes = {
                "K": form.columns(inputs), "N": rows, "bits": form.bits, "block_size": form.block, "accuracy_level": 4,
            }  # fmt: skip
            new.append(ir.node("MatMulNBits", [given, *tensors], attributes, domain=MICROSOFT))
            parts.append(new[-1].outputs[0])
            self._typed(parts[-1], result, rows)
            if len(group.parameters) == 1 and form == replace(
                product_forms.EIGHT_BITS, block=form.block, stored=form.stored
            ):
                self._rows[group.stem] = form
        if len(parts) > 1:
            new.append(ir.node("Concat", parts, {"axis": -1}))
            self._typed(new[-1].outputs[0], result, weight.shape(self._source)[0])
        graph.insert_before(node, new)
        name = result.name
        ir.convenience.replace_all_uses_with(result, new[-1].outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
        new[-1].outputs[0].name = name

    def _unrounded(self, group: ProductWeight, node: ir.Node, new: list[ir.Node]) -> ir.Value:
        """Append the fp32 product of some parts. Its input is not divided by factors."""
        values = [self._model.graph.initializers[name] for name in group.parameters]
        if not group.turned:
            if len(values) > 1:
                new.append(ir.node("Concat", values, {"axis": 0}))
                values = [new[-1].outputs[0]]
            new.append(ir.node("Transpose", values, {"perm": [1, 0]}))
            values = [new[-1].outputs[0]]
        new.append(ir.node("MatMul", [node.inputs[0], values[0]]))
        self._typed(new[-1].outputs[0], node.outputs[0], group.shape(self._source)[0])
        return new[-1].outputs[0]

    def _with_sums(self, x: ir.Value, form: Form, inputs: int, new: list[ir.Node]) -> ir.Value:
        """Append the sums of blocks to x [..., in]."""
        assert x.shape is not None
        lead = [0] * (x.shape.rank() - 1)
        new.append(ir.node("Reshape", [x, self._ints([*lead, -1, form.block])]))
        new.append(ir.node("ReduceSum", [new[-1].outputs[0], self._ints([-1])], {"keepdims": 0}))
        new.append(ir.node("Concat", [x, new[-1].outputs[0]], {"axis": -1}))
        self._typed(new[-1].outputs[0], x, form.columns(inputs))
        return new[-1].outputs[0]

    def _coded(self, group: ProductWeight, form: Form, factors: NDArray[np.float32] | None) -> list[NewTensor]:
        """Return the tensors of a weight: codes, scales, and zero points if the form has any."""
        rows, inputs = group.shape(self._source)
        blocks, source = form.blocks(inputs), self._source

        def make() -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
            coded = [product_forms.coded(part, source, form, factors) for part in group.parts()]
            codes = np.concatenate([codes for codes, _ in coded]) if len(coded) > 1 else coded[0][0]
            grid = Grid.joined([grid for _, grid in coded]) if len(coded) > 1 else coded[0][1]
            return product_forms.stored_arrays(codes, grid, form)

        encoded = _Encoded(make)
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            names.CODES: ("U8", (rows, blocks, form.block * form.bits // 8)),
            names.SCALES: ("F32", (rows, blocks)),
            names.ZEROS: ("U8", (rows, -(-blocks * form.bits // 8))),
        }
        wanted = list(parts.items()) if form.zeros else list(parts.items())[:2]
        return [
            NewTensor(f"{group.stem}{part}", dtype, shape, partial(encoded.take, number), encoded.prepare)
            for number, (part, (dtype, shape)) in enumerate(wanted)
        ]

    def _lookup(self, node: ir.Node) -> None:
        """Replace a lookup of rows of a stored matrix: of a product's codes, or of codes of its own."""
        table = node.inputs[0]
        if table is None or table.name not in self._source.parameters or not table.is_initializer():
            return
        name, shape = table.name, self._source.parameters[table.name]
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        if len(shape) != 2 or axis != 0 or (self._plan is None and f"{name}{names.ROWS}" not in self._shared):
            return
        rows, columns = shape
        form = self._rows_form(name, columns)
        if form is None:
            return
        codes = NewTensor(f"{name}{names.ROWS}", "U8", shape, lambda: iter(()))
        scales = NewTensor(f"{name}{names.SCALES}", "F32", (rows, form.blocks(columns)), lambda: iter(()))
        if name not in self._rows and codes.name not in self._shared:
            codes, scales = self._own_rows(name, form, codes, scales)
        elif codes.name not in self._shared:
            codes = replace(codes, same_as=f"{name}{names.CODES}")
        given = [self._tensor(codes), node.inputs[1], self._tensor(scales)]
        attributes = {"bits": 8, "block_size": form.block, "gather_axis": 0, "quantize_axis": 1}
        new = [ir.node("GatherBlockQuantized", given, attributes, domain=MICROSOFT)]
        self._typed(new[0].outputs[0], node.outputs[0], columns)
        smoothing = f"{name}{names.SMOOTHING}"
        if smoothing in self._model.graph.initializers or smoothing in self._shared:
            inverse = self._tensor(NewTensor(smoothing, "F32", (columns,), lambda: iter(())))
            new.append(ir.node("Mul", [new[0].outputs[0], inverse]))
            self._typed(new[1].outputs[0], node.outputs[0], columns)
        self._model.graph.insert_before(node, new)
        output, title = node.outputs[0], node.outputs[0].name
        ir.convenience.replace_all_uses_with(output, new[-1].outputs[0], replace_graph_outputs=True)
        self._model.graph.remove(node, safe=True)
        new[-1].outputs[0].name = title

    def _rows_form(self, name: str, columns: int) -> Form | None:
        """Return the form of looked-up rows, None if the operator cannot take them."""
        if f"{name}{names.ROWS}" in self._shared:
            blocks = self._shared[f"{name}{names.SCALES}"].shape[1]
            return Form(8, columns // blocks)
        if name in self._rows:
            return self._rows[name] if columns % self._rows[name].block == 0 else None
        return next((Form(8, block) for block in ROW_BLOCKS if columns % block == 0), None)

    def _own_rows(self, name: str, form: Form, codes: NewTensor, scales: NewTensor) -> tuple[NewTensor, NewTensor]:
        """Return tensors of rows that no product has: largest number of a block / 127 is its scale."""
        source = self._source

        def make() -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
            pairs = [_rounded_rows(slab, form.block) for slab in source.slabs(name)]
            return np.concatenate([c for c, _ in pairs]), np.concatenate([s for _, s in pairs]), np.empty(0, np.uint8)

        encoded = _Encoded(make)
        return (
            replace(codes, slabs=lambda: encoded.take(0), prepare=encoded.prepare),
            replace(scales, slabs=lambda: encoded.take(1), prepare=encoded.prepare),
        )

    def _tensor(self, tensor: NewTensor) -> ir.Value:
        """Return the graph's initializer of a tensor. Its bytes are placed later."""
        known = self._model.graph.initializers
        if tensor.name not in known:
            dtype, shape = ONNX_TYPES[tensor.dtype], ir.Shape(tensor.shape)
            value = ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(dtype))
            value.const_value = ir.ExternalTensor("unplaced", 0, 0, dtype, shape=shape, name=tensor.name)
            self._model.graph.register_initializer(value)
            self._made[tensor.name] = tensor
        return known[tensor.name]

    def _ints(self, numbers: list[int]) -> ir.Value:
        name = "ints." + "_".join(map(str, numbers))
        known = self._model.graph.initializers
        if name not in known:
            value = ir.Value(name=name, shape=ir.Shape([len(numbers)]), type=ir.TensorType(ir.DataType.INT64))
            value.const_value = ir.tensor(numbers, ir.DataType.INT64, name=name)
            self._model.graph.register_initializer(value)
        return known[name]

    def _typed(self, value: ir.Value, like: ir.Value, size: int) -> None:
        """Give a value the type of another, and its shape with another last size."""
        value.type = like.type
        if like.shape is not None:
            value.shape = ir.Shape([*list(like.shape)[:-1], size])


def _rounded_rows(rows: NDArray[np.float32], block: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return codes [rows, columns] and scales [rows, blocks] of rows, around the operator's zero point."""
    zero = SYMMETRIC[8]
    blocks = rows.reshape(len(rows), -1, block)
    scales = np.abs(blocks).max(-1) / np.float32(zero - 1)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    codes = np.rint(blocks / scales[..., None]) + zero
    return codes.astype(np.uint8).reshape(rows.shape), scales
