"""Checks that rounded engines compute what they should: each product by its stored codes, and all between the products.

1. Stored codes and looked-up rows are the checkpoint's weights, as closely as their bits allow.
2. Each product's result is that of its stored codes and its input, rounded as ONNX Runtime rounds it.
3. Each product's input is what transformers' own modules compute from the results of the products before it.

The sums' order is the only difference that is allowed in 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from redraft import names
from redraft.assembly.recorded_products import (
    CHUNKS,
    Array,
    Lookup,
    Product,
    find_lookups,
    find_products,
    record_values,
)
from redraft.engines import Bundle
from redraft.errors import UnsupportedModelError
from redraft.garbage import return_memory
from redraft.names import WeightRef

if TYPE_CHECKING:
    from redraft.export.checkpoint.sources import AnySource
    from redraft.export.verifier import TracedVerifier

ORDER = 2e-3
"""Largest difference by the order of sums, of root mean squares. Inputs at a tie may be rounded up or down."""
ROUNDED_KV = 0.05
"""The same if the engine also rounds keys and values. Large scores make it a larger difference of probabilities."""
ROUNDED = {8: 0.02, 4: 0.3}
"""Largest root mean square difference of a weight from its stored codes, relative to the weight's."""


@dataclass(frozen=True)
class _Stored:
    """The bundle's weights by the names of their initializers."""

    folder: Path
    refs: Mapping[str, WeightRef]

    def array(self, name: str, dtype: Any, rows: slice = slice(None)) -> NDArray[Any]:
        """Return rows of a stored array."""
        ref = self.refs[name]
        mapped = np.memmap(self.folder / ref.file, dtype, "r", ref.offset, ref.shape)
        return np.array(mapped[rows])

    def factors(self, stem: str) -> Any:
        """Return the factors by which a product's inputs or a lookup's rows are multiplied; 1 without smoothing."""
        name = f"{stem}{names.SMOOTHING}"
        return self.array(name, np.float32) if name in self.refs else np.float32(1)


def check_products(bundle: Bundle, traced: TracedVerifier, text: Sequence[int]) -> tuple[int, bool]:
    """Compare the staged bundle's engine for any batch. text: its token ids.

    Returns the number of products, and True if transformers has modules for all of them, which it has not for experts:
    then what is between the products is compared too. Raises UnsupportedModelError naming the first that differs.
    """
    from redraft.export.forced import Recorded, can_force, compare_forced

    graph = ir.load(bundle.path / bundle.graph(bundle.host_graph(False)).file)
    products, lookups = list(find_products(graph, traced)), list(find_lookups(graph))
    tokens = list(text)[: sum(CHUNKS)]
    values = record_values(bundle, graph, products, {lookup.value for lookup in lookups}, tokens)
    return_memory()
    stored = _Stored(bundle.path, {ref.initializer: ref for ref in bundle.manifest.weights})
    weights = {part.parameters[0]: part for weight in traced.products for part in weight.parts()}
    indices = {names.TOKEN_IDS: tokens, names.POSITIONS: range(len(tokens))}
    for lookup in lookups:
        if lookup.index in indices:
            _check_lookup(stored, lookup, traced.source, indices[lookup.index], values[lookup.value])
    for product in products:
        slabs = {parameter: weights[parameter].slabs(traced.source) for parameter in product.parameters}
        _check_product(stored, product, slabs, values)
    parts = {
        parameter: np.ascontiguousarray(values[product.result][:, outputs])
        for product in products
        for parameter, outputs in product.parameters.items()
    }
    if not can_force(traced, parts):
        return len(products), False
    most = ORDER if bundle.manifest.shape.kv is None else ROUNDED_KV
    inputs = {parameter: values[product.input] for product in products for parameter in product.parameters}
    rows = {lookup.table: values[lookup.value] for lookup in lookups}
    compare_forced(
        traced,
        Recorded(tokens, inputs, parts, rows, values[names.LOGITS]),
        lambda name, expected, value: _check(f"the input of {name}", expected, value, most),
    )
    return len(products), True


def _check_product(
    stored: _Stored, product: Product, slabs: Mapping[str, Iterable[Array]], values: Mapping[str, Array]
) -> None:
    """Compare all outputs, a few at a time: the codes with the checkpoint, the result with the codes.

    slabs: the checkpoint's rows by parameter.
    """
    import torch

    from redraft.export.quantization.calibrate import rounded_inputs

    factors = stored.factors(product.stem)
    given = _with_sums(values[product.input] * factors, product, stored)
    rounded: Array = rounded_inputs(torch.from_numpy(given), product.block).numpy()
    choices = (rounded, given)  # some processors have no kernel for rounded inputs
    for parameter, outputs in product.parameters.items():
        begin = outputs.start
        for exact in slabs[parameter]:
            rows = slice(begin, begin + len(exact))
            begin = rows.stop
            weight = _stored_rows(stored, product, rows)
            own = weight[:, : product.columns] + _offsets(weight, product)
            _check(f"the stored weight of {parameter}", exact / factors, own, ROUNDED[product.bits])
            result = values[product.result][:, rows]
            expected = [choice[:, : weight.shape[1]] @ weight.T for choice in choices]
            _check(f"the product of {parameter}", min(expected, key=lambda one: _relative(one, result)), result)


def _with_sums(x: Array, product: Product, stored: _Stored) -> Array:
    """Append the sums of blocks, if the product has offsets, and zeros up to whole blocks."""
    own = -(-product.columns // product.block)
    blocks = stored.refs[f"{product.stem}{names.CODES}"].shape[1]
    if blocks > own:
        x = np.concatenate([x, x.reshape(len(x), own, -1).sum(-1)], 1)
    return np.pad(x, ((0, 0), (0, blocks * product.block - x.shape[1])))


def _offsets(weight: Array, product: Product) -> Array:
    """Return the offsets of a stored weight's blocks, repeated for each of their inputs."""
    own = -(-product.columns // product.block)
    blocks = weight.shape[1] // product.block
    if blocks == own:
        return np.zeros((len(weight), product.columns), np.float32)
    return np.repeat(weight[:, product.columns : product.columns + own], product.block, 1)


def _stored_rows(stored: _Stored, product: Product, rows: slice) -> Array:
    """Return rows of a stored weight in fp32, offsets and padding included."""
    from redraft.export.checkpoint.stored_grid import SYMMETRIC, Grid
    from redraft.export.quantization.rounding import values_of

    codes = stored.array(f"{product.stem}{names.CODES}", np.uint8, rows)
    scales = stored.array(f"{product.stem}{names.SCALES}", np.float32, rows)
    zeros = np.full(scales.shape, SYMMETRIC[product.bits], np.uint8)
    if (name := f"{product.stem}{names.ZEROS}") in stored.refs:
        zeros = _unpacked(stored.array(name, np.uint8, rows), product.bits)[:, : scales.shape[1]]
    return values_of(_unpacked(codes, product.bits), Grid(scales, zeros))


def _unpacked(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


def _check_lookup(stored: _Stored, lookup: Lookup, source: AnySource, indices: Sequence[int], found: Array) -> None:
    """Compare looked-up rows with the checkpoint's, as they are stored."""
    numbers, begin = np.asarray(indices), 0
    exact = np.empty_like(found)
    for slab in source.slabs(lookup.table):
        here = (begin <= numbers) & (numbers < begin + len(slab))
        exact[here] = slab[numbers[here] - begin]
        begin += len(slab)
    factors = stored.factors(lookup.table)
    _check(f"the stored weight of {lookup.table}", exact / factors, found / factors, ROUNDED[8])


def _check(what: str, expected: Array, found: Array, most: float = ORDER) -> None:
    """Raise UnsupportedModelError if the difference is above `most`, or is NaN."""
    apart = _relative(expected, found)
    if not apart <= most:
        raise UnsupportedModelError(
            f"the exported model differs from the checkpoint: {what} differs by {apart:.2g} of its size, more than "
            "rounding",
            "report this model",
        )


def _relative(expected: Array, found: Array) -> float:
    """Return the root mean square difference of two results, relative to the root mean square of the first."""
    size = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
    return float(np.sqrt(np.mean(np.square(found - expected, dtype=np.float64)))) / max(size, 1e-30)
