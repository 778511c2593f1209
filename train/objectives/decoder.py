"""Training of drafters that are decoders of their own and begin with some of the verifier's layers: students."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from redraft.errors import UnsupportedModelError
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig, configuration_of
from redraft.export.graph.decoder import check_hidden_states
from redraft.methods import Method, Row
from redraft.train.batches import Batch
from redraft.train.objectives.decoder_drafter import DraftModelObjective, SteeringTable, StudentTable
from redraft.train.training import Start, Training
from redraft.train.verifier_model import VerifierModel

_LAST = 3
"""Layers from the verifier's end in a student, by default; the first layer is before them."""


def default_layers(count: int) -> tuple[int, ...]:
    """Return the first and the last three of a verifier's layers, all of a verifier with four or fewer."""
    return tuple(sorted({0, *range(max(0, count - _LAST), count)}))


def high_middle_low(count: int) -> tuple[str, ...]:
    """Return the hidden states after layers L - 2, L/2 and 3 of L, counted from 1 (SD², appendix A.5).

    A verifier with few layers has fewer different ones. Name `2` is the output of the layer with index 2, the third.
    """
    wanted = (count - 2, count // 2, 3)
    return tuple(dict.fromkeys(str(min(max(layer, 1), count) - 1) for layer in sorted(wanted, reverse=True)))


def start_from_layers(student: DraftModel, verifier: VerifierModel, _: Iterable[Batch]) -> None:
    """Begin with the verifier's layers and final norm.

    Raises UnsupportedModelError if a layer has another form than the student's.
    """
    teacher = verifier.model.get_decoder().state_dict()
    stack = next(
        f"{name}." for name, module in verifier.model.get_decoder().named_children()
        if isinstance(module, torch.nn.ModuleList) and len(module) == verifier.layers
    )  # fmt: skip
    body = student.body
    state = body.state_dict()
    for name, tensor in state.items():
        source = name
        if name.startswith(stack):
            number, rest = name.removeprefix(stack).split(".", 1)
            source = f"{stack}{student.config.layers[int(number)]}.{rest}"
        if source not in teacher or teacher[source].shape != tensor.shape:
            raise UnsupportedModelError(
                f"{source} of the verifier does not fit layer {name} of a student with these layers",
                "choose layers of one kind, in the order of the verifier's kinds",
            )
        tensor.copy_(teacher[source])


def with_embedding_and_head(student: DraftModel, verifier: VerifierModel) -> PreTrainedModel:
    """Return the student as a model of its own in fp32, with a copy of the verifier's embedding and whole head."""
    embedding, head = verifier.model.get_input_embeddings(), verifier.model.get_output_embeddings()
    return student.whole(embedding.weight, head.weight)


class StudentTraining(Training):
    """The training of the family. A method with hidden states has steering."""

    config, loss = DraftModelConfig, DraftModelObjective
    starts: ClassVar[Mapping[str, Start]] = {"layers": start_from_layers}

    def __init__(self, method: Method[Any], row: Row) -> None:
        super().__init__(method, row)
        self.table = SteeringTable if method.hidden_states else StudentTable
        self.whole = None if method.hidden_states else with_embedding_and_head

    def configuration(self, table: StudentTable, verifier: VerifierModel) -> DraftModelConfig:
        """Return the student's configuration. Raises CheckpointError if the verifier has no such layers or vocabulary.

        Raises UnsupportedModelError naming a layer that takes no steering.
        """
        layers = table.layers or default_layers(verifier.layers)
        config = configuration_of(verifier.config, verifier.vocab_size, layers, table.draft_vocabulary)
        if isinstance(table, SteeringTable):
            check_hidden_states(table.hidden_states, verifier.layers)
            states = table.hidden_states or high_middle_low(verifier.layers)
            config = replace(
                config, hidden_states=states, steering=table.steering, steering_norm=table.steering_norm
            )  # fmt: skip
            with torch.device("meta"):
                DraftModel(config)
        return config


TRAINING = StudentTraining
