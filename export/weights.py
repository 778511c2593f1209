"""Where a graph's weights lie: the checkpoint's own bytes where its type fits, else a file written tensor by tensor.

No tensor is ever held whole: the checkpoint is memory-mapped and conversions go in slabs of rows.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from redraft import names
from redraft.config import Precision
from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export import dequantize, quantize
from redraft.export.checkpoint import DOWNLOAD_AGAIN, ITEM_BYTES, Checkpoint, TensorEntry
from redraft.export.passes import weights_of
from redraft.names import WeightRef

FOLDER = "weights"
SLAB_BYTES = 16 << 20
LINK_FROM_BYTES = 256 << 20
RANDOM_STD = 0.02
EXPERT_NAMES = {"gate_proj": ("w1",), "up_proj": ("w3",), "down_proj": ("w2",)}
ONNX_TYPES = {
    "F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16, "U8": ir.DataType.UINT8,
    "I8": ir.DataType.INT8, "I4": ir.DataType.INT4, "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
}  # fmt: skip
STORED: dict[Precision, str] = {
    "fp32": "F32", "fp16": "F16", "bf16": "BF16", "int8": "F32", "int4": "F32", "fp8": "F16",
}  # fmt: skip
"""What unquantized weights are stored as by precision."""
POOL = ("random.normal", "random.ones", "random.zeros")
POOL_SHIFT, POOL_SHIFTS = 256, 1024
"""Random matrices begin at multiples of so many numbers, at so many places."""
_POOL_BLOCK = 1 << 20
Progress = Callable[[str, int, int], None]
AnySource: TypeAlias = "Source | RandomSource | Beside"
Slabs = Iterator[NDArray[Any]]


@dataclass(frozen=True)
class Made:
    """A tensor to be written: its type and shape are known before its content is produced, in slabs of rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    slabs: Callable[[], Slabs]

    @property
    def length(self) -> int:
        """Bytes."""
        elements = int(np.prod(self.shape, dtype=np.int64))
        return elements // 2 if self.dtype == "I4" else elements * ITEM_BYTES[self.dtype]

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """Type and shape in the file's header, whose format knows no numbers of four bits."""
        return ("U8", (self.length,)) if self.dtype == "I4" else (self.dtype, self.shape)


@dataclass(frozen=True)
class Source:
    """The checkpoint's tensors by the names of the module's parameters.

    prefix: what the names of its files get in a bundle, where another checkpoint may have files of the same names.
    """

    checkpoint: Checkpoint
    parameters: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    prefix: str = ""

    def entry(self, parameter: str) -> TensorEntry:
        """The stored tensor of a parameter. Raises CheckpointError when it is missing or of another shape."""
        for name in self._candidates(parameter):
            entry = self.checkpoint.tensors.get(name)
            if entry is None:
                continue
            if entry.shape != self.parameters[parameter]:
                raise CheckpointError(
                    f"tensor {name} is {list(entry.shape)}, config.json asks for {list(self.parameters[parameter])}",
                    DOWNLOAD_AGAIN,
                )
            if entry.dtype not in ("F32", "F16", "BF16"):
                raise UnsupportedModelError(
                    f"tensor {name} is stored as {entry.dtype}; only F32, F16 and BF16 checkpoints are supported",
                    "give the unquantized checkpoint",
                )
            return entry
        raise CheckpointError(
            f"{self.checkpoint.path} has no tensor {parameter}",
            f"{DOWNLOAD_AGAIN}, or save it anew with transformers if it has older names",
        )

    def _candidates(self, parameter: str) -> Iterator[str]:
        yield parameter
        yield self.tied.get(parameter, parameter)
        if ".mlp.experts.experts." in parameter:
            stem, projection, suffix = parameter.replace(".experts.experts.", ".experts.").rsplit(".", 2)
            for moe in (".mlp.", ".block_sparse_moe."):
                for name in (projection, *EXPERT_NAMES[projection]):
                    yield f"{stem}.{name}.{suffix}".replace(".mlp.", moe)
        yield parameter.replace(".mlp.", ".block_sparse_moe.")

    def stored(self, parameter: str) -> TensorEntry | None:
        """Where the checkpoint has the parameter."""
        return self.entry(parameter)

    def link(self, parameter: str, folder: Path) -> str:
        """Put the file that has the parameter below `folder`, once; its path there."""
        shard = self.entry(parameter).file
        file = f"{FOLDER}/{self.prefix}{shard}"
        if not (folder / file).exists():
            _link(self.checkpoint.path / shard, folder / file)
        return file

    def slabs(self, parameter: str) -> Slabs:
        """The parameter in fp32, a few rows at a time."""
        mapped = self.checkpoint.memmap(self.entry(parameter).name)
        for rows in _row_slices(mapped.shape, 4):
            part = mapped[rows] if mapped.shape else mapped
            yield _as_float32(part, self.entry(parameter).dtype)


@dataclass(frozen=True)
class RandomSource:
    """Random weights, for latency work only: every tensor is a piece of one pool, so that few bytes are written.

    Pieces begin at different places, so that no two matrices of a model are the same numbers.
    pool: where normal numbers, ones and zeros lie, `POOL` in this order.
    """

    parameters: dict[str, tuple[int, ...]]
    pool: tuple[WeightRef, ...]

    @classmethod
    def write(
        cls, parameters: dict[str, tuple[int, ...]], folder: Path, dtype: str, file: str = "random"
    ) -> RandomSource:
        """Write the pool to `folder`/weights/`file`.safetensors, large enough for the largest parameter."""
        matrices = [math.prod(shape) for shape in parameters.values() if len(shape) > 1]
        vectors = [math.prod(shape) for shape in parameters.values() if len(shape) <= 1]
        sizes = (max(matrices, default=0) + POOL_SHIFTS * POOL_SHIFT, *[max(vectors, default=1)] * 2)
        made = [
            Made(name, dtype, (size,), (), partial(_random_slabs, name, 0, (size,)))
            for name, size in zip(POOL, sizes, strict=True)
        ]
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        return cls(parameters, tuple(write(made, folder, f"{FOLDER}/{file}.safetensors")))

    def stored(self, parameter: str) -> TensorEntry | None:
        """Its piece of the pool; of no tensor's name."""
        kind, begin = self._piece(parameter)
        ref, shape = self.pool[POOL.index(kind)], self.parameters[parameter]
        item_bytes = ITEM_BYTES[ref.dtype]
        length = math.prod(shape) * item_bytes
        return TensorEntry("", Path(ref.file).name, ref.dtype, shape, ref.offset + begin * item_bytes, length)

    def link(self, parameter: str, folder: Path) -> str:
        """The pool's file, which is there already."""
        return self.pool[0].file

    def slabs(self, parameter: str) -> Slabs:
        """Norm gains are one, biases zero, the rest is normal with standard deviation 0.02; fp32."""
        return _random_slabs(*self._piece(parameter), self.parameters[parameter])

    def _piece(self, parameter: str) -> tuple[str, int]:
        """Which part of the pool, and the first of its numbers."""
        if len(self.parameters[parameter]) > 1:
            return POOL[0], list(self.parameters).index(parameter) % POOL_SHIFTS * POOL_SHIFT
        return POOL[2] if parameter.endswith("bias") else POOL[1], 0


def _random_slabs(kind: str, begin: int, shape: tuple[int, ...]) -> Slabs:
    """Numbers `begin` onward of a part of the pool, as rows of `shape`."""
    row = math.prod(shape[1:])
    for rows in _row_slices(shape, 4):
        part = (rows.stop - rows.start, *shape[1:])
        if kind == POOL[0]:
            yield _normal(begin + rows.start * row, begin + rows.stop * row).reshape(part)
        else:
            yield np.full(part, POOL.index(kind) == 1, np.float32)


def _normal(begin: int, end: int) -> NDArray[np.float32]:
    """Numbers `begin` to `end` of an endless normal sequence, drawn a block at a time."""
    first = begin // _POOL_BLOCK
    blocks = [
        np.random.default_rng(block).standard_normal(_POOL_BLOCK, np.float32)
        for block in range(first, -(-end // _POOL_BLOCK))
    ]
    drawn = np.concatenate(blocks)[begin - first * _POOL_BLOCK : end - first * _POOL_BLOCK]
    drawn *= np.float32(RANDOM_STD)
    return drawn


@dataclass(frozen=True)
class Beside:
    """A drafter's own parameters, beside those of its verifier, which its graph uses too."""

    own: AnySource
    verifier: AnySource

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {**self.verifier.parameters, **self.own.parameters}

    def _of(self, parameter: str) -> AnySource:
        return self.own if parameter in self.own.parameters else self.verifier

    def stored(self, parameter: str) -> TensorEntry | None:
        """Where the checkpoint that has the parameter has it."""
        return self._of(parameter).stored(parameter)

    def link(self, parameter: str, folder: Path) -> str:
        """See `Source.link`."""
        return self._of(parameter).link(parameter, folder)

    def slabs(self, parameter: str) -> Slabs:
        """The parameter in fp32."""
        return self._of(parameter).slabs(parameter)


def place(
    model: ir.Model, source: AnySource, folder: Path, precision: Precision, progress: Progress, *,
    file: str | None = None, logits: str = names.LOGITS, shared: Iterable[WeightRef] = (),
    weight_only: dequantize.Kind | None = None,
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Give every parameter of the graph its bytes under `folder`/weights. Quantized products become MatMulNBits.

    weight_only: quantize products by DequantizeLinear instead; `precision` is then that of the rest.

    A tensor that the checkpoint stores in the type of the precision is used where it lies.

    file: stem of what is written, the precision by default.   logits: the output whose product keeps 8 bits.
    shared: what another graph of the bundle has placed already, used again where it has the same name.
    Returns where the parameters that were placed now lie.
    """
    there = {ref.initializer: ref for ref in shared}
    made = _quantize_products(model, source, precision, logits) if precision in ("int8", "int4") else []
    if weight_only:
        made = [Made(*tensor) for tensor in dequantize.dequantize_products(model, source, weight_only, logits)]
    refs: list[WeightRef] = []
    dtype = STORED[precision]
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for name in _parameters(model, source.parameters):
        entry = source.stored(name)
        sources = (entry.name,) if entry and entry.name else ()
        if name not in there and entry is not None and entry.dtype == dtype:
            file_there = source.link(name, folder)
            refs.append(WeightRef(name, file_there, entry.offset, entry.length, dtype, entry.shape, sources))
        else:
            made.append(Made(name, dtype, source.parameters[name], sources, partial(source.slabs, name)))
    used = [there[tensor.name] for tensor in made if tensor.name in there]
    made = [tensor for tensor in made if tensor.name not in there]
    if made:
        refs += write(made, folder, f"{FOLDER}/{file or precision}.safetensors", progress)
    for ref in (*refs, *used):
        _point(model, ref, folder)
    return tuple(sorted(refs, key=lambda ref: ref.initializer))


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


def _link(source: Path, target: Path) -> None:
    """A copy of a small file; of a large one a hard link where the file system allows it.

    A copy is independent of the checkpoint and opens in onnx's own loader, which refuses hard links; ONNX Runtime takes
    both, and refuses symbolic links.
    """
    if source.stat().st_size >= LINK_FROM_BYTES:
        with contextlib.suppress(OSError):
            os.link(source.resolve(), target)
            return
    shutil.copyfile(source, target)


def write(
    made: list[Made], folder: Path, file: str, progress: Progress = lambda stage, done, total: None
) -> list[WeightRef]:
    """Write a safetensors file in one pass: the header first, since all sizes are known."""
    offset, header = 0, {}
    for tensor in made:
        dtype, shape = tensor.stored
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + tensor.length]}
        offset += tensor.length
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 64 + 56)
    refs, base = [], 8 + len(encoded)
    with (folder / file).open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, tensor in enumerate(made):
            progress("weights", index, len(made))
            begin = stream.tell()
            for slab in tensor.slabs():
                stream.write(_encoded(slab, tensor).data)
            assert stream.tell() - begin == tensor.length, tensor.name
            refs.append(WeightRef(tensor.name, file, begin, tensor.length, tensor.dtype, tensor.shape, tensor.sources))
    progress("weights", len(made), len(made))
    assert min(ref.offset for ref in refs) == base
    return refs


def _quantize_products(model: ir.Model, source: AnySource, precision: Precision, output: str) -> list[Made]:
    """Replace products over stored weights by MatMulNBits; the logits' product keeps 8 bits at int4."""
    made: list[Made] = []
    logits = next(value for value in model.graph.outputs if value.name == output).producer()
    for node in [n for n in model.graph if n.op_type == "MatMul"]:
        weights = [value.name or "" for value in weights_of(node)]
        if not weights:
            continue
        bits = 8 if precision == "int8" or (node is logits or _feeds(node, logits)) else 4
        made += _quantized_product(model, node, weights, source, bits)
    common.RemoveUnusedNodesPass()(model)
    return made


def _feeds(node: ir.Node, logits: ir.Node | None) -> bool:
    """Whether only elementwise work (softcap, scaling) lies between the product and the logits."""
    while logits is not None and logits.op_type in ("Mul", "Tanh", "Div"):
        logits = logits.inputs[0].producer() if logits.inputs[0] is not None else None
    return logits is node


def _quantized_product(model: ir.Model, node: ir.Node, weights: list[str], source: AnySource, bits: int) -> list[Made]:
    rows = sum(source.parameters[name][0] for name in weights)
    columns = source.parameters[weights[0]][1]
    blocks, stem = quantize.blocks_of(columns), weights[0] if len(weights) == 1 else f"{weights[0]}.merged"
    sources = tuple(entry.name for name in weights if (entry := source.stored(name)) is not None)
    shapes = {
        "codes": ("U8", (rows, blocks, quantize.BLOCK * bits // 8)),
        "scales": ("F32", (rows, blocks)),
        "zeros": ("U8", (rows, quantize.zero_bytes(columns, bits))),
    }

    def slabs(part: str) -> Callable[[], Slabs]:
        return lambda: (getattr(quantize.quantize(slab, bits), part) for name in weights for slab in source.slabs(name))

    known = model.graph.initializers
    every = [Made(f"{stem}.{part}", dtype, shape, sources, slabs(part)) for part, (dtype, shape) in shapes.items()]
    made = [tensor for tensor in every if tensor.name not in known]  # a weight may have several products
    for tensor in made:
        value = ir.Value(name=tensor.name, shape=ir.Shape(tensor.shape), type=ir.TensorType(ONNX_TYPES[tensor.dtype]))
        value.const_value = ir.ExternalTensor(
            "unplaced", 0, 0, ONNX_TYPES[tensor.dtype], shape=ir.Shape(tensor.shape), name=tensor.name
        )
        model.graph.register_initializer(value)
    inputs = [known[tensor.name] for tensor in every]
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": quantize.BLOCK, "accuracy_level": 4}
    product = ir.node("MatMulNBits", [node.inputs[0], *inputs], attributes, domain="com.microsoft")
    product.outputs[0].shape, product.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    model.opset_imports["com.microsoft"] = 1
    model.graph.insert_before(node, product)
    output, name = node.outputs[0], node.outputs[0].name
    ir.convenience.replace_all_uses_with(output, product.outputs[0], replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    product.outputs[0].name = name
    return made


def _row_slices(shape: tuple[int, ...], item_bytes: int) -> Iterator[slice]:
    rows = shape[0] if shape else 1
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * item_bytes)
    step = max(1, SLAB_BYTES // row_bytes)
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))


def _encoded(slab: NDArray[Any], tensor: Made) -> NDArray[Any]:
    """The slab in the tensor's type, contiguous. Raises UnsupportedModelError for numbers that fp16 cannot hold."""
    if tensor.dtype == "F16" and slab.dtype == np.float32:
        with np.errstate(over="ignore"):
            slab = slab.astype(np.float16)
        if not np.isfinite(slab).all():
            raise UnsupportedModelError(f"{tensor.name} has numbers that fp16 cannot hold", "build with bf16 or fp32")
    elif tensor.dtype == "BF16" and slab.dtype == np.float32:
        slab = slab.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.ascontiguousarray(slab)


def _as_float32(stored: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
