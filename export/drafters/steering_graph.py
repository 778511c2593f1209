"""The graph `steer`: biases of a decoder's rows from the verifier's hidden states, computed once a draft."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

from redraft.config import Precision
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import Progress
from redraft.export.drafters import graph_file
from redraft.export.drafters.draft_graph import parameter_shapes, rename, stem
from redraft.export.drafters.steering import Steering
from redraft.export.graph import passes, tracing
from redraft.export.graph.decoder import finish
from redraft.export.weights import place
from redraft.methods.decoder import DecoderShape, steer_inputs, steer_outputs
from redraft.names import STEER, WeightRef


def parameters_of(name: str, steering: Steering) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the steering of the drafter `name`, by the parameters' names in a bundle."""
    return {f"{stem(name)}steering.{key}": size for key, size in parameter_shapes(steering).items()}


def write_steering(
    name: str, steering: Steering, shape: DecoderShape, source: AnySource, out: Path, precision: Precision,
    progress: Progress,
) -> tuple[WeightRef, ...]:  # fmt: skip
    """Trace and write the graph and its weights, by the id `name`, into `out`. Returns their places.

    source: of the drafter's parameters, by their names in a bundle.
    """
    rows, dtype = torch.arange(tracing.TRACED_NODES).repeat(tracing.TRACED_BATCH, 1), tracing.TORCH[shape.dtype]
    features = [torch.zeros(*rows.shape, shape.hidden, dtype=dtype) for _ in shape.hidden_states]
    b, t = (torch.export.Dim(symbol, min=1) for symbol in ("B", "T"))
    args, dynamic = (features, rows, rows[:, :1].clone()), ([{0: b, 1: t}] * len(features), {0: b, 1: t}, {0: b})
    model = tracing.trace_graph(_SteerGraph(steering), args, dynamic, steer_inputs(shape), steer_outputs(shape))
    passes.simplify(model)
    rename(model, {parameter.removeprefix(stem(name)): parameter for parameter in parameters_of(name, steering)})
    refs = place(model, source, out, precision, progress, file=f"{stem(name)}{STEER}")
    finish(model)
    ir.save(model, out / graph_file(name, STEER))
    return refs


class _SteerGraph(nn.Module):
    """The computation of the graph `steer`, with inputs and outputs in the order of `steer_inputs`, `steer_outputs`."""

    def __init__(self, steering: Steering) -> None:
        super().__init__()
        self.steering = steering

    def forward(
        self, features: list[torch.Tensor], positions: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        biases = self.steering(torch.cat(features, dim=-1), positions)
        return biases, tracing.gather_rows(biases, last)
