"""Training of drafters that draft a block in one pass: recipes, shapes and initial weights. Each method is a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from redraft.errors import UsageError
from redraft.export.drafters.block_drafter import BlockConfig, BlockDrafter
from redraft.export.drafters.layer import with_sizes
from redraft.export.graph.decoder import check_hidden_states
from redraft.methods import Method, Row
from redraft.train.batches import Batch
from redraft.train.objectives.block_drafter import BlockObjective, BlockTable
from redraft.train.objectives.last_layer import OTHER_INIT, begin_with_layers
from redraft.train.training import Start, Training, table_of
from redraft.train.verifier_model import VerifierModel


def context_states(layers: int) -> tuple[str, ...]:
    """Return three of a verifier's hidden states: after its second layer, in the middle, and before its last layer.

    DFlash spreads its states alike, from the second layer to the last but two. Ours end with that which enters the last
    layer, so that a drafter may begin with this layer. Of few layers, they are fewer.
    """
    found = {min(1, layers - 2), layers // 2 - 1, layers - 2}
    return tuple(str(layer) for layer in sorted({max(layer, 0) for layer in found}))


def start_from_layers(drafter: BlockDrafter, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
    """Begin with the verifier's last layers and its final norm.

    The context begins as that which enters the last layer, with its norm's gain: the keys and values of a copy of that
    layer are the verifier's. The mask begins as the mean embedding, and the token before adds nothing. Raises
    UsageError for layers of another shape or form, and for a drafter that does not read that hidden state.
    """
    config, body = drafter.config, verifier.model.get_decoder()
    enters, count = str(verifier.layers - 2), config.layers
    if config.layers >= verifier.layers or enters not in config.hidden_states:
        raise UsageError(
            f"drafter.init = 'layers' needs fewer layers than the verifier's {verifier.layers}, and its hidden state "
            f"{enters} among hidden_states", "change them, or set init = 'random'",
        )  # fmt: skip
    layers = {f"layers.{i}": verifier.layers - count + i for i in range(count)}
    begin_with_layers(drafter, layers, verifier, iter(batches))
    gain = getattr(getattr(body.layers[-1], "input_layernorm", None), "weight", None)
    if gain is None:
        raise UsageError("drafter.init: the verifier's last layer is not of Llama's form", OTHER_INIT)
    state, whole = drafter.state_dict(), torch.eye(config.hidden_size)
    parts = [whole if name == enters else torch.zeros_like(whole) for name in config.hidden_states]
    state["features.weight"] = torch.cat(parts, dim=1)
    state["feature_norm.weight"] = gain.detach().float().clone()
    state["mask"] = verifier.model.get_input_embeddings().weight.detach().float().mean(0)
    if "token_head.weight" in state:
        state["token_head.weight"] = torch.zeros_like(state["token_head.weight"])
    drafter.load_state_dict(state)


class BlockTraining(Training):
    """The training of the family. A row has the form of its drafters, and the defaults of its table."""

    config, loss = BlockConfig, BlockObjective
    starts: ClassVar[Mapping[str, Start]] = {"layers": start_from_layers}
    schedule = "block"

    def __init__(self, method: Method[Any], row: Row) -> None:
        super().__init__(method, row)
        self.table = table_of(BlockTable, row.loss)

    def configuration(self, table: BlockTable, verifier: VerifierModel) -> BlockConfig:
        """Return the drafter's configuration. Sizes of 0 in the table become the verifier's.

        Its layers have norms of heads if the verifier's have them.
        """
        check_hidden_states(table.hidden_states, verifier.layers)
        layer = verifier.model.get_decoder().layers[-1].state_dict()
        kind: dict[str, Any] = {
            "head_norms": "self_attn.q_norm.weight" in layer,
            "confidence": table.confidence > 0,
        }
        if table.token_rank:
            kind["token_rank"] = table.token_rank
        return with_sizes(
            BlockConfig, verifier.config, verifier.vocab_size, **table.sizes(verifier), layers=table.layers,
            steps=table.steps, hidden_states=table.hidden_states or context_states(verifier.layers),
            **{**self.row.form, **kind},
        )  # fmt: skip


TRAINING = BlockTraining
