"""transformers' own model of a checkpoint, whose results an exported model must equal.

transformers loads small safetensors checkpoints itself. redraft reads others, one layer at a time.

The comparison of a large model uses its first layers with their real weights, enough to have every kind of layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from redraft.export import quiet_transformers
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.loading import load_tensors
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.stored_tensor import StoredTensor, evaluate
from redraft.export.streaming import running, streamed_model

if TYPE_CHECKING:
    from redraft.export.quantization.calibrate import Calibrator
    from redraft.export.verifier import TracedVerifier

LEAST_LAYERS = 2
LOADED_BYTES = 1 << 29
"""Size of the largest safetensors checkpoint that transformers loads itself."""


def reference_logits(
    checkpoint: AnyCheckpoint, texts: Sequence[Sequence[int]], layers: int | None = None
) -> list[NDArray[np.float32]]:
    """Return logits [T, V] of each text by eager modules in fp32; with `layers`, of the first layers only.

    transformers itself loads a small safetensors checkpoint and a multimodal one. Of others, memory holds the weights
    of one layer. Raises UnsupportedModelError if transformers cannot run the model.
    """
    config = load_config(checkpoint)
    architecture = Architecture.of(config if layers is None else first_layers(config, layers))
    multimodal = architecture.whole_class is not architecture.text_class
    if not isinstance(checkpoint, Checkpoint) or not (multimodal or checkpoint.parameter_bytes <= LOADED_BYTES):
        loaded = load_tensors(checkpoint, architecture, partly=layers is not None)
        with streamed_model(checkpoint, architecture, loaded) as streamed:
            return [_logits(streamed, text) for text in texts]
    with running(architecture), torch.no_grad():
        model = _loaded(checkpoint, architecture)
        return [_logits(model, text) for text in texts]


def _logits(model: PreTrainedModel, text: Sequence[int]) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].float().numpy()
    return logits


def _loaded(checkpoint: AnyCheckpoint, architecture: Architecture) -> PreTrainedModel:
    """Return the model with the checkpoint's weights, which transformers reads."""
    with quiet_transformers():
        model: PreTrainedModel = architecture.whole_class.from_pretrained(
            checkpoint.path, config=architecture.whole, attn_implementation="eager", dtype=torch.float32
        )
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
    model = Architecture.of(first_layers(load_config(checkpoint), layers)).empty_model()
    return sum(parameter.numel() for parameter in model.parameters())


def enough_layers(checkpoint: AnyCheckpoint) -> int:
    """Return the least number of first layers that has every kind of layer, at least two; all if kinds are unknown.

    Two layers are of one kind if their parameters have the same names and shapes, and the configuration's lists with an
    item a layer have equal items for them.
    """
    architecture = Architecture.of(load_config(checkpoint))
    count = int(architecture.text.num_hidden_layers)
    modules = architecture.empty_model().modules()
    layers = next((m for m in modules if isinstance(m, nn.ModuleList) and len(m) == count), None)
    if layers is None:
        return count
    values = vars(architecture.text).values()
    lists = [value for value in values if isinstance(value, (list, tuple)) and len(value) == count]
    kinds = [
        ([str(items[number]) for items in lists], [(name, p.shape) for name, p in layer.named_parameters()])
        for number, layer in enumerate(layers)
    ]
    return min(count, max(LEAST_LAYERS, max(kinds.index(kind) for kind in kinds) + 1))


def second_moment(
    traced: TracedVerifier, texts: Sequence[Sequence[int]], progress: Callable[[int, int], None]
) -> NDArray[np.float64]:
    """Return the mean of x xᵀ over the states x that the head reads in texts of one length, [n, n].

    It runs transformers' model in fp32. Memory holds one layer's weights. Raises UnsupportedModelError if transformers
    cannot run the model.
    """
    assert traced.loaded is not None
    found: list[NDArray[np.float64]] = []

    def keep(module: nn.Module, args: Any) -> Any:
        rows = args[0].flatten(0, -2).double()
        found.append((rows.T @ rows / len(rows)).numpy())
        return (args[0][:1, :1], *args[1:])

    with streamed_model(traced.checkpoint, traced.architecture, traced.loaded, progress) as model:
        head: Any = model.get_output_embeddings()
        head.register_forward_pre_hook(keep)
        model(input_ids=torch.tensor([list(text) for text in texts]), use_cache=False)
    return found[0]


def run_texts(
    traced: TracedVerifier, texts: Sequence[Sequence[int]], kept: int, file: Path, calibrator: Calibrator | None,
    progress: Callable[[int, int], None],
) -> int:  # fmt: skip
    """Run transformers' model over texts of one length, and write the logits of the first `kept`, [kept, T, V].

    Returns V. Memory holds one layer's weights, and the logits. Raises UnsupportedModelError if transformers cannot run
    the model.
    """
    assert traced.loaded is not None
    ran = calibrator.ran if calibrator else lambda parameters: None
    with streamed_model(traced.checkpoint, traced.architecture, traced.loaded, progress, ran) as model:
        if calibrator:
            calibrator.watch(model)
        head: Any = model.get_output_embeddings()
        head.register_forward_pre_hook(lambda module, args: (args[0][:kept], *args[1:]))
        logits = model(input_ids=torch.tensor([list(text) for text in texts]), use_cache=False).logits
    with file.open("wb") as stream:  # not before: an error of the disk is none of the model
        for text in logits[:kept]:
            stream.write(text.float().numpy().data)
    return int(logits.shape[-1])
