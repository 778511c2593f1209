"""Losses of block drafters equal a loop over blocks by the published forward pass. Their starts read the context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.block_drafter import BlockConfig, BlockDrafter, BlockLayer
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import block, find_training
from redraft.train.objectives.block import (
    attend_by_distance,
    context_states,
    main_directions,
    start_from_layers,
)
from redraft.train.objectives.block_drafter import BlockObjective, BlockTable
from redraft.train.states import run_verifier
from redraft.train.trained_drafter import TrainedDrafter
from tests.export.drafters.block_by_hand import block_states, chance, sizes_of, token_bias
from tests.export.drafters.test_block_graphs import AFTER_TOKENS, BOTH_WAYS, ONE_WAY, published

from .by_hand import check_loss, some_tokens, texts, token_loss

STEPS = 3
TABLES = {
    BOTH_WAYS: BlockTable(hard=1.0, decay=2.0, blocks=0),
    AFTER_TOKENS: BlockTable(hard=0.1, overlap=0.9, confidence=0.7, decay=4.0, blocks=0, token_rank=5, layers=2),
    ONE_WAY: BlockTable(soft=1.0, greedy=0.2, blocks=0),
}


def objective_of(method, verifier, table, drafted=0):
    """A loss with random weights, of few tokens if `drafted`."""
    training = find_training(method)
    config = training.configuration(replace(table, steps=STEPS, draft_vocabulary=drafted), verifier)
    vocabulary = DraftColumns(some_tokens(verifier.vocab_size, drafted), verifier.vocab_size) if drafted else None
    torch.manual_seed(0)
    objective = BlockObjective(verifier.model, config, table, vocabulary)
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            parameter.normal_(float("norm" in name), 0.3)
    return objective


def by_hand(objective, verifier, batch):
    """The loss, block by block, with its gradient."""
    config, table = objective.drafter.config, objective.table
    w = published(objective.drafter, keep=True)
    embedding, head = verifier.model.get_input_embeddings().weight, verifier.model.get_output_embeddings().weight
    some, rows = objective.vocabulary.tokens, config.rows(STEPS)
    losses = [[] for _ in range(STEPS)]
    for text, starts, end in zip(batch.tokens, batch.starts.tolist(), batch.ends.tolist(), strict=True):
        hidden, (logits,) = run_verifier(verifier.model, text[None], config.hidden_states)
        features = torch.cat([hidden[name][0] for name in config.hidden_states], dim=-1)
        for start in (start for start in starts if start >= 0):
            block = torch.cat([embedding[text[start + 1]][None], objective.drafter.mask.expand(rows - 1, -1)])
            states = block_states(w, sizes_of(config), features[: start + 1], block)[rows - STEPS :]
            for depth, state in enumerate(states):
                place = start + depth + 1
                if place < end:
                    of_token = after_token if config.token_rank else masked
                    losses[depth].append(
                        of_token(w, table, head[some] @ state, state, logits[place], text, place, some)
                    )
    weights = table.weights(STEPS)
    return sum(weight * torch.stack(each).mean() for weight, each in zip(weights, losses, strict=True))


def masked(w, table, found, state, logits, text, place, some):
    """The loss of one token of a block without tokens before."""
    return token_loss(found, logits, text[place + 1], some, table.soft, table.hard, table.greedy)


def after_token(w, table, found, state, logits, text, place, some):
    """DSpark's loss of one token: CE, distance and confidence."""
    before = int(text[place])
    q = (found + token_bias(w, before)).softmax(-1)
    kept = logits.softmax(-1)[some] * torch.isin(some, logits.topk(64).indices)
    hard = -table.hard * q[some == text[place + 1]].log().sum()  # a token outside has none
    overlap = torch.minimum(q, kept).sum()
    sure, right = chance(w, state, before), overlap.detach()
    confidence = -(right * sure.log() + (1 - right) * (1 - sure).log())
    return hard + table.overlap * 2 * (1 - overlap) + table.confidence * confidence


@pytest.mark.parametrize("method", TABLES)
@pytest.mark.parametrize("drafted", [0, 120])
def test_the_loss_is_that_of_each_block_alone(verifier, method, drafted):
    objective = objective_of(method, verifier, TABLES[method], drafted)
    batch = texts(verifier.vocab_size, (12, 9), (6, 3))
    found = objective.total(*objective.losses(batch, objective.states(batch)))
    check_loss(objective, found, by_hand(objective, verifier, batch))


def test_a_step_draws_some_of_the_starts(verifier):
    """Padding is drawn last. Each step has others."""
    objective = objective_of(ONE_WAY, verifier, replace(TABLES[ONE_WAY], blocks=4))
    batch = texts(verifier.vocab_size, (20, 9), (2, 4))
    drawn = [objective._some(batch).starts for _ in range(8)]
    assert all(one.shape == (2, 4) and torch.equal(one, one.sort(-1).values) for one in drawn)
    assert all((one[0] >= 0).all() and set(one[0].tolist()) <= set(batch.starts[0].tolist()) for one in drawn)
    assert len({tuple(one[0].tolist()) for one in drawn}) > 1
    assert all(one[1].tolist() == [start for start in batch.starts[1].tolist() if start >= 0] for one in drawn)


@pytest.mark.parametrize("again", [1, 2])
def test_a_drafter_begins_as_the_verifiers_last_layers(verifier, again, monkeypatch):
    """But for the first attention, which reads directions of the context without the gain of its norm."""
    for layer in verifier.model.get_decoder().layers:
        monkeypatch.setattr(layer.input_layernorm.weight, "data", torch.rand(verifier.config.hidden_size) + 0.5)
    training = find_training(BOTH_WAYS)
    table = training.table(layers=2, kv_heads=again * verifier.config.num_key_value_heads)
    config = training.configuration(table, verifier)
    drafter = BlockObjective(verifier.model, config, table).drafter
    batch = texts(verifier.vocab_size, (9,), (1,))
    start_from_layers(drafter, verifier, [batch])
    enters = str(verifier.layers - 2)
    hidden, _ = run_verifier(verifier.model, batch.tokens, (*config.hidden_states, enters))
    features = torch.cat([hidden[name] for name in config.hidden_states], dim=-1)
    context = drafter.feature_norm(drafter.features(features))
    last = verifier.model.get_decoder().layers[-1]
    normed = last.input_layernorm(hidden[enters])
    torch.testing.assert_close(context, normed, rtol=1e-4, atol=1e-4)
    before = verifier.model.get_decoder().layers[-2]
    assert torch.equal(drafter.layers[0].down_proj.weight, before.mlp.down_proj.weight)
    assert not drafter.layers[0].k_proj.weight.any()
    values = drafter.layers[0].v_proj(context)
    read = drafter.layers[0].v_proj.weight * last.input_layernorm.weight
    torch.testing.assert_close(read[:16] @ read[:16].mT, torch.eye(16), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values, normed / last.input_layernorm.weight @ read.mT, rtol=1e-3, atol=1e-3)
    for name in ("k_proj", "v_proj"):
        heads = last.self_attn.get_submodule(name)(normed).unflatten(-1, (-1, config.head_dim))
        expected = heads.repeat_interleave(again, -2).flatten(-2)
        found = drafter.layers[1].get_submodule(name)(context)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norms", [False, True])
def test_heads_attend_to_the_row_at_one_distance(norms):
    """Six heads in two groups, of the distances 1 to 3 each. A group adds its part of the directions of these rows."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, vocab_size=9, intermediate_size=8, heads=6, kv_heads=2, head_dim=16)
    layer = BlockLayer(BlockConfig(**sizes, qkv_bias=True, head_norms=norms)).requires_grad_(False)
    layer.input_norm.weight.uniform_(0.5, 2.0)
    directions = torch.linalg.qr(torch.randn(64, 64)).Q
    attend_by_distance(layer, 3, directions)
    x, places = torch.randn(1, 40, 64), torch.arange(40)
    q, k, v = layer.read(x)
    q = layer.rotary(q, places, 6).unflatten(-1, (6, 16))[0]
    k = layer.rotary(k, places, 2).unflatten(-1, (2, 16))[0].repeat_interleave(3, 1)
    shares = (torch.einsum("rhd,shd->hrs", q, k) / 4).softmax(-1)
    for head, own in enumerate(shares):
        chances, found = own[4:].max(-1)
        assert found.tolist() == [row - (1 + head % 3) for row in range(4, 40)]
        torch.testing.assert_close(chances, torch.full_like(chances, 0.953), rtol=0, atol=0.01)
    added = layer.o_proj(v.unflatten(-1, (2, 16)).repeat_interleave(3, 2).flatten(2))
    normed = x / x.square().mean(-1, keepdim=True).sqrt()
    expected = 3 * block._ADDED * normed @ directions[:32].mT @ directions[:32]
    torch.testing.assert_close(added, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(28, 4, 8), (32, 8, 7), (9, 3, 8), (14, 14, 6)])
def test_heads_of_one_distance_read_different_directions(heads, kv_heads, rows):
    sizes = dict(hidden_size=64, vocab_size=9, intermediate_size=8, heads=heads, kv_heads=kv_heads, head_dim=8)
    layer = BlockLayer(BlockConfig(**sizes, qkv_bias=True)).requires_grad_(False)
    attend_by_distance(layer, rows, torch.eye(64))
    read = layer.v_proj.weight.unflatten(0, (kv_heads, -1))
    distances = [{head % rows for head in own.tolist()} for own in torch.arange(heads).chunk(kv_heads)]
    shared = [(a, b) for a in range(kv_heads) for b in range(a) if distances[a] & distances[b]]
    assert shared
    assert not any((read[a] @ read[b].mT).any() for a, b in shared)


def test_directions_are_the_main_ones_of_real_rows(verifier):
    batch = texts(verifier.vocab_size, (12, 5), (1, 1))
    hidden, _ = run_verifier(verifier.model, batch.tokens, ("2",))
    rows = torch.cat([one[:end] for one, end in zip(hidden["2"], batch.ends, strict=True)])
    _, _, expected = torch.linalg.svd(torch.nn.functional.normalize(rows, dim=-1))
    found = main_directions(verifier, [batch], "2")
    torch.testing.assert_close((found[:4] * expected[:4]).sum(-1).abs(), torch.ones(4), rtol=1e-3, atol=1e-3)


def test_a_drafter_without_biases_begins_one_with_them(verifier):
    """A published one may have none. The other way round, its biases would be lost."""
    training = find_training(BOTH_WAYS)
    biased = training.configuration(training.table(), verifier)
    plain = replace(biased, qkv_bias=False)

    def check(start, config):
        found = TrainedDrafter(Path("start"), training, start, BlockDrafter(start), verifier.identity)
        found.check_begins(config, verifier)

    check(plain, biased)
    with pytest.raises(CheckpointError, match="it has qkv_bias = True, the recipe's drafter has qkv_bias = False"):
        check(biased, plain)


@pytest.mark.parametrize("table", [{"layers": 4}, {"hidden_states": ("0", "last")}])
def test_a_drafter_that_cannot_begin_with_layers_is_refused(verifier, table):
    training = find_training(BOTH_WAYS)
    config = training.configuration(training.table(**table), verifier)
    drafter = BlockObjective(verifier.model, config, training.table()).drafter
    with pytest.raises(UsageError, match="needs fewer layers than the verifier's 4, and its hidden state 2 among"):
        start_from_layers(drafter, verifier, [])


@pytest.mark.parametrize(
    ("layers", "states"),
    [(1, ("0",)), (2, ("0",)), (4, ("1", "2")), (12, ("1", "5", "10")), (36, ("1", "17", "34"))],
)
def test_the_hidden_states_of_the_context(layers, states):
    assert context_states(layers) == states


@pytest.mark.parametrize(
    "values", [{}, {"soft": -1.0}, {"hard": 1.0, "decay": float("nan")}, {"confidence": 1.0}, {"hard": float("inf")}]
)
def test_losses_that_cannot_be_are_refused(values):
    with pytest.raises(UsageError, match="must be 0 or more, and one of the first four positive"):
        BlockTable(**values)


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match=r"drafter\.blocks and token_rank must be 0 or more, not -1, 0"):
        BlockTable(hard=1.0, blocks=-1)
    assert BlockTable(hard=1.0).weights(3).tolist() == pytest.approx([1 / 3] * 3)
