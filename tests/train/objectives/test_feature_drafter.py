"""The losses of drafters that predict features equal a loop over single drafts, and GRIFFIN's masks their equations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from redraft.errors import UsageError
from redraft.export.drafters.feature_drafter import FeatureConfig
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import METHODS, find_training
from redraft.train.objectives.feature_drafter import MEASURED, FeatureObjective, FeatureTable
from redraft.train.states import run_verifier
from redraft.train.trained_drafter import TrainedDrafter

from .by_hand import ExplicitAttention, check_loss, some_tokens, texts, token_loss

FAMILY = [name for name in METHODS if find_training(name).config is FeatureConfig]
PASSES, VOCABULARY = 3, 400
NORMED = {"fusion": "attention", "outputs": "normed"}


def config(**changes):
    sizes = dict(hidden_size=32, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=8)
    return FeatureConfig(**(sizes | changes))


@pytest.fixture
def batch():
    """The tokens are of every draft vocabulary that tests have."""
    return texts(VOCABULARY, (20, 15, 18), (3, 2, 5), some_tokens(VOCABULARY, 150))


def objective_of(verifier, table, size=VOCABULARY, **form):
    torch.manual_seed(0)
    vocabulary = DraftColumns(some_tokens(VOCABULARY, size), VOCABULARY)
    objective = FeatureObjective(verifier.model, config(draft_vocab_size=size % VOCABULARY, **form), table, vocabulary)
    for parameter in objective.drafter.parameters():  # no zeros or ones, so that every path counts
        torch.nn.init.normal_(parameter, std=0.2)
    return objective


def one_draft(objective, hidden, tokens, start, passes):
    """The outputs of the passes of one draft, computed like decoding: one row after the other."""
    drafter, embed = objective.drafter, objective.verifier.get_input_embeddings()
    features = torch.cat([hidden[name] for name in drafter.config.hidden_states], -1)
    attend, found = ExplicitAttention(drafter.config), []
    for place in range(start + 1):
        rows = drafter.inputs(features[None, place, None])
        predicted = drafter(rows, embed(tokens[None, place + 1, None]), torch.tensor([place]), attend)
    for step in range(passes):
        found.append(predicted)
        if step + 1 < passes:
            place = start + step + 1
            predicted = drafter(predicted.feature, embed(tokens[None, place + 1, None]), torch.tensor([place]), attend)
    return [(one.token[0, 0], one.feature[0, 0]) for one in found]


def loop(objective, batch):
    """Return the weighted mean of the passes that count a token, and by pass the drafts that counted before and now."""
    table, some = objective.table, objective.vocabulary.tokens
    names = {*objective.drafter.config.hidden_states, "last"}
    hidden, logits = run_verifier(objective.verifier, batch.tokens, tuple(names))
    own = objective.drafter.head
    head = objective.verifier.get_output_embeddings().weight[some] if own is None else own.weight
    sums, totals = torch.zeros(table.passes), torch.zeros(table.passes)
    seen, counted = [0] * table.passes, [0] * table.passes
    distances = {"smooth_l1": F.smooth_l1_loss, "l1": F.l1_loss, "none": lambda a, b: torch.zeros(())}
    for row, end in enumerate(batch.ends.tolist()):
        states, tokens = {name: state[row] for name, state in hidden.items()}, batch.tokens[row]
        starts = [start for start in batch.starts[row].tolist() if start >= 0]
        drafts = {
            start: one_draft(objective, states, tokens, start, min(table.passes, end - 1 - start)) for start in starts
        }

        def is_aligned(start, step, drafts=drafts, tokens=tokens):
            """True if the draft from `start` has the text's token among the likeliest of this pass, from 0."""
            found = (head @ drafts[start][step][0]).topk(table.aligned).indices if table.aligned else None
            return found is None or int(tokens[start + step + 2]) in some[found]

        for start in starts:
            for step, (token, feature) in enumerate(drafts[start]):
                place = start + step + 1
                found, truth = head @ token, int(tokens[place + 1])
                aligned = is_aligned(start, step)
                if table.masks == "earlier" and step and not (start + 1 in drafts and is_aligned(start + 1, step - 1)):
                    break  # the same token, one pass before
                seen[step] += 1
                if table.masks == "printed" and not aligned:
                    break  # the rest of the draft is masked too
                counted[step] += aligned
                weights = (table.soft, table.hard, table.greedy, table.top, table.top_weight)
                loss = token_loss(found, logits[row, place], truth, some, *weights)
                sums[step] = (
                    sums[step] + loss + table.features * distances[table.feature_loss](feature, states["last"][place])
                )
                totals[step] += 1
    passes = [step for step in range(table.passes) if totals[step]]
    weights = [table.step_weight**step for step in passes]
    means = [sums[step] / totals[step] for step in passes]
    return sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights), seen, counted


MASKS = dict(step_weight=0.5, feature_loss="l1", hard=0.1, aligned=120)


@pytest.mark.parametrize(
    ("size", "loss", "form"),
    [
        (VOCABULARY, dict(step_weight=0.7, features=0.5, soft=0.3), {}),
        (
            150,
            dict(feature_loss="l1", hard=0.4, greedy=0.2, top=5, top_weight=0.6),
            {"fusion": "gated_fused", "outputs": "doubled"},
        ),
        (VOCABULARY, MASKS, {"fusion": "token_guided", "outputs": "doubled", "input_norm": False}),
        (150, MASKS, {"outputs": "normed_back"}),
        (150, MASKS | {"masks": "earlier"}, {"fusion": "token_guided", "outputs": "doubled"}),
        (
            VOCABULARY,
            dict(soft=1.0),
            {"fusion": "attention", "outputs": "normed_back", "hidden_states": ("last", "0"), "feature_norms": True},
        ),
        (
            150,
            dict(step_weight=0.8, feature_loss="none", soft=1.0),
            NORMED | {"hidden_states": ("last", "0", "1"), "own_head": True},
        ),
    ],
)
def test_the_loss_and_its_gradient_equal_a_loop_over_drafts_and_passes(verifier, batch, size, loss, form):
    """Drafts see no other draft's rows, and no feature after their start. Two texts are padded; drafts end early."""
    objective = objective_of(verifier, FeatureTable(passes=PASSES, **loss), size, **form)
    found, metrics = objective.loss(batch)
    expected, seen, counted = loop(objective, batch)
    check_loss(objective, found, expected)
    if "aligned" not in loss:
        return
    shares = [now / max(before, 1) for now, before in zip(counted, seen, strict=True)]
    assert [metrics[f"aligned {step}"] for step in (1, 2, 3)] == pytest.approx(shares, abs=1e-6)
    assert 0 < counted[1] < seen[1] < seen[0]
    assert counted[0] < seen[0]


def test_training_that_grows_has_a_pass_more_in_each_part_of_the_steps(verifier, batch):
    """One pass without masks and without the likeliest tokens' weight, then two, then three."""
    table = FeatureTable(passes=3, growing=True, aligned=20, masks="earlier", top=5, top_weight=0.5)
    assert [table.passes_at(step, 10) for step in range(10)] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    objective = objective_of(verifier, table)
    states, found = objective.states(batch), []
    for step in (0, 4, 7):
        assert not objective.prepare(step, 10)
        found.append(objective.losses(batch, states)[0].tolist())
    assert [len(losses) for losses in found] == [1, 2, 3]
    (alone,) = objective_of(verifier, FeatureTable()).losses(batch, states)[0].tolist()
    assert found[0][0] == pytest.approx(alone)
    whole = objective_of(verifier, replace(table, growing=False)).losses(batch, states)[0].tolist()
    assert found[2] == pytest.approx(whole)
    assert found[0][0] < found[1][0] == pytest.approx(whole[0])


def test_another_number_of_steps_changes_the_course_of_training_that_grows():
    recipe = find_training("griffin").recipe.load("features-tiny")
    longer = replace(recipe, steps=2 * recipe.steps)
    early = recipe.steps // 3 + 1
    assert recipe.course(early) != longer.course(early)
    fixed = [find_training("hass").recipe.load("features-tiny").with_options(steps, None) for steps in (160, 320)]
    assert fixed[0].course(20) == fixed[1].course(20)


def test_a_head_of_its_own_begins_as_the_verifiers_and_learns(verifier, batch):
    method = find_training("eagle3")
    for table, own in ((method.recipe().drafter, True), (replace(method.recipe().drafter, head="verifier"), False)):
        shape = replace(method.configuration(replace(table, draft_vocabulary=150), verifier))
        assert shape.own_head is own
        vocabulary = DraftColumns(some_tokens(VOCABULARY, 150), VOCABULARY)
        objective = FeatureObjective(verifier.model, shape, replace(table, init="features"), vocabulary)
        rows = verifier.model.get_output_embeddings().weight[vocabulary.tokens]
        assert torch.equal(objective.head, rows)
        assert (objective.drafter.head is not None) is own
        if own:
            objective.loss(batch)[0].backward()
            assert objective.drafter.head.weight.grad.abs().sum() > 0


def test_detached_passes_send_no_gradient_to_the_pass_before(verifier, batch):
    """So the gradient is another one than that of all passes together."""
    gradients = []
    for detach in (False, True):
        objective = objective_of(verifier, FeatureTable(passes=PASSES, detach=detach, soft=1.0))
        objective.loss(batch)[0].backward()
        gradients.append(objective.drafter.fusion.projection.weight.grad.clone())
    assert not torch.allclose(gradients[0], gradients[1], rtol=1e-2)


def test_noise_moves_training_and_not_measurement(verifier, batch):
    objective = objective_of(verifier, FeatureTable(noise=0.5))
    states = objective.states(batch)
    with torch.no_grad():
        first, second = (objective.losses(batch, states)[0].item() for _ in range(2))
        drafts = [torch.stack(list(objective.drafts(batch, states))) for _ in range(2)]
    assert first != second
    quiet, silent = (
        objective_of(verifier, FeatureTable(noise=noise)).losses(batch, states)[0].item() for noise in (1e-3, 0.0)
    )
    assert quiet == pytest.approx(silent, rel=1e-2)
    assert torch.equal(*drafts)
    assert len(drafts[0]) == MEASURED


def test_a_text_without_an_aligned_token_has_no_loss(verifier, batch):
    objective = objective_of(verifier, FeatureTable(passes=PASSES, feature_loss="l1", aligned=1))
    with torch.no_grad():
        for parameter in objective.drafter.parameters():
            parameter.fill_(0.1)
        objective.drafter.fusion.projection.weight.zero_()
    best = objective.verifier.get_output_embeddings().weight.sum(-1).argmax()  # what it drafts at every position
    loss, metrics = objective.loss(replace(batch, tokens=torch.where(batch.tokens == best, 0, batch.tokens)))
    assert metrics["aligned 1"] == 0.0
    assert loss.item() == 0.0
    assert not loss.requires_grad  # the loop skips the batch


@pytest.mark.parametrize("name", [*FAMILY, "normed states"])
def test_the_start_is_a_linear_prediction(verifier, name):
    """It is the ridge regression of the next feature, or of the one before the final norm, whatever the other parts.

    It reads hidden states as the drafter does, also if they have norms before their product.
    """
    method = find_training(name if name in FAMILY else "eagle3")
    shape = method.configure(method.recipe(), verifier)
    if name not in FAMILY:
        shape = replace(shape, joint_norm=True)
    torch.manual_seed(0)
    drafter = method.loss.module(shape)
    tokens = torch.randint(0, VOCABULARY, (8, 60), generator=torch.Generator().manual_seed(4))
    method.starts["features"](drafter, verifier, [Batch.whole(tokens, ("a",) * 8, MEASURED)] * 30)
    target = "last" if drafter.norm is None else str(verifier.layers - 1)
    states = drafter.config.hidden_states
    with torch.no_grad():
        hidden, _ = run_verifier(verifier.model, tokens, tuple({*states, target, "last"}))
        rows = torch.cat([hidden[state] for state in states], -1)[:, :-1]
        embeddings = verifier.model.get_input_embeddings()(tokens[:, 1:])
        known = drafter.normed(rows)
        inputs = (known if drafter.features else torch.cat([known, embeddings], -1)).flatten(0, 1)
        wanted = hidden[target][:, 1:].flatten(0, 1)
        squares = inputs.mT @ inputs
        squares.diagonal().add_(1e-3 * squares.diagonal().mean())
        expected = inputs @ torch.linalg.solve(squares, inputs.mT @ wanted)
        predicted = drafter(drafter.inputs(rows), embeddings, torch.arange(59), lambda q, k, v: q)
        torch.testing.assert_close(predicted.feature.flatten(0, 1), expected, rtol=1e-3, atol=1e-3)
        if drafter.norm is None:
            torch.testing.assert_close(predicted.token, predicted.feature)
        else:
            norm = verifier.model.get_decoder().norm
            torch.testing.assert_close(predicted.token, norm(predicted.feature), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("shared", ["features", "features-tiny", "features-smollm2"])
def test_a_shared_recipe_leaves_each_method_its_own_loss(name, shared):
    method = find_training(name)
    found, own = method.recipe.load(shared), method.recipe()
    assert found.method == name
    assert replace(found.drafter, init=own.drafter.init, draft_vocabulary=0) == own.drafter
    losses = {other: find_training(other).recipe().drafter for other in FAMILY}
    assert sum(table == own.drafter for table in losses.values()) <= 2  # EAGLE's and FSPAD's are the same


@pytest.mark.parametrize(("before", "size"), [(150, 120), (150, 150), (0, 0)])
def test_a_head_of_its_own_begins_with_that_of_another_drafter_only_if_it_has_all_tokens(verifier, before, size):
    training = find_training("eagle3")
    shapes = [training.configuration(training.table(draft_vocabulary=one), verifier) for one in (before, size)]
    old, new = (training.loss.module(shape) for shape in shapes)
    own = new.head.weight.clone()
    TrainedDrafter(Path("old"), training, shapes[0], old, verifier.identity).begin(new, verifier, [])
    assert torch.equal(new.head.weight, own if before else old.head.weight)
    assert torch.equal(new.features.weight, old.features.weight)


def test_a_loss_of_features_needs_a_feature_with_the_norm(verifier):
    with pytest.raises(UsageError, match="cannot learn the verifier's normed feature"):
        objective_of(verifier, FeatureTable(), **NORMED)
    objective_of(verifier, FeatureTable(feature_loss="none"), **NORMED)
