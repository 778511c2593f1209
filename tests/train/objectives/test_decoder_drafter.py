"""Distillation: a student of all layers has nothing to learn, and the loss equals a loop over positions."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft.errors import UnsupportedModelError, UsageError
from redraft.export.drafters.decoder_drafter import DraftModel, configuration_of
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import find_training
from redraft.train.objectives.decoder import StudentTable, default_layers, start_from_layers, with_embedding_and_head
from redraft.train.objectives.decoder_drafter import DEPTHS, DraftModelObjective, LossWeights
from redraft.train.states import TOP_LOGITS, run_verifier
from redraft.train.verifier_model import VerifierModel, open_verifier
from tests.export.models import config_of

KINDS = {
    "llama": {},
    "qwen2": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": None},
    "gemma3_text": {"sliding_window": 4, "sliding_window_pattern": 2, "num_hidden_layers": 4},
    "granite": {"logits_scaling": 2.0},
}
PROMPT, END = 3, 8


def model_of(kind, **changes):
    """A model whose layers all matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, **KINDS.get(kind, {}) | changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() == 1 else 2.0 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    return VerifierModel(None, model.eval(), None, None)


def student_of(verifier, layers, weights=LossWeights(), vocabulary=None):
    size = 0 if vocabulary is None else len(vocabulary)
    config = configuration_of(verifier.config, verifier.vocab_size, layers, size)
    objective = DraftModelObjective(verifier.model, config, weights, vocabulary)
    start_from_layers(objective.drafter, verifier, ())
    return objective


def texts(vocabulary=97):
    """Two texts of 11 and 8 tokens, with prompts of 4."""
    tokens = torch.randint(0, vocabulary, (2, 11), generator=torch.Generator().manual_seed(1))
    tokens[1, END:] = 0
    starts = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6, -1, -1, -1]])
    return Batch(tokens, ("a", "a"), starts, torch.tensor([10, 7]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_of_all_layers_has_no_divergence_at_its_start(kind):
    verifier = model_of(kind, vocab_size=TOP_LOGITS)  # all logits are kept, so the gradient vanishes too
    objective = student_of(verifier, tuple(range(verifier.layers)))
    loss, metrics = objective.loss(texts(TOP_LOGITS))
    assert abs(metrics["kl"]) < 1e-5
    assert metrics["mse"] < 1e-8
    assert metrics["hit"] == pytest.approx(1)
    loss.backward()
    assert all(parameter.grad.abs().max() < 1e-3 for _, parameter in objective.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_equal_the_verifiers_and_both_together_are_a_model_of_transformers(kind):
    verifier = model_of(kind)
    objective = student_of(verifier, (0, 2))
    own, theirs = objective.drafter.state_dict(), verifier.model.state_dict()
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name.replace("layers.1.", "layers.2.")])
    assert any(".layers.1." in name for name in own)
    whole, tokens = with_embedding_and_head(objective.drafter, verifier), texts().tokens
    states = objective.states(Batch.whole(tokens, ("a", "a"), DEPTHS))
    depths = list(objective.drafts(Batch.whole(tokens, ("a", "a"), DEPTHS), states))
    with torch.no_grad():
        expected = whole(tokens).logits
    for depth, logits in enumerate(depths, 1):
        assert torch.allclose(logits, expected[:, depth : logits.shape[1] + depth], atol=1e-4)
    assert whole.config.tie_word_embeddings == verifier.model.config.tie_word_embeddings


@pytest.mark.parametrize("size", [97, 80])
def test_loss_equals_a_loop_over_positions(size):
    """Positions of a prompt count less, those after a text's end do not, tokens outside the vocabulary never."""
    verifier = model_of("llama")
    some = torch.randperm(97, generator=torch.Generator().manual_seed(2))[:size].sort().values
    columns = None if size == 97 else DraftColumns(some, 97)
    weights = LossWeights(kl=0.7, hard=0.3, greedy=0.4, features=0.2, prompt=0.25)
    objective, batch = student_of(verifier, (0, 2), weights, columns), texts()
    head = verifier.model.get_output_embeddings().weight
    inside = torch.zeros(97).index_fill_(0, some, 1.0)
    total = kl = counted = 0.0
    with torch.no_grad():
        features, logits = run_verifier(verifier.model, batch.tokens)
        hidden = objective.drafter(verifier.model.get_input_embeddings()(batch.tokens))
        for row, end in enumerate(batch.ends.tolist()):
            for place in range(end):
                weight = 0.25 if place < PROMPT else 1.0
                log_probs = torch.zeros(97)
                log_probs[some] = (head[some] @ hidden[row, place]).log_softmax(-1)
                true, best = logits[row, place].log_softmax(-1), logits[row, place].argmax()
                shares = true.exp() * inside
                shares[logits[row, place].argsort(descending=True)[TOP_LOGITS:]] = 0.0
                error = (hidden[row, place] - features["last"][row, place]).square().mean()
                ce = -(shares * log_probs).sum()
                next_token = batch.tokens[row, place + 1]
                own = 0.3 * (log_probs * inside)[next_token]
                total += weight * (0.7 * ce - 0.4 * (log_probs * inside)[best] + 0.2 * error - own)
                kept = logits[row, place].topk(TOP_LOGITS).indices
                p = shares[kept] / shares[kept].sum()
                kl += weight * (p * (p / log_probs[kept].exp()).log()).nansum()
                counted += weight
    loss, metrics = objective.loss(batch)
    assert loss.item() == pytest.approx((total / counted).item(), rel=1e-5)
    assert metrics["kl"] == pytest.approx((kl / counted).item(), rel=1e-5)
    loss.backward()  # every parameter learns; none of the verifier's does
    assert all(parameter.grad.abs().max() > 0 for _, parameter in objective.named_parameters())
    assert all(parameter.grad is None for parameter in verifier.model.parameters())


def test_cross_entropy_of_plain_text_needs_no_verifier(monkeypatch):
    """A document's last position has no known next token."""
    verifier = model_of("llama")
    objective = student_of(verifier, (0, 2), LossWeights(kl=0.0, hard=1.0))
    monkeypatch.setattr(objective, "states", None)
    batch = Batch.whole(torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1)), ("a", "a"), DEPTHS)
    with torch.no_grad():
        hidden = objective.drafter(verifier.model.get_input_embeddings()(batch.tokens))
        logits = verifier.model.get_output_embeddings()(hidden)
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
    loss, metrics = objective.loss(batch)
    assert loss.item() == pytest.approx(expected.item() * 8 / 9, rel=1e-5)
    assert metrics == {"ce": pytest.approx(loss.item(), rel=1e-5)}


def test_tokens_after_a_texts_end_change_nothing():
    objective, batch = student_of(model_of("llama"), (0, 2)), texts()
    before = objective.loss(batch)[0].item()
    batch.tokens[1, END:] = 5
    assert objective.loss(batch)[0].item() == pytest.approx(before, rel=1e-6)


def test_layers_of_two_kinds_are_refused():
    """Of this verifier's layers, the first is dense and the others have experts; position decides in a student."""
    changes = dict(mlp_only_layers=[0], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model = AutoModelForCausalLM.from_config(config_of("qwen3_moe", **changes))
    verifier = VerifierModel(None, model, None, None)
    config = configuration_of(verifier.config, 97, (1, 2))
    with pytest.raises(UnsupportedModelError, match=r"of the verifier does not fit layer layers\.0\."):
        start_from_layers(DraftModel(config), verifier, ())


def test_by_default_a_student_has_the_first_and_the_last_three_layers():
    assert default_layers(30) == (0, 27, 28, 29)
    assert default_layers(4) == (0, 1, 2, 3)
    assert default_layers(2) == (0, 1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            dict(layers=(0, 4)),
            r"drafter table: layers must be numbers from 0 to 3, those of the verifier, not \[0, 4\]",
        ),
        (dict(layers=(2, 1)), "layers must be one or more numbers in ascending order"),
        (dict(draft_vocabulary=401), "draft_vocab_size must be from 0 to 400, the vocabulary, not 401"),
    ],
)
def test_a_recipe_that_the_verifier_cannot_fill_is_refused_in_one_line(verifier_folder, table, message):
    training = find_training("draft_model")
    recipe = training.recipe(drafter=StudentTable(**table))
    with pytest.raises(UsageError, match=message) as caught:
        training.configure(recipe, open_verifier(verifier_folder, "cpu"))
    assert "\n" not in str(caught.value)


def test_weights_without_a_loss_are_refused():
    for table in (dict(kl=0.0), dict(kl=-1.0), dict(prompt=-0.1)):
        with pytest.raises(UsageError, match="one of the first four positive"):
            StudentTable(**table)
