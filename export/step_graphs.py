"""What the host computes between engine calls, as graphs: so that on a GPU a step comes back with one small copy.

Each has a NumPy reference in `redraft.runtime.tree` (mask, depths, accepted path) or a plain meaning (rows moved), and
is tested against it. They hold no weights; sizes of the model are the only constants in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn

from redraft import names
from redraft.export import passes, tracing
from redraft.export.verifier import finish
from redraft.names import LyannaShape, TensorSpec, VerifierShape

_TRACED = 3
_ONNX_TYPES = {"int64": "INT64", "float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}


class _Layout(nn.Module):
    """Ancestors by doubling: who is reached in at most 2^k steps towards the root."""

    def forward(self, parents: torch.Tensor, past_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nodes = torch.arange(parents.shape[1])
        reached = ((parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()  # [B, T, T]
        for _ in range(names.MOST_DEPTH.bit_length() - 1):
            reached = ((reached @ reached) > 0).float()
        return reached.long().sum(2) - 1 + past_len[:, None], reached > 0


class _Accept(nn.Module):
    """The deepest node of whose ancestors, itself included, each is what the verifier says after its parent."""

    def forward(
        self, logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, mask: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        said = logits.argmax(2)  # [B, T]
        nodes = torch.arange(tokens.shape[1])[None]
        root = parents < 0
        right = (tokens == said.gather(1, torch.maximum(parents, torch.tensor(0)))) & (nodes < count[:, None]) | root
        wrong = (mask & ~right[:, None]).long().sum(2)  # ancestors that do not hold
        depths = mask.long().sum(2)
        last = torch.where(wrong == 0, depths, 0).argmax(1, keepdim=True)  # [B, 1]
        on_path = mask.gather(1, last[:, :, None].expand(-1, -1, mask.shape[2]))[:, 0]  # [B, T]
        kept = on_path.long().sum(1)
        # The path's nodes in order, then whatever comes: nodes of the path sort before all others.
        first = torch.where(on_path, nodes, nodes + tokens.shape[1]).float()  # a type that every TopK knows
        order = first.topk(tokens.shape[1], dim=1, largest=False)[1]
        path = torch.where(nodes < kept[:, None], order, nodes)
        return path, kept, torch.cat([kept[:, None], path, said], dim=1)


def export_step_graphs(shape: VerifierShape, lyanna: LyannaShape | None, out: Path) -> dict[str, str]:
    """Write the graphs of a step into `out`; returns the file by the graph's name."""
    models = {
        names.STEP_LAYOUT: _layout(),
        names.STEP_ACCEPT: _accept(shape),
        names.STEP_KEEP: _keep(shape),
        names.STEP_MOVE: _move(names.STEP_MOVE, names.verifier_state(shape)),
    }
    if lyanna:
        models[names.STEP_COLLECT] = _collect(shape)
        models[names.LYANNA_MOVE] = _move(names.LYANNA_MOVE, names.lyanna_state(lyanna))
    for name, model in models.items():
        finish(model)
        ir.save(model, out / f"{name}.onnx")
    return {name: f"{name}.onnx" for name in models}


def _layout() -> ir.Model:
    b, t = (torch.export.Dim(name, min=1) for name in "BT")
    args = (torch.tensor([[-1, 0, 0], [-1, 0, 1]]), torch.zeros(2, dtype=torch.long))
    return _traced(_Layout(), args, ({0: b, 1: t}, {0: b}), names.step_layout_inputs(), names.step_layout_outputs())


def _accept(shape: VerifierShape) -> ir.Model:
    b, t = (torch.export.Dim(name, min=1) for name in "BT")
    rows = torch.zeros(2, _TRACED, dtype=torch.long)
    mask = torch.ones(2, _TRACED, _TRACED, dtype=torch.bool)
    args = (torch.zeros(2, _TRACED, shape.vocabulary), rows, rows.clone(), mask, torch.full((2,), _TRACED))
    dynamic = ({0: b, 1: t}, {0: b, 1: t}, {0: b, 1: t}, {0: b, 1: t, 2: t}, {0: b})
    return _traced(_Accept(), args, dynamic, names.step_accept_inputs(shape), names.step_accept_outputs())


def _keep(shape: VerifierShape) -> ir.Model:
    builder = _Builder()
    rows = builder.add("Add", builder.add("Unsqueeze", names.PAST_LEN, builder.ints(1)), names.PATH)  # [B, T]
    sizes = builder.add("Shape", names.PATH)
    batch, nodes = (builder.add("Gather", sizes, builder.ints(axis)) for axis in range(2))
    one = builder.ints(1)
    target = builder.add("Concat", batch, builder.ints(shape.kv_heads), nodes, one, axis=0)
    index = builder.add("Expand", builder.add("Unsqueeze", rows, builder.ints(1, 3)), target)  # [B, H_kv, T, 1]
    for cache in names.caches(shape):
        moved = builder.add("GatherND", cache, index, batch_dims=2)  # [B, H_kv, T, D]
        builder.add("TensorScatter", cache, moved, names.PAST_LEN, output=names.present(cache), axis=2)
    return builder.model(names.STEP_KEEP, names.step_keep_inputs(shape), names.step_keep_outputs(shape))


def _collect(shape: VerifierShape) -> ir.Model:
    builder = _Builder()
    axes = builder.ints(2)
    rows = builder.add("GatherND", names.FEATURE_ROWS, builder.add("Unsqueeze", names.PATH, axes), batch_dims=1)
    sizes = builder.add("Shape", names.PATH)
    sequences, steps = (
        builder.add("Unsqueeze", builder.count(sizes, axis), builder.ints(1 - axis)) for axis in range(2)
    )
    places = builder.add("Add", builder.add("Unsqueeze", names.WAITING_ROWS, builder.ints(1)), steps)  # [B, T]
    pairs = [builder.add("Unsqueeze", x, axes) for x in (builder.add("Expand", sequences, sizes), places)]
    target = builder.add("Concat", *pairs, axis=2)  # [B, T, 2]
    # Not by TensorScatter: TensorRT knows it for KV buffers of four axes only.
    builder.add("ScatterND", names.WAITING, target, rows, output=names.present(names.WAITING))
    return builder.model(names.STEP_COLLECT, names.step_collect_inputs(shape), names.step_collect_outputs(shape))


def _move(name: str, state: tuple[TensorSpec, ...]) -> ir.Model:
    builder = _Builder()
    target = builder.add("Unsqueeze", names.TARGET_SLOT, builder.ints(1))  # [1, 1]
    for spec in state:
        rows = builder.add("Gather", spec.name, names.SOURCE_SLOT, axis=0)
        builder.add("ScatterND", spec.name, target, rows, output=names.present(spec.name))
    return builder.model(name, names.move_inputs(state), names.move_outputs(state))


class _Builder:
    """A graph put together node by node: TensorScatter has no counterpart in torch that could be traced."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node; returns its output's name."""
        name = output or f"{kind}.{len(self._nodes)}"
        self._nodes.append(onnx.helper.make_node(kind, inputs, [name], **attributes))
        return name

    def ints(self, *values: int) -> str:
        """A constant int64 vector."""
        name = f"ints.{len(self._nodes)}"
        self._nodes.append(onnx.helper.make_node("Constant", [], [name], value_ints=values))
        return name

    def count(self, sizes: str, axis: int) -> str:
        """0, 1, … as many as `sizes` says of an axis."""
        end = self.add("Squeeze", self.add("Gather", sizes, self.ints(axis)))
        zero, one = (self.add("Squeeze", self.ints(value)) for value in range(2))
        return self.add("Range", zero, end, one)

    def model(self, name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> ir.Model:
        """The finished graph under its contract."""
        graph = onnx.helper.make_graph(self._nodes, name, list(map(_value, inputs)), list(map(_value, outputs)))
        opsets = [onnx.helper.make_opsetid("", tracing.OPSET)]
        return ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets))


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    kind = getattr(onnx.TensorProto, _ONNX_TYPES[spec.dtype])
    return onnx.helper.make_tensor_value_info(spec.name, kind, spec.shape)


def _traced(
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    dynamic: tuple[dict[int, torch.export.Dim], ...],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
) -> ir.Model:
    model = tracing.trace_graph(module.eval(), args, dynamic, inputs, outputs)
    passes.simplify(model)
    return model
