"""Places a graph's weights: the checkpoint's own bytes if their type fits, else a file written tensor by tensor.

Memory never holds a whole tensor: the checkpoint is memory-mapped, and conversions process slabs of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx_ir as ir

from redraft import names
from redraft.config import ROUNDED_BY_PRODUCT, Precision
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import FOLDER, ONNX_TYPES, STORED, NewTensor, Progress, write
from redraft.export.quantization import dequantize
from redraft.export.quantization.product_forms import ProductPlan
from redraft.export.quantization.products import quantize_products
from redraft.names import WeightRef

IN_PLACE_FROM = 0.5
"""A file becomes part of the bundle if the graph reads at least this share of its bytes."""


def place(  # noqa: PLR0913 - the form of every kind of weight
    model: ir.Model, source: AnySource, folder: Path, precision: Precision, progress: Progress, *,
    file: str | None = None, logits: str = names.LOGITS, shared: Iterable[WeightRef] = (),
    weight_only: dequantize.Kind | None = None, plan: ProductPlan | None = None,
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Give every parameter of the graph its bytes under `folder`/weights. Quantized products become MatMulNBits.

    weight_only: quantize products by DequantizeLinear instead; `precision` is then that of the other weights.
    plan: bits of each product, and smoothing; by default, those of the precision.

    A tensor that the checkpoint stores in the type of the precision stays in the checkpoint's file. If the graph would
    use less than `IN_PLACE_FROM` of that file, as for the norms of quantized products, the tensor is written again.

    file: stem of the new file, the precision by default.   logits: the output whose product keeps 8 bits; "" for
    a graph without this output.
    shared: parameters that another graph of the bundle has placed. The graph uses them under the same names, also if
    they are codes and its own precision is higher.
    Returns the places of the parameters.
    """
    placed = {ref.initializer: ref for ref in shared}
    read = [name for name in _parameters(model, source.parameters) if name not in placed]
    product_plan = (plan or ProductPlan(precision)) if precision in ROUNDED_BY_PRODUCT else None
    tensors = quantize_products(model, source, product_plan, logits, placed, keep_attention=plan is None)
    if weight_only:
        tensors = dequantize.dequantize_products(model, source, weight_only, logits)
    for tensor in tensors:
        if tensor.same_as in placed:  # rows of codes that another graph multiplies by
            its = replace(placed[tensor.same_as], initializer=tensor.name, shape=tensor.shape)
            placed.setdefault(tensor.name, its)
    refs: list[WeightRef] = []
    dtype = STORED[precision]
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    unquantized = _parameters(model, source.parameters)
    in_place = _in_place(read, [name for name in unquantized if name not in placed], source, dtype)
    for name in unquantized:
        entry = source.stored(name)
        if name in in_place and entry is not None:
            file_there = source.link(name, folder)
            refs.append(WeightRef(name, file_there, entry.offset, entry.length, dtype, entry.shape))
        else:
            tensors.append(NewTensor(name, dtype, source.parameters[name], partial(source.slabs, name)))
    used = [placed[tensor.name] for tensor in tensors if tensor.name in placed]
    tensors = [tensor for tensor in tensors if tensor.name not in placed]
    if tensors:
        refs += write(tensors, folder, f"{FOLDER}/{file or precision}.safetensors", progress)
    for ref in (*refs, *used):
        _point(model, ref, folder)
    return tuple(sorted(refs, key=lambda ref: ref.initializer))


def _in_place(read: list[str], unquantized: list[str], source: AnySource, dtype: str) -> set[str]:
    """Return the parameters of `unquantized` that stay in the checkpoint's files. All of one file stay, or none.

    read: parameters that the graph read before quantization. Random weights are in the bundle already.
    """
    entries = {name: entry for name in read if (entry := source.stored(name)) is not None}
    fitting = [name for name in unquantized if name in entries and entries[name].dtype == dtype]
    wanted, used = Counter[str](), Counter[str]()
    for name, entry in entries.items():
        wanted[entry.file] += entry.length
        used[entry.file] += entry.length if name in fitting else 0
    good = {file for file in wanted if used[file] >= IN_PLACE_FROM * wanted[file]}
    return {name for name in fitting if entries[name].file in good or not entries[name].name}


def _parameters(model: ir.Model, parameters: dict[str, tuple[int, ...]]) -> list[str]:
    used = {value.name for node in model.graph for value in node.inputs if value is not None}
    return [name for name in parameters if name in used and name in model.graph.initializers]


def _point(model: ir.Model, ref: WeightRef, folder: Path) -> None:
    kind, shape = ONNX_TYPES[ref.dtype], ir.Shape(ref.shape)
    model.graph.initializers[ref.initializer].const_value = ir.ExternalTensor(
        ref.file, ref.offset, ref.length, kind, shape=shape, name=ref.initializer, base_dir=folder
    )
