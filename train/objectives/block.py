"""Training of drafters that draft a block in one pass: recipes, shapes and initial weights. Each method is a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from redraft.errors import UsageError
from redraft.export.drafters.block_drafter import BlockConfig, BlockDrafter, BlockLayer
from redraft.export.drafters.layer import with_sizes
from redraft.export.graph.decoder import check_hidden_states
from redraft.methods import Method, Row
from redraft.train.batches import Batch
from redraft.train.fitted_projections import hidden_states_of
from redraft.train.objectives.block_drafter import BlockObjective, BlockTable
from redraft.train.objectives.last_layer import begin_with_layers
from redraft.train.training import Start, Training, table_of
from redraft.train.verifier_model import VerifierModel

_DIRECTIONS_ROWS = 8192
"""Rows of texts that directions are taken from."""
_GAP = 3.7
"""How much less a head that attends by distance scores the rows beside its own, in nats."""
_ADDED = 0.3
"""The part of what it reads that each of its query heads adds."""
_SLOWEST, _LEAST_GAIN = 0.01, 0.01
"""Least angle of a position of pairs that count, and least gain of a norm that is undone, relative to the mean one."""


def context_states(layers: int) -> tuple[str, ...]:
    """Return three of a verifier's hidden states: after its second layer, in the middle, and before its last layer.

    DFlash spreads its states alike, from the second layer to the last but two. Ours end with that which enters the last
    layer, so that a drafter may begin with this layer. Of few layers, they are fewer.
    """
    found = {min(1, layers - 2), layers // 2 - 1, layers - 2}
    return tuple(str(layer) for layer in sorted({max(layer, 0) for layer in found}))


@torch.no_grad()
def start_from_layers(drafter: BlockDrafter, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
    """Begin with the verifier's last layers and its final norm, but with a first attention of its own.

    The context begins as that which enters the last layer, with its norm's gain, the mask as the mean embedding, and
    the token before adds nothing. Raises UsageError for layers of another shape or form, and for a drafter that does
    not read that hidden state.
    """
    config, count = drafter.config, drafter.config.layers
    enters = str(verifier.layers - 2)
    if count >= verifier.layers or enters not in config.hidden_states:
        raise UsageError(
            f"drafter.init = 'layers' needs fewer layers than the verifier's {verifier.layers}, and its hidden state "
            f"{enters} among hidden_states", "change them, or set init = 'random'",
        )  # fmt: skip
    layers = {f"layers.{i}": verifier.layers - count + i for i in range(count)}
    batches = iter(batches)
    read = begin_with_layers(drafter, layers, verifier, batches)
    state, whole = drafter.state_dict(), torch.eye(config.hidden_size)
    parts = [whole if name == enters else torch.zeros_like(whole) for name in config.hidden_states]
    state["features.weight"] = torch.cat(parts, dim=1)
    state["feature_norm.weight"] = state[f"layers.{count - 1}.input_norm.weight"].clone()
    state["mask"] = verifier.model.get_input_embeddings().weight.detach().float().mean(0)
    if "token_head.weight" in state:
        state["token_head.weight"] = torch.zeros_like(state["token_head.weight"])
    state["layers.0.input_norm.weight"] = state["feature_norm.weight"]  # one gain of context and block, to be undone
    drafter.load_state_dict(state)
    while sum(batch.size for batch in read) < _DIRECTIONS_ROWS and (batch := next(batches, None)):
        read.append(batch)
    first: BlockLayer = drafter.layers[0]  # type: ignore[assignment]
    attend_by_distance(first, config.rows(config.steps), main_directions(verifier, read, enters))


def main_directions(verifier: VerifierModel, texts: Iterable[Batch], name: str) -> torch.Tensor:
    """Return the principal directions [n, n] of a hidden state in texts, a row each, each state of length 1."""
    squares = torch.zeros(())
    for batch in texts:
        hidden = hidden_states_of(verifier.model, batch.to(verifier.model.device), {name})[name]
        real = torch.arange(hidden.shape[1]) < batch.ends.cpu()[:, None]
        rows = F.normalize(hidden[real.to(hidden.device)].double(), dim=-1)
        squares = squares.to(rows) + rows.mT @ rows
    directions: torch.Tensor = torch.linalg.eigh(squares).eigenvectors
    return directions.mT.flip(0).float().cpu()


def attend_by_distance(layer: BlockLayer, rows: int, directions: torch.Tensor) -> None:
    """Make each head of a layer attend to the row at one distance before its own, and add to it what is there.

    Masks are alike, and the last layer's heads find nothing by them. Here they begin with the context's last row and
    the anchor: row i of a block has them at the distances i + 1 and i, and the heads have distances from 1 to `rows` in
    turn. Biases of queries and keys alone decide, since the product of two rotated vectors depends on their distance
    alone (Su et al. 2021, RoFormer, section 3.4.2). Pairs of numbers that turn slowly tell no rows apart, and are zero.

    directions: [n, n], a row each. Key/value heads that share a distance read different ones of a row, if there are so
    many.
    """
    config = layer.config
    heads, size, group = config.heads, config.head_dim, config.heads // config.kv_heads
    angles = config.rope_theta ** (-torch.arange(0, size, 2) / size)
    fast = (angles >= _SLOWEST).float()
    length = (_GAP * size**0.5 / (fast * (1 - angles.cos())).sum()).sqrt()
    back = -(1 + torch.arange(heads) % rows)[:, None] * angles
    queries = torch.cat([fast * back.cos(), fast * back.sin()], dim=-1)  # [Hq, D]
    keys = torch.cat([fast, torch.zeros_like(fast)]).repeat(config.kv_heads)
    normed = length * (fast.sum() / size).sqrt()  # norms of heads make the mean square of a head's numbers 1
    for product, norm, bias in ((layer.q_proj, layer.q_norm, queries), (layer.k_proj, layer.k_norm, keys)):
        product.weight.zero_()
        product.bias.copy_(bias.flatten() * length)
        if norm is not None:
            norm.weight.fill_(float(normed))
    gain = torch.ones(config.hidden_size) if layer.input_norm is None else layer.input_norm.weight.cpu()
    plain = torch.where(gain.abs() > _LEAST_GAIN * gain.abs().mean(), 1 / gain, 0)
    distances = [{head % rows for head in range(group * kv, group * (kv + 1))} for kv in range(config.kv_heads)]
    parts: list[int] = []
    for kv, own in enumerate(distances):
        taken = {part for part, other in zip(parts, distances, strict=False) if own & other}
        parts.append(next(part for part in range(kv + 1) if part not in taken))
    places = torch.tensor(parts)[:, None] * size + torch.arange(size)
    read = directions[places % config.hidden_size]  # [Hkv, D, n]
    layer.v_proj.weight.copy_((read * plain).flatten(0, 1))
    layer.v_proj.bias.zero_()
    layer.o_proj.weight.copy_(_ADDED * read.repeat_interleave(group, 0).flatten(0, 1).mT)


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
        fields = table.sizes(verifier) | dict(self.row.form)
        fields |= {"head_norms": "self_attn.q_norm.weight" in layer, "confidence": table.confidence > 0}
        fields["qkv_bias"] = True  # `attend_by_distance` writes them
        if table.token_rank:
            fields["token_rank"] = table.token_rank
        return with_sizes(
            BlockConfig, verifier.config, verifier.vocab_size, **fields, layers=table.layers, steps=table.steps,
            hidden_states=table.hidden_states or context_states(verifier.layers),
        )  # fmt: skip


TRAINING = BlockTraining
