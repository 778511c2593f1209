"""Places a graph's weights: the checkpoint's own bytes if their type fits, else a file written tensor by tensor.

Memory never holds a whole tensor: the checkpoint is memory-mapped, and conversions process slabs of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import onnx_ir as ir

from redraft import names
from redraft.config import Precision
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import FOLDER, ONNX_TYPES, STORED, NewTensor, Progress, write
from redraft.export.quantization import dequantize
from redraft.export.quantization.product_forms import ProductPlan
from redraft.export.quantization.products import quantize_products, use_shared
from redraft.names import WeightRef

IN_PLACE_FROM = 0.5
"""A file becomes part of the bundle if the graph reads at least this share of its bytes."""


def place(
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
    there = {ref.initializer: ref for ref in shared}
    read = [name for name in _parameters(model, source.parameters) if name not in there]
    if precision in ("int8", "int4"):
        keep_attention = plan is None
        plan = plan or ProductPlan(precision)
        made = quantize_products(model, source, plan, logits, there.values(), keep_attention)
    else:
        made = use_shared(model, source, there.values())
    if weight_only:
        made = dequantize.dequantize_products(model, source, weight_only, logits)
    refs: list[WeightRef] = []
    dtype = STORED[precision]
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    left = _parameters(model, source.parameters)
    kept = _in_place(read, [name for name in left if name not in there], source, dtype)
    for name in left:
        entry = source.stored(name)
        if name in kept and entry is not None:
            file_there = source.link(name, folder)
            refs.append(WeightRef(name, file_there, entry.offset, entry.length, dtype, entry.shape))
        else:
            made.append(NewTensor(name, dtype, source.parameters[name], partial(source.slabs, name)))
    used = [there[tensor.name] for tensor in made if tensor.name in there]
    made = [tensor for tensor in made if tensor.name not in there]
    if made:
        refs += write(made, folder, f"{FOLDER}/{file or precision}.safetensors", progress)
    for ref in (*refs, *used):
        _point(model, ref, folder)
    return tuple(sorted(refs, key=lambda ref: ref.initializer))


def _in_place(read: list[str], left: list[str], source: AnySource, dtype: str) -> set[str]:
    """Return the parameters of `left` that stay in the checkpoint's files. All of one file stay, or none.

    read: parameters that the graph read before quantization. Random weights are in the bundle already.
    """
    entries = {name: entry for name in read if (entry := source.stored(name)) is not None}
    fitting = [name for name in left if name in entries and entries[name].dtype == dtype]
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
    value = model.graph.initializers[ref.initializer]
    value.const_value = ir.ExternalTensor(
        ref.file,
        ref.offset,
        ref.length,
        ONNX_TYPES[ref.dtype],
        shape=ir.Shape(ref.shape),
        name=ref.initializer,
        base_dir=folder,
    )
