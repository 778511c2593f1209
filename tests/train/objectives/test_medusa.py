"""Medusa's loss equals a loop over drafts and heads, written from the paper, and heads learn from it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.errors import UsageError
from redraft.export.drafters.medusa import MedusaConfig
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import find_method
from redraft.train.objectives.medusa import MedusaObjective
from redraft.train.objectives.medusa_method import MedusaTable
from redraft.train.objectives.parallel_heads import LossWeights
from redraft.train.states import TOP_LOGITS, run_verifier

VOCABULARY, HIDDEN, HEADS, SCALE = 90, 16, 3, 0.7
LENGTHS, PROMPTS = (14, 9, 12), (3, 6, 5)
"""Of the texts of a batch; the shorter ones are padded, and the last drafts of each end early."""
WEIGHTS = {
    "default": LossWeights(),
    "soft": LossWeights(hard=0.0, step=0.5),
    "hard": LossWeights(soft=0.0),
    "all": LossWeights(soft=0.3, hard=0.5, greedy=0.2),
}


@pytest.fixture(scope="module")
def verifier():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def batch():
    tokens = torch.randint(0, VOCABULARY, (len(LENGTHS), LENGTHS[0]), generator=torch.Generator().manual_seed(1))
    starts = [torch.arange(prompt - 1, length - 2) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(starts, batch_first=True, padding_value=-1)
    return Batch(tokens, ("a",) * len(LENGTHS), padded, torch.tensor(LENGTHS) - 1)


def some_tokens(size):
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))[:size].sort().values


def objective_of(verifier, weights, some):
    torch.manual_seed(0)
    size = len(some) % VOCABULARY
    config = MedusaConfig(
        hidden_size=HIDDEN, vocab_size=VOCABULARY, heads=HEADS, logit_scale=SCALE, draft_vocab_size=size
    )
    objective = MedusaObjective(verifier, config, weights, DraftColumns(some, VOCABULARY))
    for parameter in objective.drafter.parameters():  # no zeros, so that every weight counts
        torch.nn.init.normal_(parameter, std=0.2)
    return objective


def loop(objective, batch, weights, some):
    """The sum over heads k of step^k times the mean loss of head k, and every head's hits by start."""
    hidden, logits = run_verifier(objective.verifier, batch.tokens, ("last",))
    head = objective.verifier.get_output_embeddings().weight
    w, b = (
        objective.drafter.heads.weight.unflatten(0, (HEADS, -1)),
        objective.drafter.heads.bias.unflatten(0, (HEADS, -1)),
    )
    total, hits = torch.zeros(()), []
    for k in range(HEADS):
        losses, right = [], []
        for row, end in enumerate(batch.ends.tolist()):
            for start in [start for start in batch.starts[row].tolist() if 0 <= start < end - 1 - k]:
                h = hidden["last"][row, start]
                found = torch.full((VOCABULARY,), float("-inf"))
                found[some] = head[some] @ (h + F.silu(w[k] @ h + b[k])) * SCALE
                log_probs = found.log_softmax(-1).masked_fill(found == float("-inf"), 0.0)
                place = start + k + 1
                shares, best = logits[row, place].softmax(-1), logits[row, place].argsort(descending=True)
                wanted = torch.zeros(VOCABULARY)
                wanted[best[:TOP_LOGITS]] = weights.soft * shares[best[:TOP_LOGITS]]
                wanted[best[0]] += weights.greedy
                wanted[batch.tokens[row, place + 1]] += weights.hard
                losses.append(-(wanted * log_probs).sum())
                right.append(bool(found.argmax() == best[0]))
        total = total + weights.step ** (k + 1) * torch.stack(losses).mean()
        hits.append(sum(right) / len(right))
    return total, hits


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("size", [VOCABULARY, 70])
def test_the_loss_and_its_gradient_equal_a_loop_over_drafts_and_heads(verifier, batch, name, size):
    some = some_tokens(size)
    objective = objective_of(verifier, WEIGHTS[name], some)
    loss, metrics = objective.loss(batch)
    loss.backward()
    found = {name: parameter.grad for name, parameter in objective.named_parameters()}
    objective.zero_grad()
    expected, hits = loop(objective, batch, WEIGHTS[name], some)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert [metrics[f"hit {head}"] for head in range(1, HEADS + 1)] == pytest.approx(hits)
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_drafts_are_the_heads_logits_in_their_order(verifier, batch):
    """Head k is that of depth k, at every start."""
    objective = objective_of(verifier, LossWeights(), some_tokens(VOCABULARY))
    with torch.no_grad():
        states = objective.states(batch)
        drafts = torch.stack(list(objective.drafts(batch, states)))
        read = objective.drafter(states.last[1, PROMPTS[1] - 1]) * SCALE
        torch.testing.assert_close(drafts[:, 1, 0], read @ verifier.get_output_embeddings().weight.T)
    assert len(drafts) == objective.lookahead == HEADS


def test_heads_learn(verifier):
    """From the verifier's own head on, on one text of the verifier."""
    with torch.no_grad():
        tokens = verifier.generate(torch.tensor([[3, 4]]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    batch = Batch.whole(tokens, ("a",), HEADS)
    method = find_method("medusa")
    config = MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCABULARY, heads=HEADS)
    recipe = method.recipe(drafter=MedusaTable(soft=0.0))
    objective = method.objective(verifier, config, recipe, DraftColumns.whole(VOCABULARY), False)
    optimizer, found = torch.optim.Adam(objective.parameters(), lr=0.1), []
    for _ in range(60):
        optimizer.zero_grad()
        loss, metrics = objective.loss(batch)
        loss.backward()
        optimizer.step()
        found.append(metrics["hit 3"])
    assert found[-1] > found[0] + 0.3


@pytest.mark.parametrize(
    "values",
    [
        {"soft": 0.0, "hard": 0.0},
        {"soft": -1.0},
        {"greedy": float("nan")},
        {"step_weight": 0.0},
        {"step_weight": float("inf")},
    ],
)
def test_impossible_tables_are_refused(values):
    with pytest.raises(UsageError, match=r"drafter\.soft, hard and greedy must be 0 or more"):
        MedusaTable(**values)
