"""transformers' own model of a checkpoint in fp32, whose weights are in memory only while their layer runs.

A model of 1.5 billion weights runs in the memory of its largest matrix. The modules are transformers' own; only their
parameters come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from redraft.errors import CheckpointError, RedraftError, UnsupportedModelError
from redraft.export.architecture import Architecture
from redraft.export.checkpoint import DOWNLOAD_AGAIN, AnyCheckpoint
from redraft.export.loading import LoadedTensors, fill_buffers
from redraft.export.stored_tensor import StoredTensor, evaluate

READERS = 2
"""Threads that read and dequantize the tensors of one layer."""


@contextmanager
def streamed_model(
    checkpoint: AnyCheckpoint, architecture: Architecture, loaded: LoadedTensors,
    layer_done: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[PreTrainedModel]:  # fmt: skip
    """Yield transformers' text model in evaluation mode with eager attention.

    layer_done: receives the number of units that have run, and of all units, during each forward pass.
    Raises UnsupportedModelError if transformers cannot run the model, and CheckpointError for NaN among its weights.
    """
    with no_init_weights():
        model: PreTrainedModel = architecture.text_class._from_config(
            architecture.text, attn_implementation="eager", dtype=torch.float32
        )
    model.eval()
    model.requires_grad_(False)
    fill_buffers(model, loaded.buffers, checkpoint)
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name in loaded.parameters}
    units = list(_units(model, int(architecture.text.num_hidden_layers)))
    with ThreadPoolExecutor(READERS) as pool:
        for number, unit in enumerate(units):
            streamed = _Unit(unit, checkpoint, loaded.parameters, names, pool, lambda n=number: layer_done(n, len(units)))
            unit.register_forward_pre_hook(streamed.fill)
            unit.register_forward_hook(streamed.drop)
        try:
            with torch.no_grad():
                yield model
        except RedraftError:
            raise
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, KeyError, IndexError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnsupportedModelError(
                f"transformers cannot run {architecture.whole_class.__name__} to compare with ({reason})",
                "report this model",
            ) from error


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
        self, module: nn.Module, checkpoint: AnyCheckpoint, tensors: Mapping[str, StoredTensor], names: Mapping[int, str],
        pool: ThreadPoolExecutor, done: Callable[[], None],
    ) -> None:  # fmt: skip
        self._checkpoint, self._pool, self._done = checkpoint, pool, done
        found = {id(p): p for p in module.parameters()}
        self._parameters = [(p, names[key], tensors[names[key]]) for key, p in found.items() if key in names]

    def fill(self, module: nn.Module, args: Any) -> None:
        """Read the parameters' numbers. Raises CheckpointError for NaN."""
        for (parameter, _, _), value in zip(
            self._parameters, self._pool.map(self._read, self._parameters), strict=True
        ):
            parameter.data = value

    def drop(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free the parameters' memory: pages of a new tensor are not touched."""
        for parameter, _, _ in self._parameters:
            parameter.data = torch.empty(parameter.shape)
        self._done()

    def _read(self, item: tuple[nn.Parameter, str, StoredTensor]) -> torch.Tensor:
        parameter, name, tensor = item
        value = read_tensor(tensor, self._checkpoint)
        if not np.isfinite(value).all():
            raise CheckpointError(f"tensor {name} has a number that is not finite", DOWNLOAD_AGAIN)
        return torch.from_numpy(value.reshape(parameter.shape))


def read_tensor(tensor: StoredTensor, checkpoint: AnyCheckpoint) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the whole tensor in fp32. Memory holds one copy of a stored tensor."""
    if tensor.entry is None:
        return evaluate(tensor, checkpoint)
    whole = np.empty(tensor.entry.shape, np.float32)
    begin = 0
    for slab in checkpoint.slabs(tensor.entry):
        if not slab.shape or not whole.shape:
            return slab.reshape(whole.shape).astype(np.float32)
        whole[begin : begin + len(slab)] = slab
        begin += len(slab)
    return whole
