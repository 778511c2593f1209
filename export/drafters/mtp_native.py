"""The tensors of a multi-token-prediction module inside of a verifier's checkpoint.

The module is a decoder layer of the verifier's own kind, between norms and a projection (`mtp_layouts`). transformers'
loader reads the layer as that of a model with one layer, so every layer that it converts can be the module's. Embedding
and head are the verifier's: copies of them in the module are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from redraft.errors import CheckpointError
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint, TensorEntry
from redraft.export.checkpoint.loading import LoadedTensors, check_entries, check_finite, load_tensors
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.stored_tensor import StoredTensor
from redraft.export.drafters.checkpoint import differences
from redraft.export.drafters.mtp_layouts import PROJECTION, NativeModule, require_module
from redraft.export.reference import keep_layers

_LAYERS, _LAYER = "model.layers.", "model.layers.0."
_BUFFER = "rotary_emb.inv_freq"
"""Older checkpoints store a buffer of this name, which the configuration determines."""
_MOST_LISTED = 4
_DAMAGED = "give the checkpoint as it was published, or leave out --drafter native"


@dataclass(frozen=True)
class LoadedModule:
    """A checkpoint's module.

    architecture: the verifier's with one layer.   checkpoint, loaded: the layer's tensors by the names of that model.
    parts: stored tensors around the layer, by the names of `NativeMtp`.
    """

    found: NativeModule
    architecture: Architecture
    checkpoint: Checkpoint
    loaded: LoadedTensors
    parts: Mapping[str, StoredTensor]


def load_module(checkpoint: AnyCheckpoint) -> LoadedModule:
    """Return the module of a checkpoint. Reads its weights once, to check that they are finite.

    Raises CheckpointError if there is no module of a known layout, or listing tensors that are missing, surplus or of
    another shape, and UnsupportedModelError for a verifier or a type of tensors that redraft does not export.
    """
    found = require_module(checkpoint)
    assert isinstance(checkpoint, Checkpoint), "no other kind of checkpoint has modules"
    one = Architecture.of(_one_layer(load_config(checkpoint)))
    layer = _stored_as(found, one, checkpoint)
    outside = {name: entry for name, entry in checkpoint.tensors.items() if not name.startswith(_LAYERS)}
    viewed = replace(checkpoint, tensors={**outside, **layer}, modules={})
    parts = {f"{part}.weight": found.entries[f"{name}.weight"] for part, name in found.layout.parts.items()}
    stored = {name: StoredTensor.of(entry) for name, entry in parts.items()}
    for tensor in stored.values():
        check_entries(checkpoint, tensor, checkpoint.readable)
    check_finite(replace(checkpoint, tensors={**parts, **layer}))
    return LoadedModule(found, one, viewed, load_tensors(viewed, one), stored)


def _one_layer(text: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a model whose only layer is a module's: like the verifier's last one.

    A model that names the types of its modules' layers has those.
    """
    one = keep_layers(text, [int(text.num_hidden_layers) - 1])
    for name in ("layer_types", "mlp_layer_types"):
        if named := getattr(text, f"mtp_{name}", None):
            setattr(one, name, list(named[:1]))
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    return one


def _stored_as(found: NativeModule, one: Architecture, checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return the tensors of the module's layer by their names in a model of one layer.

    Raises CheckpointError if the module has not the tensors that its layout and the architecture need.
    """
    layout, config = found.layout, one.text
    width = int(config.hidden_size)
    parts: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,) for name in layout.parts.values()}
    parts[f"{layout.parts[PROJECTION]}.weight"] = (width, 2 * width)
    with torch.device("meta"), no_init_weights():
        model = one.text_class._from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    inner = {name.removeprefix(_LAYER): shape for name, shape in shapes.items() if name.startswith(_LAYER)}
    expected = parts | {f"{layout.layer}{name}": shape for name, shape in inner.items()}
    entries = {
        name: entry for name, entry in found.entries.items() if name not in layout.copies and not name.endswith(_BUFFER)
    }
    here = {name: entry.shape for name, entry in entries.items()}
    stored, needed = ({f"{found.prefix}{name}": shape for name, shape in of.items()} for of in (here, expected))
    if problems := list(differences(stored, needed, _MOST_LISTED)):
        raise CheckpointError(f"{checkpoint.path}: {found.description}: {'; '.join(problems)}", _DAMAGED)
    return {f"{_LAYER}{name}": entries[f"{layout.layer}{name}"] for name in inner}
