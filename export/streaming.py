"""transformers' own model of a checkpoint in fp32, whose weights are in memory only while their layer runs.

A model of 1.5 billion weights runs in the memory of its largest matrix. The modules are transformers' own; only their
parameters come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from redraft.errors import RedraftError, UnsupportedModelError
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint, not_finite
from redraft.export.checkpoint.loading import LoadedTensors, fill_buffers
from redraft.export.checkpoint.stored_tensor import StoredTensor, evaluate

READERS = 2
"""Threads that read and dequantize the tensors of one layer."""


@contextmanager
def streamed_model(
    checkpoint: AnyCheckpoint, architecture: Architecture, loaded: LoadedTensors,
    done: Callable[[int, int], None] = lambda done, total: None,
    ran: Callable[[Mapping[str, torch.Tensor]], None] = lambda parameters: None, absent: Collection[str] = (),
) -> Iterator[PreTrainedModel]:  # fmt: skip
    """Yield transformers' text model in evaluation mode with eager attention.

    done: receives the number of units that have run, and of all units, during each forward pass.
    ran:  receives the parameters of each unit by name after it has run, before they are dropped.
    absent: parameters that are never read, since the caller replaces their modules' results.
    Raises UnsupportedModelError if transformers cannot run the model, and CheckpointError for NaN among its weights.
    """
    with no_init_weights():
        model: PreTrainedModel = architecture.text_class._from_config(
            architecture.text, attn_implementation="eager", dtype=torch.float32
        )
    model.tie_weights()
    model.eval()
    model.requires_grad_(False)
    fill_buffers(model, loaded.buffers, checkpoint)
    wanted = loaded.parameters.keys() - set(absent)
    names = {key: [name for name in each if name in wanted] for key, each in parameter_names(model).items()}
    units = list(_units(model, int(architecture.text.num_hidden_layers)))
    with ThreadPoolExecutor(READERS) as pool:
        for number, unit in enumerate(units):
            streamed = _Unit(unit, checkpoint, loaded.parameters, names, pool)
            unit.register_forward_pre_hook(streamed.fill)
            unit.register_forward_hook(partial(streamed.after, ran, partial(done, number + 1, len(units))))
        with running(architecture), torch.no_grad():
            yield model


@contextmanager
def running(architecture: Architecture) -> Iterator[None]:
    """Raise UnsupportedModelError for the errors of transformers' own code within the context."""
    try:
        yield
    except RedraftError:
        raise
    except Exception as error:  # transformers raises many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(
            f"transformers cannot run {architecture.whole_class.__name__} to compare with ({reason})",
            "report this model",
        ) from error


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its identity. Tied parameters are one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _units(model: nn.Module, layers: int) -> Iterator[nn.Module]:
    """Yield the modules whose parameters are filled together: each layer, and other modules with own parameters."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            for layer in module:
                if layer not in inside:
                    inside.update(layer.modules())
                    yield layer
    for module in model.modules():
        if module not in inside and any(True for _ in module.parameters(recurse=False)):
            yield module


class _Unit:
    """Fills the parameters of a module before it runs, and drops them afterwards."""

    def __init__(
        self, module: nn.Module, checkpoint: AnyCheckpoint, tensors: Mapping[str, StoredTensor],
        names: Mapping[int, Sequence[str]], pool: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        self._checkpoint, self._pool = checkpoint, pool
        parameters = {id(p): p for p in module.parameters()}
        self._parameters = [(p, names[key], tensors[names[key][0]]) for key, p in parameters.items() if names.get(key)]

    def fill(self, module: nn.Module, args: Any) -> None:
        """Read the parameters' numbers. Raises CheckpointError for NaN."""
        values = self._pool.map(self._read, self._parameters)
        for (parameter, _, _), value in zip(self._parameters, values, strict=True):
            parameter.data = value

    def after(self, ran: Callable[[Mapping[str, torch.Tensor]], None], done: Callable[[], None], *result: Any) -> None:
        """Give the parameters to `ran`, then free their memory: pages of a new tensor are not touched."""
        ran({name: parameter.data for parameter, names, _ in self._parameters for name in names})
        for parameter, _, _ in self._parameters:
            parameter.data = torch.empty(parameter.shape)
        done()

    def _read(self, item: tuple[nn.Parameter, Sequence[str], StoredTensor]) -> torch.Tensor:
        parameter, names, tensor = item
        value = evaluate(tensor, self._checkpoint)
        if not np.isfinite(value).all():
            raise not_finite(names[0])
        return torch.from_numpy(value.reshape(parameter.shape))
