"""Find the stored tensors from which transformers loads every parameter and buffer of a model.

transformers' own loader runs on the meta device over symbolic tensors. It renames, merges and splits tensors as usual,
and reports tensors that are missing, surplus or of another shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export import quiet_transformers
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN, AnyCheckpoint, not_finite
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.stored_tensor import StoredTensor, entries, evaluate

BUFFERS = ("F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""The stored types that buffers may have."""
_SHOWN = 4
"""Largest number of names in a message."""


@dataclass(frozen=True)
class LoadedTensors:
    """The stored tensors of a model, by the names of its text model's class.

    parameters: every parameter, tied ones under each of their names.
    buffers:    the persistent buffers that the checkpoint has.
    tied:       True if head and embedding are one tensor, whatever the configuration says.
    """

    parameters: Mapping[str, StoredTensor]
    buffers: Mapping[str, StoredTensor]
    tied: bool


def load_tensors(checkpoint: AnyCheckpoint, architecture: Architecture, partly: bool = False) -> LoadedTensors:
    """Match the checkpoint with the architecture's parameters and buffers. Reads only the weights of tied pairs.

    partly: True if the architecture has only the first layers of the checkpoint, which may have more tensors.
    Raises CheckpointError naming tensors that are missing, surplus or of another shape, and UnsupportedModelError
    naming a tensor of an unsupported type.
    """
    with torch.device("meta"), no_init_weights():
        model = architecture.whole_class._from_config(architecture.whole)
    _load(checkpoint, model, partly)
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parameters: dict[str, StoredTensor] = {}
    buffers: dict[str, StoredTensor] = {}
    for name, stored_name in architecture.names_in_whole(model).items():
        value = values[stored_name]
        if isinstance(value, StoredTensor):
            check_entries(checkpoint, value, checkpoint.readable if stored_name in known else BUFFERS)
            (parameters if stored_name in known else buffers)[name] = value
        elif stored_name in known:
            raise _missing(checkpoint, [stored_name])
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and _equal(checkpoint, embedding.weight, head.weight)
    return LoadedTensors(parameters, buffers, tied)


def check_finite(checkpoint: AnyCheckpoint) -> None:
    """Raise CheckpointError naming a tensor with NaN or infinity. Reads all weights once, except of GGUF files."""
    if not isinstance(checkpoint, Checkpoint):
        return  # dequantization checks the numbers
    for entry in checkpoint.tensors.values():
        if entry.dtype in checkpoint.readable and 0 not in entry.shape and not checkpoint.is_finite(entry):
            raise CheckpointError(
                f"{checkpoint.path / entry.file}: tensor {entry.name} has a number that is not finite", DOWNLOAD_AGAIN
            )


def fill_buffers(network: nn.Module, buffers: Mapping[str, StoredTensor], checkpoint: AnyCheckpoint) -> None:
    """Copy the checkpoint's values into the persistent buffers of a network. Raises CheckpointError for NaN."""
    own = dict(network.named_buffers())
    for name, tensor in buffers.items():
        entry = tensor.entry
        if isinstance(checkpoint, Checkpoint) and entry is not None and entry.dtype not in checkpoint.readable:
            own[name].copy_(torch.from_numpy(np.array(checkpoint.memmap(entry.name))))  # integers stay
            continue
        value = evaluate(tensor, checkpoint)
        if not np.isfinite(value).all():
            raise not_finite(name)
        own[name].copy_(torch.from_numpy(value))


def _load(checkpoint: AnyCheckpoint, model: PreTrainedModel, partly: bool) -> None:
    """Put symbolic tensors into the model. If a tied pair is stored twice, each keeps its own tensor."""
    stored = {name: StoredTensor.of(entry) for name, entry in checkpoint.tensors.items()}
    conversions: Any = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(weight_mapping=conversions)
    with quiet_transformers():
        report, _ = convert_and_load_state_dict_in_model(model, stored, options, disk_offload_index=None)
    for name, reason in report.conversion_errors.items():
        raise CheckpointError(f"transformers cannot convert {name} ({reason.strip().splitlines()[-1]})", DOWNLOAD_AGAIN)
    for name, shape, expected in sorted(report.mismatched_keys):
        raise CheckpointError(f"tensor {name} is {list(shape)}, config.json requires {list(expected)}", DOWNLOAD_AGAIN)
    model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(report)
    if report.missing_keys:
        raise _missing(checkpoint, report.missing_keys)
    surplus = [name for name in report.unexpected_keys if not _is_causal_mask(checkpoint, name)]
    if surplus and not partly:
        raise CheckpointError(
            f"{checkpoint.path} has {_listed(surplus)} that {type(model).__name__} does not use",
            "give the checkpoint that its config.json describes",
        )


def _is_causal_mask(checkpoint: AnyCheckpoint, name: str) -> bool:
    """Return True for a mask that older GPT models stored: a triangle of ones, or the score of hidden keys.

    transformers computes both itself.
    """
    entry = checkpoint.tensors.get(name)
    if entry is None or not isinstance(checkpoint, Checkpoint) or ".attn" not in name:
        return False
    if name.endswith(".masked_bias"):
        return entry.shape in ((), (1,))
    size = entry.shape[-1] if entry.shape else 0
    if not name.endswith((".bias", ".causal_mask")) or entry.shape != (1, 1, size, size):
        return False
    return bool(np.array_equal(checkpoint.memmap(name)[0, 0] != 0, np.tri(size, dtype=np.bool_)))


def _equal(checkpoint: AnyCheckpoint, one: Any, other: Any) -> bool:
    """Return True if two stored tensors hold the same numbers."""
    if one is other:
        return True
    if one.entry is None or other.entry is None or one.shape != other.shape:
        return False
    slabs = zip(checkpoint.slabs(one.entry), checkpoint.slabs(other.entry), strict=True)
    return all(np.array_equal(a, b) for a, b in slabs)


def check_entries(checkpoint: AnyCheckpoint, tensor: StoredTensor, types: Sequence[str]) -> None:
    """Raise CheckpointError for an empty tensor, and UnsupportedModelError for a type that is none of `types`."""
    for entry in entries(tensor):
        if 0 in entry.shape:
            raise CheckpointError(f"tensor {entry.name} is empty, of shape {list(entry.shape)}", DOWNLOAD_AGAIN)
        if entry.dtype not in types:
            raise UnsupportedModelError(
                f"tensor {entry.name} is stored as {entry.dtype}; supported types are {', '.join(types)}",
                "give the unquantized checkpoint",
            )


def _missing(checkpoint: AnyCheckpoint, names: Any) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path} has no {_listed(names)}", DOWNLOAD_AGAIN)


def _listed(names: Any) -> str:
    """Return the first names of a set, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"tensor{'s' if len(ordered) > 1 else ''} {', '.join(ordered[:_SHOWN])}{more}"
