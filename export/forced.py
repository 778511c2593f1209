"""transformers' modules with the products of an engine in place of their own: a comparison of everything between them.

Rounded inputs make small differences grow from layer to layer, so that results of whole models cannot be compared. Here
each product's input is compared with the engine's, and its result is the engine's. Differences cannot grow, and the
modules need no weights but those of norms and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from redraft.errors import UnsupportedModelError
from redraft.export.streaming import parameter_names, streamed_model

if TYPE_CHECKING:
    from redraft.export.verifier import TracedVerifier

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Recorded:
    """An engine's results for one text: the input and the result [T, n] of each product, by parameter.

    rows:   looked-up rows [T, n] by parameter, if the bundle rounds them.   logits: [T, V].
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Array]
    results: Mapping[str, Array]
    rows: Mapping[str, Array]
    logits: Array


def can_force(traced: TracedVerifier, parameters: Collection[str]) -> bool:
    """Return True if transformers has a module for every one of these weights."""
    if traced.loaded is None or traced.architecture.whole_class is not traced.architecture.text_class:
        return False
    return set(parameters) <= {name for _, names in _weights(traced.architecture.empty_model()) for name in names}


def _weights(model: nn.Module) -> Iterator[tuple[Any, list[str]]]:
    """Yield the modules that are one product or lookup with a parameter `weight`, and the weight's names."""
    names = parameter_names(model)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:
            yield module, names[id(weight)]


def compare_forced(traced: TracedVerifier, recorded: Recorded, compare: Callable[[str, Array, Array], None]) -> None:
    """Run transformers' modules over the text.

    compare: receives a parameter's name, transformers' input of its product, and the engine's; at last `logits`.
    Raises UnsupportedModelError if transformers cannot run the model.
    """
    assert traced.loaded is not None
    absent = _tied(traced, {*recorded.results, *recorded.rows})
    for module, names in _weights(traced.architecture.empty_model()):
        if isinstance(module, nn.Embedding) and recorded.rows.keys().isdisjoint(names):
            absent -= set(names)  # exact rows, though a product may have the same weight
    with streamed_model(traced.checkpoint, traced.architecture, traced.loaded, absent=absent) as model:
        rows: dict[int, Array] = {}
        for module, names in _weights(model):
            if isinstance(module, nn.Embedding):
                if table := next((name for name in names if name in recorded.rows), None):
                    rows[id(module.weight)] = recorded.rows[table]
            elif product := next((name for name in names if name in recorded.results), None):
                module.forward = _forced(module, product, recorded, compare)
        with _Rows(rows):
            logits = model(input_ids=torch.tensor([list(recorded.tokens)]), use_cache=False).logits[0]
    compare("logits", logits.float().numpy(), recorded.logits)


def _tied(traced: TracedVerifier, names: Collection[str]) -> set[str]:
    """Return the names and those of the same tensors."""
    assert traced.loaded is not None
    tensors = {id(traced.loaded.parameters[name]) for name in names if name in traced.loaded.parameters}
    return {name for name, tensor in traced.loaded.parameters.items() if id(tensor) in tensors} | set(names)


class _Rows(TorchFunctionMode):
    """Gives lookups the recorded rows, whatever their modules do before and after."""

    def __init__(self, rows: Mapping[int, Array]) -> None:
        """rows: [T, n] by the id of the table."""
        super().__init__()
        self._rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding and id(args[1]) in self._rows:
            return torch.from_numpy(self._rows[id(args[1])]).reshape(*args[0].shape, -1)
        return func(*args, **(kwargs or {}))


def _forced(
    module: nn.Module, parameter: str, recorded: Recorded, compare: Callable[[str, Array, Array], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.reshape(-1, x.shape[-1]).shape != recorded.inputs[parameter].shape:
            raise UnsupportedModelError(f"the product of {parameter} has inputs of another shape {tuple(x.shape)}")
        compare(parameter, x.reshape(-1, x.shape[-1]).numpy(), recorded.inputs[parameter])
        result = torch.from_numpy(recorded.results[parameter]).reshape(*x.shape[:-1], -1)
        bias = getattr(module, "bias", None)
        return result if bias is None else result + bias

    return forward
