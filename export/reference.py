"""transformers' own model of a checkpoint, whose results an exported model must equal.

transformers loads safetensors itself. redraft reads GGUF files, since transformers would read them whole.

The comparison of a large model uses its first layers with their real weights, enough to have every kind of layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from redraft.errors import RedraftError, UnsupportedModelError
from redraft.export.architecture import Architecture
from redraft.export.checkpoint import AnyCheckpoint
from redraft.export.loading import load_tensors
from redraft.export.stored_tensor import StoredTensor, evaluate
from redraft.export.support import load_config

LEAST_LAYERS = 2


def reference_logits(
    checkpoint: AnyCheckpoint, texts: Sequence[Sequence[int]], layers: int | None = None
) -> list[NDArray[np.float32]]:
    """Return logits [T, V] of each text by eager modules in fp32; with `layers`, of the first layers only.

    Holds these weights in memory. Raises UnsupportedModelError if transformers cannot run the model.
    """
    config = load_config(checkpoint)
    architecture = Architecture.of(config if layers is None else first_layers(config, layers))
    try:
        model = _loaded(checkpoint, architecture)
        with torch.no_grad():
            outputs = [model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0] for text in texts]
    except RedraftError:
        raise
    except Exception as error:  # transformers raises many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(
            f"transformers cannot run {architecture.whole_class.__name__} to compare with ({reason})",
            "report this model",
        ) from error
    return [logits.float().numpy() for logits in outputs]


def _loaded(checkpoint: AnyCheckpoint, architecture: Architecture) -> PreTrainedModel:
    """Return the model with the checkpoint's weights. transformers reads safetensors, redraft other formats."""
    if not checkpoint.is_safetensors:
        return read_model(checkpoint, architecture)
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model: PreTrainedModel = architecture.whole_class.from_pretrained(
            checkpoint.path, config=architecture.whole, attn_implementation="eager", dtype=torch.float32
        )
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    model.eval()
    return model


def read_model(
    checkpoint: AnyCheckpoint, architecture: Architecture, attention: str = "eager", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return transformers' text model of a checkpoint of any format, in evaluation mode; redraft reads its tensors.

    Raises like `load_tensors`.
    """
    loaded = load_tensors(checkpoint, architecture, partly=True)
    with no_init_weights():
        model: PreTrainedModel = architecture.text_class._from_config(
            architecture.text, attn_implementation=attention, dtype=dtype
        )
    model.eval()
    values: dict[str, StoredTensor] = {**loaded.parameters, **loaded.buffers}
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in values:  # the others are buffers that the checkpoint may lack
                tensor.copy_(torch.from_numpy(evaluate(values[name], checkpoint)))
    return model


def first_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return the configuration of a model with the first `layers` layers."""
    return keep_layers(config, range(layers))


def keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """Return the configuration of a model with these layers, in order. Selects from lists with an item a layer too."""
    reduced = copy.deepcopy(config)
    text = reduced.get_text_config(decoder=True)
    count = int(text.num_hidden_layers)
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(text, name, [value[number] for number in layers])
    text.num_hidden_layers = len(layers)
    return reduced


def count_numbers(checkpoint: AnyCheckpoint, layers: int) -> int:
    """Return the weights of the text model's first layers, its embedding and head."""
    architecture = Architecture.of(first_layers(load_config(checkpoint), layers))
    with torch.device("meta"), no_init_weights():
        return sum(
            parameter.numel() for parameter in architecture.text_class._from_config(architecture.text).parameters()
        )


def enough_layers(checkpoint: AnyCheckpoint) -> int:
    """Return the least number of first layers that has every kind of layer, at least two; all if kinds are unknown.

    Two layers are of one kind if their parameters have the same names and shapes, and the configuration's lists with an
    item a layer have equal items for them.
    """
    architecture = Architecture.of(load_config(checkpoint))
    with torch.device("meta"), no_init_weights():
        model = architecture.text_class._from_config(architecture.text)
    count = int(architecture.text.num_hidden_layers)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        return count
    lists = [
        value for value in vars(architecture.text).values() if isinstance(value, (list, tuple)) and len(value) == count
    ]
    kinds = [_kind(layer, [str(items[number]) for items in lists]) for number, layer in enumerate(stacks[0])]
    return min(count, max(LEAST_LAYERS, max(kinds.index(kind) for kind in kinds) + 1))


def _kind(layer: nn.Module, settings: list[str]) -> Any:
    return settings, tuple((key, tuple(parameter.shape)) for key, parameter in layer.named_parameters())
