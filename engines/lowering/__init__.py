"""The portable graphs lowered to ONNX Runtime's CPU kernels, so that a row's bits depend on its own sequence only.

redraft::TreeAttention        -> products and a softmax, any batch (`batch`), of packed or padded rows (`rows`)
                                 com.microsoft.GroupQueryAttention, one sequence, rotation inside it (`single`)
                                 redraft's own kernel, any batch, rotation inside it (`operators`)
Split, Sigmoid, Mul, Mul      -> redraft::SiluGate, with redraft's operators only
Concat of x and sums, product -> redraft::SummedProduct, with redraft's operators only
redraft::AddNoise             -> the hash in int32, skipped if no sequence of a call has noise
Add, RMSNormalization         -> com.microsoft.SkipSimplifiedLayerNormalization

`order` puts rows in the order of their positions, which gives a tree a chain's numbers. Lowered graphs share their
weights with the portable graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
    TopologicalSortPass,
)

from redraft import names, noise_spec
from redraft.engines.bundle import single_chain
from redraft.engines.drafters import chain_outputs, single_sequence
from redraft.engines.lowering.batch import BatchAttention
from redraft.engines.lowering.nodes import MICROSOFT, Nodes
from redraft.engines.lowering.operators import OperatorAttention, fits_operator, fuse_factors, fuse_sums
from redraft.engines.lowering.single import (
    ChainAttention,
    SingleAttention,
    fits_chain,
    fits_single,
)
from redraft.engines.manifest import GraphRecord
from redraft.signatures import packed_inputs, packed_outputs


def lower_packed(folder: Path, portable: GraphRecord) -> GraphRecord | None:
    """Write `folder`/verifier.batch.onnx, the lowered form of the verifier's graph `portable`, for any batch.

    Its rows are packed (`signatures.packed_inputs`), so its products compute no padding. Returns its record. Writes
    nothing and returns None if the graph has no attention.
    """
    model = ir.load(folder / portable.file)
    attentions = _attentions(model)
    if not attentions:
        return None
    _pack(model.graph)
    lowered = BatchAttention(model.graph, packed=True)
    for node in attentions:
        lowered.lower(node)
    inputs, outputs = packed_inputs(portable.inputs), packed_outputs(portable.outputs)
    return _save(model, folder, GraphRecord(f"{names.VERIFIER_BATCH}.onnx", inputs, outputs))


def lower_operators(folder: Path, portable: GraphRecord) -> GraphRecord | None:
    """Write `folder`/verifier.operators.onnx, the form of the verifier's graph for redraft's operators, of packed rows.

    Returns its record. Writes nothing and returns None if a layer does not fit the operator.
    """
    model = ir.load(folder / portable.file)
    attentions = _attentions(model)
    if not attentions or not all(map(fits_operator, attentions)):
        return None
    _pack(model.graph)
    lowered = OperatorAttention(model.graph)
    for node in attentions:
        lowered.lower(node)
    fuse_factors(model.graph)
    fuse_sums(model.graph)
    inputs, outputs = packed_inputs(portable.inputs), packed_outputs(portable.outputs)
    return _save(model, folder, GraphRecord(f"{names.VERIFIER_OPERATORS}.onnx", inputs, outputs))


def lower_batch(folder: Path, portable: GraphRecord, name: str) -> GraphRecord | None:
    """Write `folder`/`name`.onnx, the lowered form of a drafter's graph `portable`, for any batch, with padded rows.

    Returns its record. Writes nothing and returns None if the graph has no attention.
    """
    model = ir.load(folder / portable.file)
    attentions = _attentions(model)
    if not attentions:
        return None
    lower_noise(model)
    lowered = BatchAttention(model.graph)
    for node in attentions:
        lowered.lower(node)
    return _save(model, folder, GraphRecord(f"{name}.onnx", portable.inputs, portable.outputs))


def lower_single(
    folder: Path, portable: GraphRecord, exact: bool = True, name: str = "", chains: bool = False
) -> GraphRecord | None:
    """Write `folder`/verifier.single.onnx, the lowered form of its graph `portable`, for chains of one sequence.

    exact: True if its logits equal those of `lower_packed`, to the bit. Otherwise it is verifier.fast.onnx, which takes
    trees too and is faster for both.   name: of the file, for another decoder's graph.   chains: True if that graph
    takes no trees. Returns its record. Writes nothing and returns None if a layer does not fit the kernel.
    """
    model = ir.load(folder / portable.file)
    attentions = _attentions(model)
    if not attentions or not all(map(fits_single, attentions)):
        return None
    _fix_batch(model.graph)
    lower_noise(model)
    lowered = SingleAttention(model.graph, exact, chains)
    for node in attentions:
        lowered.lower(node)
    if exact:
        _drop_input(model.graph, names.TREE_MASK)
    name = name or (names.VERIFIER_SINGLE if exact else names.VERIFIER_FAST)
    inputs = single_chain(portable.inputs) if exact else single_sequence(portable.inputs)
    outputs = single_sequence(portable.outputs)
    return _save(model, folder, GraphRecord(f"{name}.onnx", inputs, outputs))


def lower_chain(folder: Path, portable: GraphRecord, name: str) -> GraphRecord | None:
    """Write `folder`/`name`.onnx, the lowered form of a drafter's graph, like `lower_single`.

    Its rows are causal chains and trees. Every node writes to its layer's buffers in place: nodes after a layer's first
    have their own outputs over the same inputs.
    """
    model = ir.load(folder / portable.file)
    attentions = _attentions(model)
    if not attentions or not all(map(fits_chain, attentions)):
        return None
    _fix_batch(model.graph)
    lower_noise(model)
    lowered = ChainAttention(model.graph)
    updates = _write_in_place(model.graph, [lowered.lower(node) for node in attentions])
    outputs = single_sequence(chain_outputs(portable.outputs, updates))
    return _save(model, folder, GraphRecord(f"{name}.onnx", single_sequence(portable.inputs), outputs))


def lower_drafter_operators(folder: Path, portable: GraphRecord, name: str, chain: bool) -> GraphRecord | None:
    """Write `folder`/`name`.onnx, the form of a drafter's graph for redraft's operators, any batch, padded rows.

    chain: True if its nodes write to the same buffers, in place like those of `lower_chain`. Returns its record. Writes
    nothing and returns None if a layer does not fit the operator.
    """
    model = ir.load(folder / portable.file)
    attentions = _attentions(model)
    if not attentions or not all(map(fits_operator, attentions)):
        return None
    lower_noise(model)
    lowered = OperatorAttention(model.graph)
    made = [lowered.lower(node) for node in attentions]
    outputs = chain_outputs(portable.outputs, _write_in_place(model.graph, made)) if chain else portable.outputs
    fuse_factors(model.graph)
    fuse_sums(model.graph)
    return _save(model, folder, GraphRecord(f"{name}.onnx", portable.inputs, outputs))


def lower_any(folder: Path, portable: GraphRecord, name: str) -> GraphRecord | None:
    """Write `folder`/`name`.onnx, a drafter's graph with the CPU's form of the noise alone, for any batch.

    Returns its record. Writes nothing and returns None if the graph adds no noise.
    """
    model = ir.load(folder / portable.file)
    if not lower_noise(model):
        return None
    TopologicalSortPass()(model)
    record = GraphRecord(f"{name}.onnx", portable.inputs, portable.outputs)
    ir.save(model, folder / record.file)
    return record


def _attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == names.TREE_ATTENTION]


def _save(model: ir.Model, folder: Path, record: GraphRecord) -> GraphRecord:
    for node in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        _fuse_residual(model.graph, node)
    model.opset_imports[MICROSOFT] = 1
    tidies = (RemoveUnusedNodesPass, RemoveUnusedFunctionsPass, TopologicalSortPass, CommonSubexpressionEliminationPass)
    for tidy in tidies:
        tidy()(model)
    ir.save(model, folder / record.file)
    return record


def _drop_input(graph: ir.Graph, name: str) -> None:
    graph.inputs.remove(next(value for value in graph.inputs if value.name == name))


def _pack(graph: ir.Graph) -> None:
    """Give a verifier's graph the inputs of packed rows, and packed shapes to all values of rows."""
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        if value.shape is not None and not _is_padded(value):
            value.shape = ir.Shape([1 if dim == "B" else "N" if dim == "T" else dim for dim in value.shape])
    rows = ir.Value(name=names.PACKED_ROWS, shape=ir.Shape(["N"]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(rows)
    _pack_sizes(graph)


def _is_padded(value: ir.Value) -> bool:
    name = value.name or ""
    return name in (names.TREE_MASK, names.CACHE_LEN) or names.is_cache(name)


def _pack_sizes(graph: ir.Graph) -> None:
    """Replace B by 1 for the nodes that reshape rows. The exporter takes B from any input, such as a KV buffer."""
    one = Nodes(graph, "packed").constant([1])
    for value in filter(_is_padded, graph.inputs):
        for node in [use.node for use in value.uses() if use.node.op_type == "Shape"]:
            if (node.attributes.get_int("start", 0), node.attributes.get_int("end", -1)) == (0, 1):
                replace_nodes_and_values(graph, node, [node], [], node.outputs, [one])


def _fix_batch(graph: ir.Graph) -> None:
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([1 if dim == "B" else dim for dim in value.shape])


def _write_in_place(graph: ir.Graph, attentions: list[ir.Node]) -> int:
    """Let all nodes of chains of updates read the graph's own buffers and output their updates in place.

    In-place updates through inner values would be copies, since only the graph's inputs and outputs are bound. Returns
    how many nodes update a layer's buffers.
    """
    layers = sum(names.is_cache(value.name or "") for value in graph.inputs) // 2
    updates = len(attentions) // layers
    for number, fused in enumerate(attentions):
        for place in (3, 4):
            cache, written = fused.inputs[place], fused.outputs[place - 2]
            assert cache is not None
            if (before := cache.producer()) is not None:  # an update of the same buffer, which reads it itself by now
                cache = before.inputs[place]
                assert cache is not None
                fused.replace_input_with(place, cache)
            if (step := number // layers) + 1 < updates:
                written.name = f"{names.present(str(cache.name))}.{step}"
                written.shape, written.type = cache.shape, cache.type
                graph.outputs.append(written)
    return updates


def _fuse_residual(graph: ir.Graph, norm: ir.Node) -> None:
    """Fuse Add and RMSNormalization over the last axis into one node that outputs the sum and its norm.

    The kernel takes only summands of [B, T, n], so a bias or a scalar summand is not fused.
    """
    total = norm.inputs[0]
    add = total.producer() if total is not None else None
    if total is None or add is None or add.op_type != "Add" or norm.attributes.get_int("axis", -1) != -1:
        return
    if any(x is not None and x.shape is not None and x.shape.rank() != 3 for x in add.inputs):
        return
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    fused = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*add.inputs, norm.inputs[1]],
        {"epsilon": epsilon},
        domain=MICROSOFT,
        num_outputs=4,
    )
    for unused in fused.outputs[1:3]:
        unused.name = ""
    normed, _, _, summed = fused.outputs
    replace_nodes_and_values(graph, norm, [norm, add], [fused], [norm.outputs[0], total], [normed, summed])


def lower_noise(model: ir.Model) -> bool:
    """Lower every AddNoise node in place. Returns False if there is none. The graph must be sorted afterwards."""
    found = [node for node in model.graph if node.op_type == names.ADD_NOISE]
    if not found:
        return False
    identifier = next(known for known, function in model.functions.items() if function.name == names.TOKEN_HASHES)
    model.functions[identifier] = _hashes(model.functions[identifier].opset_imports)
    nodes = Nodes(model.graph, "noise")
    for node in found:
        _skip_without_noise(model.graph, nodes, node)
    RemoveUnusedFunctionsPass()(model)
    return True


def _skip_without_noise(graph: ir.Graph, nodes: Nodes, node: ir.Node) -> None:
    inputs = [value for value in node.inputs if value is not None]
    largest = nodes.node("ReduceMax", [inputs[1]], keepdims=0)
    (noisy,) = nodes.choose(
        nodes.node("Greater", [largest, nodes.constant(np.float32(0))]),
        lambda: [nodes.node(node.op_type, inputs, node.domain)],
        lambda: [nodes.node("Identity", inputs[:1])],
    )
    replace_nodes_and_values(graph, node, [node], [], node.outputs, [noisy])


def _hashes(opsets: Mapping[str, int]) -> ir.Function:
    """Return the function TokenHashes: keys [B, S, 2] and ids [H] to hashes, uint32 [B, S, H].

    The portable function divides int64 numbers, one at a time. Numbers of 32 bits wrap by themselves, and the CPU
    kernels multiply and shift several of them at once. The hashes are the same. ONNX Runtime multiplies int32 but
    not uint32, and shifts uint32 but not int32.
    """
    builder = tape.Tape()

    def op(name: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return builder.op(name, inputs, attributes)

    def constant(value: int, dtype: type[np.generic] = np.int32) -> ir.Value:
        return op("Constant", value=ir.tensor(np.array(value, dtype)))

    def cast(value: ir.Value, to: ir.DataType) -> ir.Value:
        return op("Cast", value, to=to)

    def quadratic(x: ir.Value) -> ir.Value:
        square = op("Mul", x, x)
        return op("Add", x, op("Add", square, square))

    keys, ids = ir.Value(name="keys"), ir.Value(name="ids")
    signed, unsigned = ir.DataType.INT32, ir.DataType.UINT32
    first, second = builder.op_multi_out("Split", [cast(keys, signed)], {"axis": 2, "num_outputs": 2}, num_outputs=2)
    x = quadratic(op("Add", op("Mul", cast(ids, signed), constant(noise_spec.FIRST)), first))
    high = op("BitShift", cast(x, unsigned), constant(noise_spec.SHIFT, np.uint32), direction="RIGHT")
    x = op("Add", x, cast(high, signed))
    x = cast(quadratic(op("Add", op("Mul", x, constant(noise_spec.SECOND)), second)), unsigned)
    for number, value in enumerate(value for node in builder.nodes for value in node.outputs):
        value.name = f"value.{number}"
    graph = ir.Graph([keys, ids], [x], nodes=builder.nodes, opset_imports=dict(opsets))
    return ir.Function(names.TREE_ATTENTION_DOMAIN, names.TOKEN_HASHES, graph=graph, attributes=[])
