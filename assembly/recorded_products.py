"""Rounded products and lookups of an engine's graph, and their inputs and results for a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from redraft import names
from redraft.assembly.quality import bind_caches, fill_chain
from redraft.engines import Bundle, open_calls
from redraft.engines.manifest import GraphRecord
from redraft.names import TensorSpec

if TYPE_CHECKING:
    from redraft.export.quantization.product_weights import ProductWeight
    from redraft.export.verifier import TracedVerifier

Array = NDArray[np.float32]
GRAPH = "verifier.check"
IN_ROWS = ".in_rows"
CHUNKS = (16, 1, 1, 6)
"""Tokens of each call: a prompt's, single ones, a draft's."""


@dataclass(frozen=True)
class Lookup:
    """One lookup of rounded rows: its parameter, and the names of the rows' numbers and of the rows."""

    table: str
    index: str
    value: str


@dataclass(frozen=True)
class Product:
    """One product: the names of its input before smoothing and sums, and of its result.

    columns: numbers of the input.   parameters: the outputs of each parameter of its weight.
    """

    stem: str
    input: str
    result: str
    bits: int
    block: int
    columns: int
    parameters: Mapping[str, slice]

    @property
    def rows(self) -> int:
        """The number of all outputs."""
        return max(int(outputs.stop) for outputs in self.parameters.values())


def find_products(graph: ir.Model, traced: TracedVerifier) -> Iterator[Product]:
    """Yield the products over stored codes."""
    weights = {name: (weight, place) for weight in traced.products for place, name in enumerate(weight.parameters)}
    for node in graph.graph:
        if node.op_type not in names.PRODUCTS:
            continue
        codes, given = node.inputs[1], node.inputs[0]
        assert codes is not None
        assert given is not None
        stem = str(codes.name).removesuffix(names.CODES)
        weight, first = weights[stem.removesuffix(".merged")]
        number = {key: node.attributes[key].as_int() for key in ("N", "bits", "block_size")}
        yield Product(
            stem, _before(given), str(node.outputs[0].name), number["bits"], number["block_size"],
            weight.shape(traced.source)[1], _covered(weight, first, number["N"], traced),
        )  # fmt: skip


def _covered(weight: ProductWeight, first: int, rows: int, traced: TracedVerifier) -> dict[str, slice]:
    """Return the outputs of the parameters from the number `first` on that have `rows` outputs together."""
    outputs: dict[str, slice] = {}
    begin = 0
    for part in weight.parts()[first:]:
        if begin < rows:
            end = begin + part.shape(traced.source)[0]
            outputs[part.parameters[0]] = slice(begin, end)
            begin = end
    assert begin == rows, weight
    return outputs


def _before(value: ir.Value) -> str:
    """Return the name of a product's input before the sums of blocks and the smoothing."""
    node = value.producer()
    if node is not None and node.op_type == "Concat":
        sums = node.inputs[1].producer() if node.inputs[1] is not None else None
        if sums is not None and sums.op_type == "ReduceSum" and node.inputs[0] is not None:
            return _before(node.inputs[0])
    if node is not None and node.op_type == "Mul":
        for one, other in (node.inputs, node.inputs[::-1]):
            if other is not None and one is not None and (other.name or "").endswith(names.SMOOTHING):
                return str(one.name)
    return str(value.name)


def find_lookups(graph: ir.Model) -> Iterator[Lookup]:
    """Yield the lookups of rounded rows."""
    for node in graph.graph:
        if node.op_type == "GatherBlockQuantized":
            table, index, value = node.inputs[0], node.inputs[1], node.outputs[0]
            assert table is not None
            assert index is not None
            users = [use.node for use in value.uses() if use.node.op_type == "Mul"]
            smoothed = [n for n in users if any((x.name or "").endswith(names.SMOOTHING) for x in n.inputs if x)]
            value = smoothed[0].outputs[0] if smoothed else value
            yield Lookup(str(table.name).removesuffix(names.ROWS), str(index.name), str(value.name))


def record_values(
    bundle: Bundle, graph: ir.Model, products: Sequence[Product], lookups: Set[str], tokens: Sequence[int]
) -> dict[str, Array]:
    """Run a chain of tokens. Returns the wanted values of the graph by name, [T, n]."""
    manifest, shape = bundle.manifest, bundle.manifest.shape
    wanted = {name for product in products for name in (product.input, product.result)} | lookups
    values = {value.name: value for node in graph.graph for value in node.outputs}
    outputs = {value.name for value in graph.graph.outputs}
    record = bundle.graph(bundle.host_graph(False))
    specs = list(record.outputs)
    packed = any(spec.name == names.PACKED_ROWS for spec in record.inputs)
    for name in sorted(wanted - outputs):
        value = values[name]
        sizes = {p.input: p.columns for p in products} | {p.result: p.rows for p in products}
        size = sizes.get(name, shape.hidden)
        rows = "R" if any(p.result == names.LOGITS and p.input == name for p in products) else "T"
        value = _in_rows(graph.graph, value, [1, rows, size])  # some modules compute with [B * T, n]
        graph.graph.outputs.append(value)
        specs.append(TensorSpec(str(value.name), "float32", (1, rows, size)))
    file = f"{GRAPH}.onnx"
    try:
        ir.save(graph, bundle.path / file)
        graphs = {**manifest.graphs, GRAPH: GraphRecord(file, record.inputs, tuple(specs))}
        calls = open_calls(Bundle(bundle.path, replace(manifest, graphs=graphs)), GRAPH)
        bind_caches(calls, shape, len(tokens) + 1)
        parts: dict[str, list[Array]] = {name: [] for name in {*wanted, names.LOGITS}}
        given = {name: name if name in outputs else f"{name}{IN_ROWS}" for name in parts}
        start = 0
        for size in CHUNKS:
            chunk = np.asarray(tokens[start : start + size], np.int64)
            if not len(chunk):
                break
            call = calls.prepare(B=1, T=len(chunk), R=len(chunk), **({"N": len(chunk)} if packed else {}))
            fill_chain(call, chunk, start)
            call.run()
            for name, rows_ in parts.items():
                rows_.append(call.outputs[given[name]][0].copy())
            start += len(chunk)
    finally:
        (bundle.path / file).unlink(missing_ok=True)
    return {name: np.concatenate(rows_) for name, rows_ in parts.items()}


def _in_rows(graph: ir.Graph, value: ir.Value, shape: list[int | str]) -> ir.Value:
    """Add a value's reshaping into [1, T, n] to the graph. Returns its result."""
    target = ir.Value(name=f"{value.name}{IN_ROWS}.shape", const_value=ir.tensor([1, -1, shape[-1]]))
    graph.register_initializer(target)
    node = ir.node("Reshape", [value, target])
    (result,) = node.outputs
    result.name, result.type, result.shape = f"{value.name}{IN_ROWS}", ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    graph.append(node)
    return result
