"""The loss of heads equals a loop over drafts and heads, written from the papers, and heads learn from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.errors import UsageError
from redraft.export.drafters import medusa, multi_head
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import find_training
from redraft.train.objectives.multi_head import start_from_layer
from redraft.train.objectives.parallel_heads import LossWeights
from redraft.train.states import TOP_LOGITS, run_verifier
from redraft.train.verifier_model import VerifierModel
from tests.export.drafters.trunk_heads import head_logits

VOCABULARY, HIDDEN, HEADS, SCALE = 90, 16, 3, 0.7
LENGTHS, PROMPTS = (14, 9, 12), (3, 6, 5)
"""Of the texts of a batch; the shorter ones are padded, and the last drafts of each end early."""
METHODS = ("medusa", "multi_head")
WEIGHTS = {
    "default": LossWeights(),
    "soft": LossWeights(hard=0.0, step_weight=0.5),
    "hard": LossWeights(soft=0.0, step_weight=1.0),
    "all": LossWeights(0.3, 0.5, 0.2, 0.9),
}


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
    tokens = torch.randint(0, VOCABULARY, (len(LENGTHS), LENGTHS[0]), generator=torch.Generator().manual_seed(1))
    starts = [torch.arange(prompt - 1, length - 2) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(starts, batch_first=True, padding_value=-1)
    return Batch(tokens, ("a",) * len(LENGTHS), padded, torch.tensor(LENGTHS) - 1)


def some_tokens(size):
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))[:size].sort().values


def objective_of(method, verifier, weights, some):
    torch.manual_seed(0)
    heads = {"heads": HEADS} if method == "medusa" else {"draft_heads": HEADS}
    configuration_of = (medusa if method == "medusa" else multi_head).configuration_of
    config = configuration_of(verifier.config, VOCABULARY, draft_vocab_size=len(some) % VOCABULARY, **heads)
    loss = find_training(method).loss
    objective = loss(verifier, replace(config, logit_scale=SCALE), weights, DraftColumns(some, VOCABULARY))
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


def loop(method, objective, batch, weights, some):
    """The sum over heads k of step^k times the mean loss of head k, and every head's hits by start."""
    hidden, logits = run_verifier(objective.verifier, batch.tokens, ("last", "1"))
    matrix = objective.verifier.get_output_embeddings().weight[some]
    total, hits = torch.zeros(()), []
    for k in range(HEADS):
        losses, right = [], []
        for row, end in enumerate(batch.ends.tolist()):
            for start in [start for start in batch.starts[row].tolist() if 0 <= start < end - 1 - k]:
                found = torch.full((VOCABULARY,), float("-inf"))
                seen = {name: states[row, : start + 1] for name, states in hidden.items()}
                found[some] = logits_of(method, objective, seen, k, matrix)
                log_probs = found.log_softmax(-1).masked_fill(found == float("-inf"), 0.0)
                place = start + k + 1
                shares, best = logits[row, place].softmax(-1), logits[row, place].argsort(descending=True)
                wanted = torch.zeros(VOCABULARY)
                wanted[best[:TOP_LOGITS]] = weights.soft * shares[best[:TOP_LOGITS]]
                wanted[best[0]] += weights.greedy
                wanted[batch.tokens[row, place + 1]] += weights.hard
                losses.append(-(wanted * log_probs).sum())
                right.append(bool(found.argmax() == best[0]))
        total = total + weights.step_weight ** (k + 1) * torch.stack(losses).mean()
        hits.append(sum(right) / len(right))
    return total, hits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "size"), [("default", VOCABULARY), ("soft", 70), ("hard", VOCABULARY), ("all", 70)])
def test_the_loss_and_its_gradient_equal_a_loop_over_drafts_and_heads(verifier, batch, method, name, size):
    """Head k of a draft that starts at s predicts the token at s + 1 + k from the states up to s."""
    some, weights = some_tokens(size), WEIGHTS[name]
    objective = objective_of(method, verifier, weights, some)
    loss, metrics = objective.loss(batch)
    loss.backward()
    found = {name: parameter.grad for name, parameter in objective.named_parameters()}
    assert {name for name, gradient in found.items() if gradient is None} <= {"norm.weight"}
    objective.zero_grad()
    expected, hits = loop(method, objective, batch, weights, some)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert [metrics[f"hit {head}"] for head in range(1, HEADS + 1)] == pytest.approx(hits)
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_norm_is_the_verifiers(verifier):
    objective = objective_of("multi_head", verifier, LossWeights(), some_tokens(VOCABULARY))
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
    recipe = training.recipe()
    config = training.configure(recipe, model_of(verifier))
    objective = training.objective(verifier, config, recipe, DraftColumns.whole(VOCABULARY), False)
    for start in training.starts.values():
        start(objective.drafter, model_of(verifier), [batch])
    with torch.no_grad():
        drafts = torch.stack(list(objective.drafts(batch, objective.states(batch))))
        _, logits = run_verifier(verifier, batch.tokens)
    own = logits[1, PROMPTS[1] - 1].expand(len(drafts), -1)
    torch.testing.assert_close(drafts[:, 1, 0], own, rtol=1e-4, atol=1e-5)
    assert len(drafts) == objective.lookahead == training.lookahead(config, recipe.drafter)


def test_starts_and_tables_that_cannot_be(verifier, batch):
    one = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    training = find_training("multi_head")
    with pytest.raises(UsageError, match="the recipe's drafter table: the verifier has one layer"):
        training.configure(training.recipe(), model_of(one))
    with pytest.raises(UsageError, match="the recipe's drafter table: draft_heads must be a number from 1 to 16"):
        training.configure(training.recipe(drafter=training.table(draft_heads=17)), model_of(verifier))
    recipe = training.recipe(drafter=training.table(intermediate_size=8))
    narrow = training.drafter(training.configure(recipe, model_of(verifier)))
    with pytest.raises(UsageError, match=r"layers\.0\.gate_proj\.weight of the verifier's last layer does not fit"):
        start_from_layer(narrow, model_of(verifier), [batch])


@pytest.mark.parametrize("method", METHODS)
def test_heads_learn(verifier, method):
    """From their start on, on one text of the verifier."""
    with torch.no_grad():
        tokens = verifier.generate(torch.tensor([[3, 4]]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    batch, training = Batch.whole(tokens, ("a",), 4), find_training(method)
    recipe = training.recipe(drafter=training.table(soft=0.0))
    config = training.configure(recipe, model_of(verifier))
    objective = training.objective(verifier, config, recipe, DraftColumns.whole(VOCABULARY), False)
    for start in training.starts.values():
        start(objective.drafter, model_of(verifier), [batch])
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer, found = torch.optim.Adam(trained, lr=0.03), []
    for _ in range(40):
        optimizer.zero_grad()
        loss, metrics = objective.loss(batch)
        loss.backward()
        optimizer.step()
        found.append((loss.item(), metrics["hit 3"]))
    assert found[-1][0] < 0.5 * found[0][0]
    assert found[-1][1] >= found[0][1]


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
        find_training("medusa").table(**values)
