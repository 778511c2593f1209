"""Distillation: a student of all layers has nothing to learn, and the loss equals a loop over positions."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft.errors import UnsupportedModelError
from redraft.export.drafters.decoder_drafter import DraftModel, configuration_of
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives.decoder import default_layers, start_from_layers, with_embedding_and_head
from redraft.train.objectives.decoder_drafter import DEPTHS, DraftModelObjective, StudentTable
from redraft.train.states import TOP_LOGITS, run_verifier
from redraft.train.verifier_model import VerifierModel
from tests.export.models import config_of

from .by_hand import check_loss, some_tokens, texts, token_loss

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


def student_of(verifier, layers, table=StudentTable(), vocabulary=None):
    size = 0 if vocabulary is None else len(vocabulary)
    config = configuration_of(verifier.config, verifier.vocab_size, layers, size)
    objective = DraftModelObjective(verifier.model, config, table, vocabulary)
    start_from_layers(objective.drafter, verifier, ())
    return objective


def two_texts(vocabulary=97):
    """The second ends early. Positions before PROMPT are the prompt's, but for its last one."""
    return texts(vocabulary, (11, END), (PROMPT + 1, PROMPT + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_equal_the_verifiers_and_both_together_are_a_model_of_transformers(kind):
    verifier = model_of(kind)
    objective = student_of(verifier, (0, 2))
    own, theirs = objective.drafter.state_dict(), verifier.model.state_dict()
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name.replace("layers.1.", "layers.2.")])
    assert any(".layers.1." in name for name in own)
    whole = with_embedding_and_head(objective.drafter, verifier)
    batch = Batch.whole(two_texts().tokens, ("a", "a"), DEPTHS)
    with torch.no_grad():
        expected = whole(batch.tokens).logits
    for depth, logits in enumerate(objective.drafts(batch, objective.states(batch)), 1):
        assert torch.allclose(logits, expected[:, depth : logits.shape[1] + depth], atol=1e-4)
    assert whole.config.tie_word_embeddings == verifier.model.config.tie_word_embeddings


@pytest.mark.parametrize("size", [97, 80])
def test_the_loss_and_its_gradient_equal_a_loop_over_positions(size):
    """Positions of a prompt count less, those after a text's end do not, tokens outside the vocabulary never."""
    verifier, some = model_of("llama"), some_tokens(97, size)
    table = StudentTable(kl=0.7, hard=0.3, greedy=0.4, features=0.2, prompt=0.25)
    objective, batch = student_of(verifier, (0, 2), table, DraftColumns(some, 97)), two_texts()
    head, total, counted = verifier.model.get_output_embeddings().weight[some], 0.0, 0.0
    means = dict.fromkeys(("mse", "kl", "hit"), 0.0)
    states, logits = run_verifier(verifier.model, batch.tokens)
    hidden = objective.drafter(verifier.model.get_input_embeddings()(batch.tokens))
    for row, end in enumerate(batch.ends.tolist()):
        for place in range(end):
            weight, own, true = 0.25 if place < PROMPT else 1.0, head @ hidden[row, place], logits[row, place]
            ce = token_loss(own, true, batch.tokens[row, place + 1], some, table.kl, table.hard, table.greedy)
            error = (hidden[row, place] - states["last"][row, place]).square().mean()
            total = total + weight * (ce + table.features * error)
            kept = torch.isin(some, true.topk(TOP_LOGITS).indices)
            p = true[some][kept].softmax(-1)  # of the kept tokens that it drafts, against its distribution over all
            kl = (p * (p.log() - own.log_softmax(-1)[kept])).sum()
            for name, value in zip(means, (error, kl, some[own.argmax()] == true.argmax()), strict=True):
                means[name] += weight * float(value)
            counted += weight
    loss, metrics = objective.loss(batch)
    check_loss(objective, loss, total / counted)
    assert {name: metrics[name] * counted for name in means} == pytest.approx(means, rel=1e-5)
    assert all(parameter.grad is None for parameter in verifier.model.parameters())


def test_cross_entropy_of_plain_text_needs_no_verifier(monkeypatch):
    """A document's last position has no known next token."""
    verifier = model_of("llama")
    objective = student_of(verifier, (0, 2), StudentTable(kl=0.0, hard=1.0))
    monkeypatch.setattr(objective, "states", None)
    batch = Batch.whole(torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1)), ("a", "a"), DEPTHS)
    with torch.no_grad():
        hidden = objective.drafter(verifier.model.get_input_embeddings()(batch.tokens))
        logits = verifier.model.get_output_embeddings()(hidden)
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
    loss, metrics = objective.loss(batch)
    assert loss.item() == pytest.approx(expected.item() * 8 / 9, rel=1e-5)
    assert metrics == {"ce": pytest.approx(loss.item(), rel=1e-5)}


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
