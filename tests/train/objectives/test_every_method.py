"""What the loss of every method must do, whatever it is."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch

from redraft.errors import UsageError
from redraft.export.drafters.decoder_drafter import DraftModelConfig
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import METHODS, find_training

from .by_hand import texts

STEPS = 20
DISTANCES = ("features", "mse", "kl")
QUIET = {"noise": 0.0, "aligned": 0, "hard": 0.0}
"""Settings of some tables. With others, a drafter need not come nearer to its verifier at every step."""


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_learns_alone_from_kept_states(verifier, name, monkeypatch):
    """From random weights, it comes nearer to the verifier, whose states are computed once."""
    training = find_training(name)
    recipe = training.recipe()
    quiet = {field: value for field, value in QUIET.items() if hasattr(recipe.drafter, field)}
    if "hard" in quiet and hasattr(recipe.drafter, "soft"):
        quiet["soft"] = recipe.drafter.soft or 1.0  # some methods learn from the text's token alone
    torch.manual_seed(0)
    config, columns = training.configure(recipe, verifier), DraftColumns.whole(verifier.vocab_size)
    objective = training.loss(verifier.model, config, replace(recipe.drafter, **quiet), columns)
    trained = [parameter for _, parameter in objective.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.2 * torch.randn_like(parameter))
    batch = texts(verifier.vocab_size, (24, 18, 20), (4, 6, 1))
    states = objective.states(batch)
    drafts = list(objective.drafts(batch, states))
    assert len(drafts) == objective.lookahead
    assert all(one.shape == (*batch.starts.shape, verifier.vocab_size) for one in drafts)
    torch.manual_seed(1)  # of the offsets of some methods
    computed = objective.loss(batch)[1]
    torch.manual_seed(1)
    monkeypatch.setattr(verifier.model, "forward", None)
    kept = replace(batch, states=states)
    log_probs = (states.top_logits - states.log_sum[..., None])[torch.arange(24) < batch.ends[:, None]]
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean().item()  # the least cross-entropy
    optimizer, found = torch.optim.Adam(trained, lr=1e-2), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, metrics = objective.loss(kept)
        loss.backward()
        optimizer.step()
        found.append(metrics)
    assert found[0] == pytest.approx(computed, rel=1e-4)
    first, last = (
        next((one[distance] for distance in DISTANCES if one.get(distance)), one["ce"] - entropy)
        for one in (found[0], found[-1])
    )
    assert last < 0.7 * first
    assert all(parameter.grad is not None for parameter in trained)
    assert not any(parameter.requires_grad for parameter in verifier.model.parameters())
    assert all(name.startswith("drafter.") for name in objective.state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_drafters_read_embeddings_that_the_verifier_does_not_scale(verifier, name, monkeypatch):
    """Gemma scales them in its module, and engines read the matrix. Draft models are of its kind, and scale too."""
    training = find_training(name)
    recipe, columns = training.recipe(), DraftColumns.whole(verifier.vocab_size)
    config = training.configure(recipe, verifier)
    objective = training.loss(verifier.model, config, recipe.drafter, columns)
    batch = texts(verifier.vocab_size, (24, 18), (4, 6))
    states = objective.states(batch)
    plain = torch.stack(list(objective.drafts(batch, states)))
    embedding = verifier.model.get_input_embeddings()
    monkeypatch.setattr(embedding, "forward", lambda tokens: 7 * embedding.weight[tokens])
    scaled = torch.stack(list(objective.drafts(batch, states)))
    assert torch.equal(plain, scaled) != isinstance(config, DraftModelConfig)


NO_WEIGHTS = r"drafter\.soft, hard and greedy must be 0 or more"
NO_FEATURES = r"drafter\.features, soft, hard, greedy, top_weight and noise must be 0 or more"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("medusa", {"soft": 0.0, "hard": 0.0}, NO_WEIGHTS),
        ("medusa", {"soft": -1.0}, NO_WEIGHTS),
        ("medusa", {"greedy": nan}, NO_WEIGHTS),
        ("medusa", {"step_weight": 0.0}, NO_WEIGHTS),
        ("medusa", {"step_weight": inf}, NO_WEIGHTS),
        ("eagle", {"passes": 0}, "drafter.passes must be a number from 1 to 16, not 0"),
        ("eagle", {"passes": 17}, "drafter.passes must be a number from 1 to 16, not 17"),
        ("eagle", {"soft": -1.0}, NO_FEATURES),
        ("eagle", {"noise": nan}, NO_FEATURES),
        ("eagle", {"noise": inf}, NO_FEATURES),
        ("eagle", {"step_weight": 0.0}, NO_FEATURES),
        ("eagle", {"aligned": -1}, "drafter.top, aligned and fusion_size must be 0 or more"),
        ("eagle", {"top": 65}, "top at most 64"),
        ("eagle", {"soft": 0.0}, "drafter: no loss of tokens"),
        ("eagle", {"soft": 0.0, "top": 5}, "drafter: no loss of tokens"),
        ("draft_model", {"kl": 0.0}, "one of the first four positive"),
        ("draft_model", {"kl": -1.0}, "one of the first four positive"),
        ("steered", {"prompt": -0.1}, "one of the first four positive"),
        ("steered", {"draft_length": 0}, "drafter.draft_length must be a number from 1 to 24, not 0"),
        ("steered", {"draft_length": 25}, "drafter.draft_length must be a number from 1 to 24, not 25"),
    ],
)
def test_impossible_tables_are_refused(name, values, message):
    with pytest.raises(UsageError, match=message):
        find_training(name).table(**values)


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        (
            "draft_model",
            dict(layers=(0, 4)),
            r"layers must be numbers from 0 to 3, .* not \[0, 4\]",
        ),
        ("draft_model", dict(layers=(2, 1)), "layers must be one or more numbers in ascending order"),
        ("draft_model", dict(draft_vocabulary=401), "draft_vocab_size must be from 0 to 400, the vocabulary, not 401"),
        ("steered", dict(hidden_states=("4",)), "unknown hidden state '4'"),
        ("steered", dict(hidden_states=("1", "1")), "hidden_states must be different names"),
        ("multi_head", dict(draft_heads=17), "draft_heads must be a number from 1 to 16"),
    ],
)
def test_a_table_that_the_verifier_cannot_fill_is_refused_in_one_line(verifier, name, table, message):
    training = find_training(name)
    with pytest.raises(UsageError, match=f"the recipe's drafter table: {message}") as caught:
        training.configure(training.recipe(drafter=training.table(**table)), verifier)
    assert "\n" not in str(caught.value)
