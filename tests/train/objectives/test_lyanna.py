"""Lyanna's loss equals a loop over single chains, also for its ablations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from redraft.errors import UsageError
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.mtp import MtpModule, load_mtp
from redraft.train.objectives import find_training
from redraft.train.objectives.lyanna import (
    LossWeights,
    LyannaObjective,
    LyannaTable,
    chains,
    start_from_layer,
    start_from_mtp,
)
from redraft.train.states import TOP_LOGITS, run_verifier
from redraft.train.verifier_model import open_verifier

ROWS = 6


def config(**changes):
    sizes = dict(hidden_size=32, vocab_size=400, intermediate_size=48, heads=4, kv_heads=2, head_dim=8, rank=5, steps=3)
    return LyannaConfig(**(sizes | changes))


def drafter_of(config):
    torch.manual_seed(0)
    drafter = LyannaDrafter(config)
    for parameter in drafter.parameters():  # no zeros or ones, so that every path counts
        torch.nn.init.normal_(parameter, std=0.4)
    return drafter


def fresh(verifier, **table):
    """A drafter of a recipe with these fields of its table."""
    training = find_training("lyanna")
    return training.drafter(training.configure(training.recipe(drafter=LyannaTable(**table)), verifier))


@pytest.fixture(scope="module")
def verifier(verifier_folder):
    return open_verifier(verifier_folder, "cpu")


def features_of(verifier, tokens):
    return run_verifier(verifier.model, tokens)[0]["last"]


def whole(tokens, kinds=("a", "a")):
    """Drafts start at the first ROWS positions."""
    return Batch.whole(tokens, kinds, tokens.shape[1] - ROWS)


STARTS = torch.arange(ROWS).expand(2, -1)


@pytest.fixture
def tokens():
    return torch.randint(0, 400, (2, ROWS + 3), generator=torch.Generator().manual_seed(1))


class ExplicitAttention:
    """Attends one row at a time over lists of keys and values, one head after the other."""

    def __init__(self, config):
        self.config, self.keys, self.values = config, [], []

    def __call__(self, q, k, v):
        shape = self.config
        self.keys.append(k.view(shape.kv_heads, shape.head_dim))
        self.values.append(v.view(shape.kv_heads, shape.head_dim))
        heads = []
        for head, query in enumerate(q.view(shape.heads, shape.head_dim)):
            group = head // (shape.heads // shape.kv_heads)
            scores = torch.stack([query @ key[group] for key in self.keys]) / shape.head_dim**0.5
            weights = scores.softmax(0)
            heads.append(sum(w * value[group] for w, value in zip(weights, self.values, strict=True)))
        return torch.cat(heads).view(1, 1, -1)


def one_chain(drafter, features, tokens, embed, start):
    """h_1 … h_N of the chain that starts at `start`, computed like decoding."""
    attend = ExplicitAttention(drafter.config)
    for place in range(start + 1):
        row, token = features[None, place, None], tokens[None, place + 1, None]
        hidden = drafter.first(row, embed(token), torch.tensor([place]), attend)
    states = [hidden]
    for step in range(1, drafter.config.steps):
        states.append(drafter.following(states[-1], torch.tensor([start + step]), attend))
    return [state[0, 0] for state in states]


def test_parallel_chains_equal_one_chain_after_another(verifier, tokens):
    """A chain must not see another chain's steps or later features, which drafting never has."""
    drafter, embed = drafter_of(config()), verifier.model.get_input_embeddings()
    with torch.no_grad():
        features = features_of(verifier, tokens)
        found = torch.stack(list(chains(drafter, features, tokens, STARTS, embed)))  # [N, B, T, n]
        for row in range(2):
            for start in range(ROWS):
                expected = one_chain(drafter, features[row], tokens[row], embed, start)
                assert torch.allclose(found[:, row, start], torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("size", [400, 150])
def test_loss_equals_a_loop_over_starts_and_steps(verifier, tokens, size):
    """α MSE + β CE + γ CE with the likeliest token, relative to the verifier at the predicted token.

    CE counts the verifier's 64 likeliest tokens that are in the draft vocabulary.
    """
    settings = config(draft_vocab_size=size % 400)
    some = torch.randperm(400, generator=torch.Generator().manual_seed(2))[:size].sort().values
    weights = LossWeights(alpha=0.5, beta=2.0, gamma=0.3, step_weight=0.7)
    objective = LyannaObjective(verifier.model, settings, weights, DraftColumns(some, 400))
    objective.drafter.load_state_dict(drafter_of(settings).state_dict())
    embed, head = verifier.model.get_input_embeddings(), verifier.model.get_output_embeddings().weight
    inside = torch.zeros(400).index_fill_(0, some, 1.0)
    with torch.no_grad():
        hidden_states, logits = run_verifier(verifier.model, tokens)
        features, losses = hidden_states["last"], torch.zeros(3)
        for row in range(2):
            for start in range(ROWS):
                chain = one_chain(objective.drafter, features[row], tokens[row], embed, start)
                for step, hidden in enumerate(chain):
                    place = start + step + 1
                    info = objective.drafter.token_info(embed(tokens[row, place]))
                    log_probs = torch.zeros(400)
                    log_probs[some] = (head[some] @ hidden + info).log_softmax(-1)
                    shares = logits[row, place].softmax(-1) * inside
                    best = logits[row, place].argmax()
                    shares[logits[row, place].argsort(descending=True)[TOP_LOGITS:]] = 0.0
                    ce = -(shares * log_probs).sum()
                    mse = ((hidden - features[row, place]) ** 2).mean()
                    losses[step] += (0.5 * mse + 2.0 * ce - 0.3 * (log_probs * inside)[best]) / (2 * ROWS)
        by_step = torch.tensor([1.0, 0.7, 0.49])
        loss, metrics = objective.loss(whole(tokens))
    assert loss.item() == pytest.approx(((losses * by_step).sum() / by_step.sum()).item(), rel=1e-5)
    assert set(metrics) == {"mse", "ce", "hit 1", "hit 2", "hit 3"}


def test_only_real_drafts_count(verifier, tokens):
    """Padded starts and depths beyond a text's end change nothing."""
    objective = LyannaObjective(verifier.model, config())
    objective.drafter.load_state_dict(drafter_of(config()).state_dict())
    starts, ends = torch.tensor([[0, 1, 2]]), torch.tensor([4])
    short = Batch(tokens[:1, :4], ("a",), starts, ends)
    padded = Batch(
        torch.nn.functional.pad(tokens[:1, :4], (0, 5)), ("a",), torch.tensor([[0, 1, 2, -1, -1]]), torch.tensor([4])
    )
    with torch.no_grad():
        assert objective.loss(short)[0].item() == pytest.approx(objective.loss(padded)[0].item(), rel=1e-5)


def test_a_depth_without_any_token_adds_nothing(verifier, tokens):
    """Texts that end before the last step give a finite loss, and gradients of the steps before."""
    objective = LyannaObjective(verifier.model, config())
    short = Batch(tokens[:, :5], ("a", "a"), torch.tensor([[2], [2]]), torch.tensor([4, 4]))
    loss, metrics = objective.loss(short)
    assert all(torch.isfinite(torch.tensor(value)) for value in (loss.item(), *metrics.values()))
    loss.backward()
    assert objective.drafter.projection.weight.grad.abs().sum() > 0


def test_kept_states_replace_the_verifier(verifier, tokens):
    """A batch with states needs no forward pass, and learns the same."""
    objective = LyannaObjective(verifier.model, config())
    batch = whole(tokens)
    kept = Batch(batch.tokens, batch.kinds, batch.starts, batch.ends, objective.states(batch))
    expected = objective.loss(batch)[0]
    objective.verifier.forward = None
    try:
        assert torch.equal(objective.loss(kept)[0], expected)
    finally:
        del objective.verifier.forward


def beside_nothing(settings):
    """An objective whose verifier has only an embedding and a head."""
    embed, head = torch.nn.Embedding(400, 32), torch.nn.Linear(32, 400, bias=False)
    verifier = torch.nn.Module()
    verifier.get_input_embeddings, verifier.get_output_embeddings = lambda: embed, lambda: head
    objective = LyannaObjective(verifier, settings)
    objective.drafter = drafter_of(settings)
    return objective, embed, head.weight


def test_step_logits_add_the_normalized_low_rank_token_information():
    """l' = s M h + g ⊙ x / rms(x), x = W2 W1 E(t)."""
    objective, embed, head = beside_nothing(config(logit_scale=0.25))
    drafter = objective.drafter
    hidden, tokens = torch.randn(2, 4, 32), torch.randint(0, 400, (2, 4))
    tokens[1] = tokens[0]  # repeated tokens share one product
    x = embed(tokens) @ drafter.token_info.down.weight.T @ drafter.token_info.up.weight.T
    normalized = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = 0.25 * hidden @ head.T + drafter.token_info.norm.weight * normalized
    assert torch.allclose(objective.step_logits(hidden, tokens), expected, atol=1e-4)


def test_without_token_info_logits_are_the_heads_product():
    (objective, _, head), hidden = beside_nothing(config(token_info=False)), torch.randn(1, 4, 32)
    found = objective.step_logits(hidden, torch.zeros(1, 4, dtype=torch.int64))
    assert torch.allclose(found, hidden @ head.T, atol=1e-4)
    assert not any("token_info" in name for name in objective.drafter.state_dict())


@pytest.mark.parametrize("first_token", [True, False])
def test_first_token_reaches_the_chain_only_if_it_is_fused(verifier, tokens, first_token):
    drafter, embed = drafter_of(config(first_token=first_token)), verifier.model.get_input_embeddings()
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 1) % 400  # the first token of the drafts that start at position 2
    with torch.no_grad():
        features = features_of(verifier, tokens)
        before, after = (torch.stack(list(chains(drafter, features, t, STARTS, embed))) for t in (tokens, other))
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert torch.allclose(before[:, :, 2], after[:, :, 2], atol=1e-5) is not first_token


def test_only_the_drafter_is_trained(verifier, tokens):
    objective = LyannaObjective(verifier.model, config())
    objective.loss(whole(tokens))[0].backward()
    assert all(p.grad is not None for _, p in objective.named_parameters())
    assert all(p.grad is None and not p.requires_grad for p in verifier.model.parameters())
    assert all(name.startswith("drafter.") for name in objective.state_dict())


@pytest.mark.parametrize("first_token", [True, False])
def test_warm_start_makes_the_first_step_the_mtp_module(verifier, tokens, first_token):
    """The module without the fused token equals one with a zero embedding."""
    drafter = fresh(verifier, first_token=first_token)
    start_from_mtp(drafter, verifier, [])
    module: MtpModule = load_mtp(verifier.checkpoint.path)
    embed = verifier.model.get_input_embeddings()
    with torch.no_grad():
        features = features_of(verifier, tokens)
        following = embed(tokens[:, 1 : ROWS + 1])
        found = next(chains(drafter, features, tokens, STARTS, embed))
        if not first_token:
            module.embedding_norm.weight.zero_()
        expected = module(features[:, :ROWS], following)
    assert torch.allclose(found, expected, atol=1e-5)
    assert F.mse_loss(drafter.chain_norm.weight, module.hidden_norm.weight) == 0


def test_warm_start_of_another_shape_is_refused(verifier):
    drafter = fresh(verifier, intermediate_size=40)
    with pytest.raises(UsageError, match="init = 'random'"):
        start_from_mtp(drafter, verifier, [])


def test_shape_is_the_verifiers_if_the_recipe_has_none(verifier):
    found = fresh(verifier, kv_heads=2, chain=5, rank=7).config
    expected = dict(hidden_size=32, vocab_size=400, intermediate_size=64, heads=2, kv_heads=2, head_dim=16)
    assert found == LyannaConfig(**expected, rank=7, steps=5)


def test_a_start_from_the_last_layer_is_that_layer_with_its_inputs(verifier):
    """The projections predict the inputs of the layer better than chance: of the first step, and of the later ones."""
    drafter = fresh(verifier, chain_projection=True)
    generator = torch.Generator().manual_seed(2)
    texts = [Batch.whole(torch.randint(0, 400, (32, 24), generator=generator), ("a",) * 32, 3) for _ in range(6)]
    start_from_layer(drafter, verifier, texts)
    body = verifier.model.get_decoder()
    assert torch.equal(drafter.layer.gate_proj.weight, body.layers[-1].mlp.gate_proj.weight)
    assert torch.equal(drafter.layer.k_proj.weight, body.layers[-1].self_attn.k_proj.weight)
    assert torch.equal(drafter.norm.weight, body.norm.weight)
    layer_input = str(len(body.layers) - 2)
    tokens = texts[0].tokens
    with torch.no_grad():
        hidden, _ = run_verifier(verifier.model, tokens, ("last", layer_input))
        embeddings = verifier.model.get_input_embeddings()(tokens[:, 1:])
        first = drafter.projection(drafter.joined(hidden["last"][:, :-1], embeddings))
        later = drafter.chain_projection(drafter.chain_norm(hidden["last"][:, :-1]))
    wanted = hidden[layer_input][:, 1:]
    spread = F.mse_loss(wanted.mean((0, 1)).expand_as(wanted), wanted)
    assert F.mse_loss(first, wanted) < 0.5 * spread
    assert F.mse_loss(later, wanted) < spread
    with pytest.raises(UsageError, match="init = 'layer'"):
        start_from_layer(fresh(verifier, heads=4), verifier, [])


def test_a_start_from_a_layer_of_another_form_is_refused(verifier):
    """Equal names and shapes are not enough: the layer must compute the same."""
    drafter = fresh(verifier)
    batch = Batch.whole(torch.arange(24)[None], ("a",), 3)
    mlp = verifier.model.get_decoder().layers[-1].mlp
    other = mlp.register_forward_hook(lambda module, args, output: output + args[0])
    with pytest.raises(UsageError, match="not of Llama's form"):
        start_from_layer(drafter, verifier, [batch])
    other.remove()
    start_from_layer(drafter, verifier, [batch])


def test_a_projected_chain_differs_from_its_states_alone_and_equals_them_at_identity(verifier, tokens):
    """Only steps after the first are projected."""
    plain, embed = drafter_of(config()), verifier.model.get_input_embeddings()
    projected = LyannaDrafter(config(chain_projection=True))
    found = {}
    for name, weight in (("identity", torch.eye(32)), ("other", -torch.eye(32))):
        projected.load_state_dict(plain.state_dict() | {"chain_projection.weight": weight})
        with torch.no_grad():
            found[name] = list(chains(projected, features_of(verifier, tokens), tokens, STARTS, embed))
    with torch.no_grad():
        expected = list(chains(plain, features_of(verifier, tokens), tokens, STARTS, embed))
    assert torch.equal(torch.stack(found["identity"]), torch.stack(expected))
    assert torch.equal(found["other"][0], expected[0])
    assert not torch.allclose(found["other"][1], expected[1], atol=0.1)
