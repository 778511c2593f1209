"""Find the transformers class of a checkpoint's configuration, and its text decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from redraft.errors import UnsupportedModelError

DECODERS_ONLY = "redraft exports decoder-only models whose attention goes through transformers' attention interface"
_WHOLE = (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)


@dataclass(frozen=True)
class Architecture:
    """A decoder, and the model that its checkpoint was saved from: the same, or a multimodal one.

    text:   configuration and class of the decoder to export.
    whole:  configuration and class that name the checkpoint's tensors.
    """

    text: PretrainedConfig
    text_class: type[PreTrainedModel]
    whole: PretrainedConfig
    whole_class: type[PreTrainedModel]

    @classmethod
    def of(cls, config: PretrainedConfig) -> Architecture:
        """Return a configuration's architecture. Raises UnsupportedModelError if it is not a decoder-only model."""
        text = config.get_text_config(decoder=True)
        if config.is_encoder_decoder or text.is_encoder_decoder or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UnsupportedModelError(f"{config.model_type} is not a decoder-only language model", DECODERS_ONLY)
        text_class = _class(MODEL_FOR_CAUSAL_LM_MAPPING, text)
        if text is config:
            return cls(text, text_class, config, text_class)
        for mapping in _WHOLE:
            if type(config) in mapping:
                return cls(text, text_class, config, _class(mapping, config))
        raise UnsupportedModelError(f"transformers has no text model for {config.model_type}", DECODERS_ONLY)

    def empty_model(self) -> PreTrainedModel:
        """Return the text model without values, on the meta device."""
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = self.text_class._from_config(self.text)
        return model

    def names_in_whole(self, whole: PreTrainedModel) -> dict[str, str]:
        """Map names of the decoder's parameters and persistent buffers: from those of `text_class` to those in `whole`.

        Raises UnsupportedModelError if the whole model contains another decoder.
        """
        if self.whole_class is self.text_class:
            return {name: name for name in whole.state_dict()}
        text = self.empty_model()
        inside, head = whole.get_decoder(), whole.get_output_embeddings()
        alone, own_head = text.base_model, text.get_output_embeddings()
        if type(inside) is not type(alone) or head is None:
            raise UnsupportedModelError(
                f"the text model of {self.whole.model_type} is not a {self.text_class.__name__}", DECODERS_ONLY
            )
        places = {id(module): name for name, module in whole.named_modules()}
        own = {id(module): name for name, module in text.named_modules()}
        pairs = [(own[id(alone)], places[id(inside)], inside), (own[id(own_head)], places[id(head)], head)]
        return {
            f"{to}.{name}".lstrip("."): f"{at}.{name}".lstrip(".")
            for to, at, module in pairs
            for name in module.state_dict()
        }


def _class(mapping: Any, config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class for a configuration in a mapping of transformers; the first of several."""
    classes = mapping[type(config)]
    model_class: type[PreTrainedModel] = classes[0] if isinstance(classes, tuple) else classes
    return model_class
