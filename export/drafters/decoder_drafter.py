"""A small model of the verifier's own kind: some of the verifier's layers, trained on.

It drafts from tokens alone, or with steering by hidden states of the verifier (`redraft.export.drafters.steering`). The
embedding and the head are the verifier's. Layers and final norm have transformers' own names, so the export and
transformers read the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.model_config import check_rope, is_rotary, logit_scale, longest_text, verifier_shape
from redraft.export.drafters.layer import DrafterConfig
from redraft.export.drafters.steering import Mechanism, Steering, steer
from redraft.export.reference import keep_layers
from redraft.names import Dtype
from redraft.signatures import VerifierShape

_NOT_KEPT = ("_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version")
"""Fields of a transformers configuration that say nothing about the model's form."""


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DrafterConfig):
    """Configuration of a draft model.

    layers: the verifier's layers that it began with, ascending; it has as many.
    model:  fields of its transformers configuration: the verifier's with only these layers.
    hidden_states: the verifier's that steer it, the highest layer first; none for a model without steering.
    steering: how they do.   steering_norm: True if g has a LayerNorm.
    """

    layers: tuple[int, ...]
    model: Mapping[str, Any]
    hidden_states: tuple[str, ...] = ()
    steering: Mechanism = "up"
    steering_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.layers)
        if len(set(self.hidden_states)) < len(self.hidden_states):
            raise CheckpointError(f"hidden_states must be different names, not {list(self.hidden_states)}")

    @property
    def transformers(self) -> PretrainedConfig:
        """The transformers configuration. Raises CheckpointError if transformers refuses its fields."""
        try:
            found: PretrainedConfig = AutoConfig.for_model(**self.model)
            layers = int(found.num_hidden_layers)
        except Exception as error:  # transformers raises many types  # noqa: BLE001
            raise CheckpointError(f"the draft model's configuration is not one of transformers ({error})") from None
        if layers != len(self.layers):
            raise CheckpointError(f"the draft model has {layers} layers, expected {len(self.layers)} as in `layers`")
        return found


def sizes_of(drafter: str, text: PretrainedConfig, context: int, dtype: Dtype = "float32") -> VerifierShape:
    """Return the sizes of a draft model that reads texts of `context` tokens, which may pass a rotary model's limit.

    Raises CheckpointError if the model has no positions for such texts, UnsupportedModelError like `check_rope`.
    """
    limit = longest_text(text)
    if limit is not None and context > limit and not is_rotary(text):
        raise CheckpointError(
            f"drafter {drafter}: its texts have at most {limit} tokens, the verifier's have {context}",
            f"build with --max-model-len {limit}, or give another draft model",
        )
    try:
        check_rope(text, context)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"drafter {drafter}: {error.message}", error.hint) from None
    return replace(verifier_shape(text, None, dtype), max_positions=context)


def check_layers(layers: Sequence[int], count: int | None = None) -> None:
    """Raise CheckpointError if these are not layers of a model, ascending; `count` is the number of its layers."""
    if not layers or any(before >= after for before, after in pairwise(layers)):
        raise CheckpointError(f"layers must be one or more numbers in ascending order, not {list(layers)}")
    if layers[0] < 0 or (count is not None and layers[-1] >= count):
        last = "" if count is None else f" to {count - 1}, those of the verifier"
        raise CheckpointError(f"layers must be numbers from 0{last}, not {list(layers)}")


def configuration_of(
    verifier: PretrainedConfig, vocab_size: int, layers: Sequence[int], draft_vocab_size: int = 0,
    hidden_states: tuple[str, ...] = (),
) -> DraftModelConfig:  # fmt: skip
    """Return the configuration of a draft model with these layers of a verifier of this transformers configuration.

    Raises CheckpointError if the verifier has no such layers.
    """
    text = verifier.get_text_config(decoder=True)
    check_layers(layers, int(text.num_hidden_layers))
    values = json.loads(keep_layers(text, layers).to_json_string())
    return DraftModelConfig(
        hidden_size=int(text.hidden_size),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        logit_scale=logit_scale(text),
        layers=tuple(layers),
        model={name: value for name, value in values.items() if name not in _NOT_KEPT},
        hidden_states=hidden_states,
    )


class DraftModel(nn.Module):
    """Layers and final norm, with the parameters' names of transformers' causal language model, and `steering`."""

    def __init__(self, config: DraftModelConfig) -> None:
        super().__init__()
        self.config = config
        found = Architecture.of(config.transformers)
        whole = found.text_class._from_config(found.text, dtype=torch.float32)
        whole.base_model.set_input_embeddings(nn.Identity())
        self._body = whole.base_model_prefix
        self.add_module(self._body, whole.base_model)
        self.steering: Steering | None = None
        if states := len(config.hidden_states):
            widths = steer(whole.base_model, len(config.layers), config.steering)
            self.steering = Steering(config.hidden_size, states, widths, config.steering, config.steering_norm)

    @property
    def body(self) -> Any:
        """transformers' model without embedding and head."""
        return getattr(self, self._body)

    def forward(self, embeddings: torch.Tensor, biases: torch.Tensor | None = None) -> torch.Tensor:
        """Return hidden states after the final norm, [B, L, n], of embedded texts of this shape.

        biases: of `steering`, [B, L, S], for a model that has it.
        """
        assert self.steering is None or biases is not None, "a model with steering needs the biases of its rows"
        with nullcontext() if self.steering is None or biases is None else self.steering.applied(biases):
            out: torch.Tensor = self.body(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return out

    @torch.no_grad()
    def whole(self, embedding: torch.Tensor, head: torch.Tensor) -> PreTrainedModel:
        """Return transformers' causal language model with these weights, and an embedding and a head [V, n]."""
        found = Architecture.of(self.config.transformers)
        found.text.tie_word_embeddings = torch.equal(embedding, head)
        model: PreTrainedModel = found.text_class._from_config(found.text, dtype=torch.float32)
        model.load_state_dict(self.state_dict(), strict=False)  # the others are embedding and head
        model.get_input_embeddings().load_state_dict({"weight": embedding})
        model.get_output_embeddings().load_state_dict({"weight": head})
        model.eval()
        return model
