"""Products over stored weights as ONNX Runtime's `MatMulNBits`, and looked-up rows as its `GatherBlockQuantized`.

A product of a form with offsets has, after its inputs x, the sum of each block of x:

    y = sum over blocks of scale * (code - zero) * x  +  offset * (sum of the block's x)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common
from onnx_ir.tape import Tape

from redraft import names
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.stored_grid import SYMMETRIC, Grid
from redraft.export.checkpoint.weight_files import ONNX_TYPES, NewTensor, Slabs
from redraft.export.graph.edit import constant_ints, typed, unplaced
from redraft.export.quantization import product_forms
from redraft.export.quantization.product_forms import UNROUNDED, Form, ProductPlan
from redraft.export.quantization.product_weights import ProductWeight, before_attention, feeds
from redraft.names import WeightRef

MICROSOFT = "com.microsoft"
ROW_BLOCKS = (128, 64, 32)
"""Sizes of blocks of looked-up rows, the best first. Rows are not multiplied, so that only their size counts."""


def quantize_products(
    model: ir.Model, source: AnySource, plan: ProductPlan | None, output: str, shared: Mapping[str, WeightRef],
    keep_attention: bool = True,
) -> list[NewTensor]:  # fmt: skip
    """Replace products over stored weights by MatMulNBits, and lookups of their rows by GatherBlockQuantized.

    Those whose weights are in `shared` as codes use these. Without a plan, others stay. With int4, the product of
    `output` keeps 8 bits, and with `keep_attention` those of queries, keys and values: these are few weights, but cause
    half of the loss of 4 bits (docs/log.md). Returns the tensors to write, and those of `shared` that are used.
    """
    return _Quantizer(model, source, plan, shared).run(output, keep_attention)


@dataclass
class _Encoded:
    """Arrays of some tensors, computed when the first of them is read. Each is freed after it is read."""

    make: Callable[[], tuple[NDArray[Any], ...]]

    def __post_init__(self) -> None:
        self._lock, self._arrays = Lock(), dict[int, NDArray[Any]]()

    def fill(self, tensors: list[NewTensor]) -> list[NewTensor]:
        """Return the tensors with the arrays as their content, in order."""
        return [
            replace(tensor, slabs=partial(self._take, number), prepare=self._prepare)
            for number, tensor in enumerate(tensors)
        ]

    def _prepare(self) -> None:
        with self._lock:
            if not self._arrays:
                self._arrays = dict(enumerate(self.make()))

    def _take(self, number: int) -> Slabs:
        self._prepare()
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
        eight_bits = {weight.stem for node, weight in products if node in attended or feeds(node, logits)}
        for node, weight in products:
            self._product(node, weight, weight.stem in eight_bits)
        for node in [node for node in graph if node.op_type == "Gather"]:
            self._lookup(node)
        common.RemoveUnusedNodesPass()(self._model)
        if self._made:
            self._model.opset_imports[MICROSOFT] = 1
        return list(self._made.values())

    def _product(self, node: ir.Node, weight: ProductWeight, eight_bits: bool) -> None:
        """Replace one product, its parts of one form together."""
        codes, plan = self._shared.get(f"{weight.stem}{names.CODES}"), self._plan
        if codes is not None and len(weight.parameters) == 1:  # shared weights have 8 bits and no offsets
            inverse = self._shared.get(f"{weight.stem}{names.SMOOTHING}")
            unread = None if inverse is None else np.ones(inverse.shape, np.float32)
            self._replace_product(node, weight, [(weight, Form(8, codes.shape[2]))], unread)
            return
        if plan is None:
            return
        factors = plan.smoothing.get(weight.parameters[0])
        forms = [(part, plan.form(part, self._source, factors is not None, eight_bits)) for part in weight.parts()]
        groups = [
            (ProductWeight(tuple(part.parameters[0] for part, _ in parts), weight.turned), form)
            for form, parts in groupby(forms, key=lambda item: item[1])
        ]
        if any(form.bits != UNROUNDED for _, form in groups):
            self._replace_product(node, weight, groups, factors)

    def _replace_product(
        self, node: ir.Node, weight: ProductWeight, groups: list[tuple[ProductWeight, Form]],
        factors: NDArray[np.float32] | None,
    ) -> None:  # fmt: skip
        """Replace a product by one for each group of parts, whose results are joined."""
        tape, x, result = Tape(), node.inputs[0], node.outputs[0]
        assert x is not None
        outputs, inputs = weight.shape(self._source)
        if factors is not None:
            smoothing = NewTensor(f"{weight.stem}{names.SMOOTHING}", "F32", (inputs,), lambda: iter([1 / factors]))
            x = typed(tape.op("Mul", [x, self._tensor(smoothing)]), x, inputs)
        parts: list[ir.Value] = []
        for group, form in groups:
            rows = group.shape(self._source)[0]
            if form.bits == UNROUNDED:  # its input is not divided by the factors
                product = tape.op("MatMul", [node.inputs[0], self._unrounded(group, tape)])
            else:
                given = self._with_sums(x, form, inputs, tape) if form.offsets else x
                tensors = self._coded(group, form, factors)
                product = tape.op("MatMulNBits", [given, *map(self._tensor, tensors)], domain=MICROSOFT, attributes={
                    "K": form.columns(inputs), "N": rows, "bits": form.bits, "block_size": form.block,
                    "accuracy_level": 4,
                })  # fmt: skip
                if len(group.parameters) == 1 and form == Form(8, form.block, stored=form.stored):
                    self._rows[group.stem] = form
            parts.append(typed(product, result, rows))
        if len(parts) > 1:
            typed(tape.op("Concat", parts, {"axis": -1}), result, outputs)
        self._replace(node, tape)

    def _replace(self, node: ir.Node, tape: Tape) -> None:
        """Replace a node by those of the tape, the last of which has its result."""
        graph, result, new = self._model.graph, node.outputs[0], tape.nodes[-1].outputs[0]
        graph.insert_before(node, tape.nodes)
        name = result.name
        ir.convenience.replace_all_uses_with(result, new, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        new.name = name

    def _unrounded(self, group: ProductWeight, tape: Tape) -> ir.Value:
        """Return the fp32 weight [in, out] of some parts."""
        values = [self._model.graph.initializers[name] for name in group.parameters]
        if group.turned:
            return values[0]
        whole = tape.op("Concat", values, {"axis": 0}) if len(values) > 1 else values[0]
        return tape.op("Transpose", [whole], {"perm": [1, 0]})

    def _with_sums(self, x: ir.Value, form: Form, inputs: int, tape: Tape) -> ir.Value:
        """Append the sums of blocks to x [..., in]."""
        assert x.shape is not None
        target = constant_ints(self._model, [*[0] * (x.shape.rank() - 1), -1, form.block])
        blocks = tape.op("Reshape", [x, target])
        sums = tape.op("ReduceSum", [blocks, constant_ints(self._model, [-1])], {"keepdims": 0})
        return typed(tape.op("Concat", [x, sums], {"axis": -1}), x, form.columns(inputs))

    def _coded(self, group: ProductWeight, form: Form, factors: NDArray[np.float32] | None) -> list[NewTensor]:
        """Return the tensors of a weight: codes, scales, and zero points if the form has any."""
        rows, inputs = group.shape(self._source)
        blocks, source = form.blocks(inputs), self._source

        def make() -> tuple[NDArray[Any], ...]:
            coded = [product_forms.coded(part, source, form, factors) for part in group.parts()]
            codes = np.concatenate([codes for codes, _ in coded]) if len(coded) > 1 else coded[0][0]
            grid = Grid.joined([grid for _, grid in coded]) if len(coded) > 1 else coded[0][1]
            return product_forms.stored_arrays(codes, grid, form)

        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            names.CODES: ("U8", (rows, blocks, form.block * form.bits // 8)),
            names.SCALES: ("F32", (rows, blocks)),
        }
        if form.zeros:
            parts[names.ZEROS] = ("U8", (rows, -(-blocks * form.bits // 8)))
        tensors = [NewTensor(f"{group.stem}{part}", dtype, shape, _unwritten) for part, (dtype, shape) in parts.items()]
        return _Encoded(make).fill(tensors)

    def _lookup(self, node: ir.Node) -> None:
        """Replace a lookup of rows of a stored matrix: of a product's codes, or of codes of its own."""
        table = node.inputs[0]
        if table is None or table.name not in self._source.parameters or not table.is_initializer():
            return
        name, shape = table.name, self._source.parameters[table.name]
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        shared = not self._shared.keys().isdisjoint((f"{name}{names.ROWS}", f"{name}{names.CODES}"))
        if len(shape) != 2 or axis != 0 or (self._plan is None and not shared):
            return
        form = self._rows_form(name, shape[1])
        if form is None:
            return
        tensors = [
            NewTensor(f"{name}{names.ROWS}", "U8", shape, _unwritten),
            NewTensor(f"{name}{names.SCALES}", "F32", (shape[0], form.blocks(shape[1])), _unwritten),
        ]
        if name in self._rows or f"{name}{names.CODES}" in self._shared:
            tensors[0] = replace(tensors[0], same_as=f"{name}{names.CODES}")
        elif not shared:
            tensors = _Encoded(partial(_rounded_table, self._source, name, form.block)).fill(tensors)
        codes, scales = (self._tensor(tensor) for tensor in tensors)
        tape, result = Tape(), node.outputs[0]
        attributes = {"bits": 8, "block_size": form.block, "gather_axis": 0, "quantize_axis": 1}
        given = [codes, node.inputs[1], scales]
        rows = typed(tape.op("GatherBlockQuantized", given, attributes, domain=MICROSOFT), result, shape[1])
        smoothing = f"{name}{names.SMOOTHING}"
        if smoothing in self._model.graph.initializers or smoothing in self._shared:
            inverse = self._tensor(NewTensor(smoothing, "F32", shape[1:], _unwritten))
            typed(tape.op("Mul", [rows, inverse]), result, shape[1])
        self._replace(node, tape)

    def _rows_form(self, name: str, columns: int) -> Form | None:
        """Return the form of looked-up rows, None if the operator cannot take them."""
        if f"{name}{names.ROWS}" in self._shared:
            return Form(8, columns // self._shared[f"{name}{names.SCALES}"].shape[1])
        if (codes := self._shared.get(f"{name}{names.CODES}")) is not None:
            return Form(8, codes.shape[2]) if codes.shape[1] * codes.shape[2] == columns else None
        if name in self._rows:
            return self._rows[name] if columns % self._rows[name].block == 0 else None
        return next((Form(8, block) for block in ROW_BLOCKS if columns % block == 0), None)

    def _tensor(self, tensor: NewTensor) -> ir.Value:
        """Return the graph's initializer of a tensor, which is written if it is new."""
        if tensor.name not in self._model.graph.initializers:
            self._made[tensor.name] = tensor
        return unplaced(self._model, tensor.name, ONNX_TYPES[tensor.dtype], tensor.shape)


def _unwritten() -> Slabs:
    """Return no content: that of a tensor whose bytes are another's, or are made later."""
    return iter(())


def _rounded_table(source: AnySource, name: str, block: int) -> tuple[NDArray[Any], ...]:
    """Return codes and scales of rows that no product has."""
    parts = [_rounded_rows(slab, block) for slab in source.slabs(name)]
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def _rounded_rows(rows: NDArray[np.float32], block: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return codes [rows, columns] and scales [rows, blocks]: a block's largest number / 127 is its scale."""
    zero = SYMMETRIC[8]
    blocks = rows.reshape(len(rows), -1, block)
    scales = np.abs(blocks).max(-1) / np.float32(zero - 1)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    codes = np.rint(blocks / scales[..., None]) + zero
    return codes.astype(np.uint8).reshape(rows.shape), scales
