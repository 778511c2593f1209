"""The loss of heads on the trunk equals a loop over drafts and heads, written from the paper, and heads learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.errors import UsageError
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter, configuration_of
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import find_method
from redraft.train.objectives.multi_head import MultiHeadObjective
from redraft.train.objectives.multi_head_method import MultiHeadTable, configure, start_from_layer
from redraft.train.objectives.parallel_heads import LossWeights
from redraft.train.states import TOP_LOGITS, run_verifier
from redraft.train.verifier_model import VerifierModel
from tests.export.drafters.trunk_heads import head_logits

VOCABULARY, HIDDEN, HEADS, SCALE = 90, 16, 3, 0.7
LENGTHS, PROMPTS = (14, 9, 12), (3, 6, 5)
"""Of the texts of a batch; the shorter ones are padded, and the last drafts of each end early."""
WEIGHTS = {"paper": LossWeights(soft=0.0, step=1.0), "all": LossWeights(0.3, 0.5, 0.2, 0.9)}


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


def objective_of(verifier, weights, some):
    torch.manual_seed(0)
    config = configuration_of(verifier.config, VOCABULARY, draft_heads=HEADS, draft_vocab_size=len(some) % VOCABULARY)
    config = replace(config, logit_scale=SCALE)
    objective = MultiHeadObjective(verifier, config, weights, DraftColumns(some, VOCABULARY))
    for parameter in objective.drafter.layers.parameters():  # no zeros, so that every weight counts
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return objective


def loop(objective, batch, weights, some):
    """The sum over heads k of step^k times the mean loss of head k, and every head's hits by start."""
    hidden, logits = run_verifier(objective.verifier, batch.tokens, ("1",))
    matrix = objective.verifier.get_output_embeddings().weight[some]
    total, hits = torch.zeros(()), []
    for k in range(HEADS):
        losses, right = [], []
        for row, end in enumerate(batch.ends.tolist()):
            for start in [start for start in batch.starts[row].tolist() if 0 <= start < end - 1 - k]:
                found = torch.full((VOCABULARY,), float("-inf"))
                found[some] = head_logits(objective.drafter, k, hidden["1"][row, : start + 1], matrix)
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
def test_the_loss_equals_a_loop_over_drafts_and_heads(verifier, batch, name, size):
    """Head i of a draft that starts at s predicts the token at s + 1 + i from the trunk's states up to s."""
    some = some_tokens(size)
    objective = objective_of(verifier, WEIGHTS[name], some)
    loss, metrics = objective.loss(batch)
    with torch.no_grad():
        expected, hits = loop(objective, batch, WEIGHTS[name], some)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert [metrics[f"hit {head}"] for head in range(1, HEADS + 1)] == pytest.approx(hits)
    loss.backward()
    trained = {name for name, parameter in objective.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in objective.named_parameters()} - {"norm.weight"}


def test_the_norm_is_the_verifiers(verifier):
    objective = objective_of(verifier, LossWeights(), some_tokens(VOCABULARY))
    assert torch.equal(objective.drafter.norm.weight, verifier.model.norm.weight)
    other = LlamaForCausalLM(verifier.config)
    other.model.norm = torch.nn.Identity()
    with pytest.raises(UsageError, match="the verifier has no final norm of Llama's form, which all heads share"):
        MultiHeadObjective(other, objective.drafter.config)


def model_of(verifier):
    """The verifier as training knows it, without its folder."""
    return VerifierModel(None, verifier, None, None)


def test_heads_begin_as_the_verifiers_last_layer(verifier, batch):
    """Then each of them has the verifier's own logits."""
    method = find_method("multi_head")
    recipe = method.recipe()
    drafter = MultiHeadDrafter(configure(recipe, model_of(verifier)))
    start_from_layer(drafter, model_of(verifier), [batch])
    objective = method.objective(verifier, drafter.config, recipe, DraftColumns.whole(VOCABULARY), False)
    objective.drafter.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        states = objective.states(batch)
        drafts = torch.stack(list(objective.drafts(batch, states)))
        _, logits = run_verifier(verifier, batch.tokens)
        torch.testing.assert_close(drafts[:, 1, 0], logits[1, PROMPTS[1] - 1].expand(HEADS, -1), rtol=1e-4, atol=1e-5)
    assert len(drafts) == objective.lookahead == HEADS


def test_starts_and_tables_that_cannot_be(verifier, batch):
    one = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    recipe = find_method("multi_head").recipe
    with pytest.raises(UsageError, match="the recipe's drafter table: the verifier has one layer"):
        configure(recipe(), model_of(one))
    with pytest.raises(UsageError, match="the recipe's drafter table: draft_heads must be a number from 1 to 16"):
        configure(recipe(drafter=MultiHeadTable(draft_heads=17)), model_of(verifier))
    narrow = MultiHeadDrafter(configure(recipe(drafter=MultiHeadTable(intermediate_size=8)), model_of(verifier)))
    with pytest.raises(UsageError, match=r"layers\.0\.gate_proj\.weight of the verifier's last layer does not fit"):
        start_from_layer(narrow, model_of(verifier), [batch])
    with pytest.raises(UsageError, match=r"drafter\.soft, hard and greedy must be 0 or more"):
        MultiHeadTable(soft=0.0, hard=0.0)


def test_heads_learn(verifier):
    """From the verifier's last layer on, on one text of the verifier."""
    with torch.no_grad():
        tokens = verifier.generate(torch.tensor([[3, 4]]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    batch, method = Batch.whole(tokens, ("a",), HEADS), find_method("multi_head")
    recipe = method.recipe(drafter=MultiHeadTable(soft=0.0))
    config: MultiHeadConfig = method.configure(recipe, model_of(verifier))
    objective = method.objective(verifier, config, recipe, DraftColumns.whole(VOCABULARY), False)
    method.starts["layer"](objective.drafter, model_of(verifier), [batch])
    optimizer, found = torch.optim.Adam(objective.parameters(), lr=0.03), []
    for _ in range(40):
        optimizer.zero_grad()
        loss, metrics = objective.loss(batch)
        loss.backward()
        optimizer.step()
        found.append((loss.item(), metrics["hit 3"]))
    assert found[-1][0] < 0.5 * found[0][0]
    assert found[-1][1] >= found[0][1]
