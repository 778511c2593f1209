"""Lyanna's loss equals a loop over single chains, also for its ablations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from redraft.errors import UsageError
from redraft.export.drafters.lyanna import LyannaConfig
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.mtp import MtpModule, load_mtp
from redraft.train.objectives import find_training, last_layer
from redraft.train.objectives.last_layer import begin_with_layers, ranked_neurons
from redraft.train.objectives.lyanna import LyannaObjective, LyannaTable, chains, start_from_layer, start_from_mtp
from redraft.train.states import run_verifier
from redraft.train.verifier_model import VerifierModel

from .by_hand import ExplicitAttention, check_loss, some_tokens, texts, token_loss

WEIGHTS = LyannaTable(alpha=0.5, beta=2.0, gamma=0.3, step_weight=0.7)


def config(**changes):
    sizes = dict(hidden_size=32, vocab_size=400, intermediate_size=48, heads=4, kv_heads=2, head_dim=8, rank=5, steps=3)
    return LyannaConfig(**(sizes | changes))


def objective_of(verifier, settings, weights=WEIGHTS, columns=None):
    torch.manual_seed(0)
    objective = LyannaObjective(verifier.model, settings, weights, columns)
    for parameter in objective.drafter.parameters():  # no zeros or ones, so that every path counts
        torch.nn.init.normal_(parameter, std=0.4)
    return objective


def fresh(verifier, **table):
    """A drafter of a recipe with these fields of its table."""
    training = find_training("lyanna")
    return training.loss.module(training.configure(training.recipe(drafter=LyannaTable(**table)), verifier))


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


def token_information(drafter, embed, token, some, hot):
    """g ⊙ x / rms(x), x = W2 W1 E(t); 0 without it. With hot tokens, it has numbers for these after these alone."""
    info = drafter.token_info
    if info is None or (hot is not None and token not in hot):
        return 0.0
    x = info.up.weight @ (info.down.weight @ embed(token))
    added = info.norm.weight * x / (x.square().mean() + 1e-5).sqrt()
    return added if hot is None else torch.zeros(len(some)).index_put((torch.searchsorted(some, hot),), added)


def loop(objective, batch, some, hot):
    """The weighted mean over steps of α MSE + β CE + γ CE with the likeliest token, over all chains of the batch."""
    drafter, verifier, weights = objective.drafter, objective.verifier, WEIGHTS
    hidden, logits = run_verifier(verifier, batch.tokens)
    features, head = hidden["last"], verifier.get_output_embeddings().weight[some]
    embed, losses = verifier.get_input_embeddings(), [[] for _ in range(drafter.config.steps)]
    for row, end in enumerate(batch.ends.tolist()):
        for start in [start for start in batch.starts[row].tolist() if start >= 0]:
            for step, state in enumerate(one_chain(drafter, features[row], batch.tokens[row], embed, start)):
                if (place := start + step + 1) >= end:
                    break
                own = drafter.config.logit_scale * head @ state
                own = own + token_information(drafter, embed, batch.tokens[row, place], some, hot)
                error = (state - features[row, place]).square().mean()
                ce = token_loss(own, logits[row, place], 0, some, weights.beta, greedy=weights.gamma)
                losses[step].append(weights.alpha * error + ce)
    by_step = torch.tensor([1.0, 0.7, 0.49])
    return (torch.stack([torch.stack(one).mean() for one in losses]) * by_step).sum() / by_step.sum()


@pytest.mark.parametrize(
    ("size", "form"),
    [
        (400, {}),
        (150, {"draft_vocab_size": 150, "chain_projection": True, "logit_scale": 0.25}),
        (400, {"token_info": False, "first_token": False}),
        (400, {"hot_tokens": 90}),
        (150, {"draft_vocab_size": 150, "hot_tokens": 60}),
    ],
)
def test_the_loss_and_its_gradient_equal_a_loop_over_chains_and_steps(verifier, size, form):
    """A chain sees no other chain's steps and no later features. One text is padded, and its last chains end early."""
    some = some_tokens(400, size)
    objective = objective_of(verifier, config(**form), columns=DraftColumns(some, 400))
    batch, hot = texts(400, (9, 7), (1, 3)), None
    if objective.drafter.config.hot_tokens:
        counts = torch.randint(50, (400,), generator=torch.Generator().manual_seed(5))
        order = counts[some].argsort(descending=True, stable=True)
        hot = some[order[: objective.drafter.config.hot_tokens]].sort().values
        objective.count(counts)
    loss, metrics = objective.loss(batch)
    check_loss(objective, loss, loop(objective, batch, some, hot))
    assert set(metrics) == {"mse", "ce", "hit 1", "hit 2", "hit 3"}
    states = objective.states(batch)
    with torch.no_grad():
        chain = one_chain(objective.drafter, states.last[0], batch.tokens[0], verifier.model.get_input_embeddings(), 2)
        drafts = list(objective.drafts(batch, states))
        for step, (state, draft) in enumerate(zip(chain, drafts, strict=True)):
            embed, token = verifier.model.get_input_embeddings(), batch.tokens[0, 3 + step]
            own = objective.drafter.config.logit_scale * objective.head @ state
            expected = own + token_information(objective.drafter, embed, token, some, hot)
            torch.testing.assert_close(draft[0, 2], expected, rtol=1e-4, atol=1e-4)


def test_a_depth_without_any_token_adds_nothing(verifier):
    """Texts that end before the last step give a finite loss, and gradients of the steps before."""
    objective = objective_of(verifier, config())
    short = Batch(torch.arange(10).view(2, 5), ("a", "a"), torch.tensor([[2], [2]]), torch.tensor([4, 4]))
    loss, metrics = objective.loss(short)
    assert all(torch.isfinite(torch.tensor(value)) for value in (loss.item(), *metrics.values()))
    loss.backward()
    assert objective.drafter.projection.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("first_token", [True, False])
def test_warm_start_makes_the_first_step_the_mtp_module(verifier, first_token):
    """The module without the fused token equals one with a zero embedding."""
    drafter = fresh(verifier, first_token=first_token)
    start_from_mtp(drafter, verifier, [])
    module: MtpModule = load_mtp(verifier.checkpoint.path)
    embed, tokens = verifier.model.get_input_embeddings(), texts(400, (9, 9), (1, 1)).tokens
    with torch.no_grad():
        features = run_verifier(verifier.model, tokens)[0]["last"]
        found = next(chains(drafter, features, tokens, torch.arange(6).expand(2, -1), embed))
        if not first_token:
            module.embedding_norm.weight.zero_()
        expected = module(features[:, :6], embed(tokens[:, 1:7]))
    assert torch.allclose(found, expected, atol=1e-5)
    assert F.mse_loss(drafter.chain_norm.weight, module.hidden_norm.weight) == 0


def test_warm_start_of_another_shape_is_refused(verifier):
    drafter = fresh(verifier, intermediate_size=40)
    with pytest.raises(UsageError, match="init = 'random'"):
        start_from_mtp(drafter, verifier, [])


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
    with pytest.raises(UsageError, match=r"drafter.init: layer.* does not fit"):
        start_from_layer(fresh(verifier, heads=4), verifier, texts)


def test_a_narrower_start_keeps_the_neurons_that_add_most(verifier, monkeypatch):
    """Here the odd ones: of the others, some are a millionth as active, some have a millionth of the weights."""
    mlp = verifier.model.get_decoder().layers[-1].mlp
    wide, small = mlp.down_proj.in_features, 1e-6
    up, down = mlp.up_proj.weight, mlp.down_proj.weight
    monkeypatch.setattr(up, "data", up.data * torch.tensor([[small], [1], [1], [1]]).repeat(wide // 4, 1))
    monkeypatch.setattr(down, "data", down.data * torch.tensor([1, 1, small, 1]).repeat(wide // 4))
    drafter = fresh(verifier, intermediate_size=wide // 2)
    start_from_layer(drafter, verifier, [Batch.whole(torch.arange(48).reshape(2, 24), ("a", "a"), 3)] * 2)
    assert torch.equal(drafter.layer.gate_proj.weight, mlp.gate_proj.weight[1::2])
    assert torch.equal(drafter.layer.up_proj.weight, mlp.up_proj.weight[1::2])
    assert torch.equal(drafter.layer.down_proj.weight, mlp.down_proj.weight[:, 1::2])


def test_padding_ranks_no_neurons(verifier):
    def kept(tokens):
        batch = Batch(tokens, ("a", "a"), torch.zeros(2, 1, dtype=torch.long), torch.tensor([20, 20]))
        drafter = fresh(verifier, intermediate_size=8)
        begin_with_layers(drafter, {"layer": verifier.layers - 1}, verifier, iter([batch]))
        return drafter.layer.gate_proj.weight

    tokens = torch.randint(0, 400, (2, 90), generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept(tokens), kept(tokens[:, :20]))
    assert not torch.equal(kept(tokens), kept(tokens.flip(1)))


def test_the_first_token_ranks_no_neurons(verifier):
    batch, last = Batch.whole(torch.arange(48).reshape(2, 24), ("a", "a"), 3), verifier.layers - 1
    ranks = ranked_neurons([last], verifier, [batch])[last]

    def huge(_, args):
        rows = args[0].clone()
        rows[:, 0, ranks[-1]] = 1e9
        return (rows,)

    hook = verifier.model.get_decoder().layers[last].mlp.down_proj.register_forward_pre_hook(huge)
    found = ranked_neurons([last], verifier, [batch])[last]
    hook.remove()
    assert torch.equal(found, ranks)


@pytest.mark.parametrize(("rows", "batches"), [(48, 1), (49, 2)])
def test_neurons_are_ranked_by_so_many_tokens(verifier, monkeypatch, rows, batches):
    monkeypatch.setattr(last_layer, "_RANKED_ROWS", rows)
    texts = iter([Batch.whole(torch.arange(48).reshape(2, 24), ("a", "a"), 3)] * 3)
    drafter = fresh(verifier, intermediate_size=8)
    assert len(begin_with_layers(drafter, {"layer": verifier.layers - 1}, verifier, texts)) == batches


def test_a_start_from_the_last_layer_of_a_qwen_has_its_biases_for_each_head():
    """Each key/value head is there twice, and the layer computes the same, or the start is refused."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=90, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4)
    model = Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **sizes)).eval()
    for layer in model.model.layers:
        for product in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(product.bias)
    qwen = VerifierModel(None, model, None, None)
    drafter = fresh(qwen, init="layer", chain_projection=True, kv_heads=4)
    start_from_layer(drafter, qwen, [Batch.whole(torch.arange(48).reshape(2, 24), ("a", "a"), 3)] * 2)
    one, two = model.model.layers[-1].self_attn.k_proj.bias.chunk(2)
    assert torch.equal(drafter.layer.k_proj.bias, torch.cat([one, one, two, two]))
    assert not fresh(qwen).layer.k_proj.bias.any()  # it has one, so that it can begin with this drafter


def test_a_start_from_a_layer_of_another_form_is_refused(verifier):
    """Equal names and shapes are not enough: the layer must compute the same."""
    drafter = fresh(verifier)
    batch = Batch.whole(torch.arange(24)[None], ("a",), 3)
    mlp = verifier.model.get_decoder().layers[-1].mlp
    other = mlp.register_forward_hook(lambda module, args, output: output + args[0])
    with pytest.raises(UsageError, match="not of Llama's form"):
        start_from_layer(drafter, verifier, [batch])
    other.remove()
    gate = mlp.gate_proj
    del mlp.gate_proj  # as Arcee's
    with pytest.raises(UsageError, match="not of Llama's form"):
        start_from_layer(drafter, verifier, [batch])
    mlp.gate_proj = gate
    attention = verifier.model.get_decoder().layers[-1].self_attn
    keys = attention.kv_a_proj_with_mqa = attention.k_proj  # as latent attention has
    del attention.k_proj
    with pytest.raises(UsageError, match="does not fit a drafter of this shape"):
        start_from_layer(drafter, verifier, [batch])
    attention.k_proj = keys
    del attention.kv_a_proj_with_mqa
    start_from_layer(drafter, verifier, [batch])
