"""The loss of heads equals a loop over drafts and heads, written from the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.errors import UsageError
from redraft.export.drafters import medusa, multi_head
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import find_training
from redraft.train.objectives.multi_head import start_from_layer
from redraft.train.states import run_verifier
from redraft.train.verifier_model import VerifierModel
from tests.export.drafters.trunk_heads import head_logits

from .by_hand import check_loss, some_tokens, texts, token_loss

VOCABULARY, HIDDEN, HEADS, SCALE = 90, 16, 3, 0.7
PROMPTS = (3, 6, 5)
METHODS = ("medusa", "multi_head")


@pytest.fixture(scope="module")
def verifier():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.norm.weight, mean=1.0, std=0.3)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)  # heads of bounded states can be sure
    return model


@pytest.fixture
def batch():
    return texts(VOCABULARY, (14, 9, 12), PROMPTS)


def objective_of(method, verifier, size=VOCABULARY, **weights):
    torch.manual_seed(0)
    heads = {"heads": HEADS} if method == "medusa" else {"draft_heads": HEADS}
    configuration_of = (medusa if method == "medusa" else multi_head).configuration_of
    config = configuration_of(verifier.config, VOCABULARY, draft_vocab_size=size % VOCABULARY, **heads)
    training, columns = find_training(method), DraftColumns(some_tokens(VOCABULARY, size), VOCABULARY)
    objective = training.loss(verifier, replace(config, logit_scale=SCALE), training.table(**weights), columns)
    for parameter in objective.drafter.parameters():  # no zeros, so that every weight counts
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, mean=float(method == "multi_head" and parameter.dim() == 1), std=0.2)
    return objective


def logits_of(method, objective, hidden, head, matrix):
    """The logits of a head of a draft, from the hidden states of the verifier up to its start, [T, n] each."""
    if method == "multi_head":
        return head_logits(objective.drafter, head, hidden["1"], matrix)
    heads, h = objective.drafter.heads, hidden["last"][-1]
    w, b = (values.unflatten(0, (HEADS, -1))[head] for values in (heads.weight, heads.bias))
    return matrix @ (h + F.silu(w @ h + b)) * SCALE


def loop(method, objective, batch):
    """The sum over heads k of step^k times the mean loss of head k, and every head's hits by start."""
    hidden, logits = run_verifier(objective.verifier, batch.tokens, ("last", "1"))
    some, table = objective.vocabulary.tokens, objective.table
    matrix = objective.verifier.get_output_embeddings().weight[some]
    total, hits = torch.zeros(()), []
    for k in range(HEADS):
        losses, right = [], []
        for row, end in enumerate(batch.ends.tolist()):
            for start in [start for start in batch.starts[row].tolist() if 0 <= start < end - 1 - k]:
                seen = {name: states[row, : start + 1] for name, states in hidden.items()}
                found, place = logits_of(method, objective, seen, k, matrix), start + k + 1
                truth = batch.tokens[row, place + 1]
                losses.append(token_loss(found, logits[row, place], truth, some, table.soft, table.hard, table.greedy))
                right.append(bool(some[found.argmax()] == logits[row, place].argmax()))
        total = total + table.step_weight ** (k + 1) * torch.stack(losses).mean()
        hits.append(sum(right) / len(right))
    return total, hits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("size", "weights"), [(VOCABULARY, {}), (70, dict(soft=0.3, hard=0.5, greedy=0.2, step_weight=0.9))]
)
def test_the_loss_and_its_gradient_equal_a_loop_over_drafts_and_heads(verifier, batch, method, size, weights):
    """Head k of a draft that starts at s predicts the token at s + 1 + k from the states up to s."""
    objective = objective_of(method, verifier, size, **weights)
    loss, metrics = objective.loss(batch)
    expected, hits = loop(method, objective, batch)
    check_loss(objective, loss, expected)
    assert [metrics[f"hit {head}"] for head in range(1, HEADS + 1)] == pytest.approx(hits)


def test_the_norm_is_the_verifiers(verifier):
    objective = objective_of("multi_head", verifier)
    assert torch.equal(objective.drafter.norm.weight, verifier.model.norm.weight)
    other = LlamaForCausalLM(verifier.config)
    other.model.norm = torch.nn.Identity()
    with pytest.raises(UsageError, match="the verifier has no final norm of Llama's form, which all heads share"):
        type(objective)(other, objective.drafter.config)


def model_of(verifier):
    """The verifier as training knows it, without its folder."""
    return VerifierModel(None, verifier, None, None)


@pytest.mark.parametrize("method", METHODS)
def test_fresh_heads_have_the_verifiers_own_logits_at_every_depth(verifier, batch, method):
    """Heads on the trunk do if they begin as the verifier's last layer."""
    training = find_training(method)
    config = training.configure(training.recipe(), model_of(verifier))
    objective = training.loss(verifier, config, training.table(), DraftColumns.whole(VOCABULARY))
    for start in training.starts.values():
        start(objective.drafter, model_of(verifier), [batch])
    with torch.no_grad():
        drafts = torch.stack(list(objective.drafts(batch, objective.states(batch))))
        _, logits = run_verifier(verifier, batch.tokens)
    own = logits[1, PROMPTS[1] - 1].expand(len(drafts), -1)
    torch.testing.assert_close(drafts[:, 1, 0], own, rtol=1e-4, atol=1e-5)


def test_starts_and_tables_that_cannot_be(verifier, batch):
    one = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    training = find_training("multi_head")
    with pytest.raises(UsageError, match="the recipe's drafter table: the verifier has one layer"):
        training.configure(training.recipe(), model_of(one))
    recipe = training.recipe(drafter=training.table(head_dim=4))
    other = training.loss.module(training.configure(recipe, model_of(verifier)))
    with pytest.raises(UsageError, match=r"layers\.0\.q_proj\.weight of the verifier's layers does not fit"):
        start_from_layer(other, model_of(verifier), [batch])
