"""The controller of draft lengths: its budgets, what it verifies, and what changes the next length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.runtime import SpeculationParams
from redraft.runtime.controllers.length import LengthController
from redraft.runtime.controllers.rules import Confidence, GammaTune, GammaTunePlus, LengthRule, Svip
from redraft.runtime.requests.batch import fit
from redraft.runtime.trees.offers import StepLimits
from redraft.types import Budget, Draws, OfferKind
from tests.runtime.drafts import chain, cut, observe, outcome, plan, planned, sequence
from tests.runtime.fakes import engine_of, greedy, make_runtime, mixing_rule, plain
from tests.runtime.sampling.laws import Proposed


def test_a_budget_has_the_rules_length_width_and_confidence() -> None:
    assert LengthController(GammaTune(gamma=4)).budget(sequence()) == Budget(4, 4, 1, 0.0)
    assert LengthController(LengthRule(3, width=2)).budget(sequence()) == Budget(6, 3, 2, 0.0)
    assert LengthController(GammaTunePlus(gamma=4, threshold=0.25)).budget(sequence()) == Budget(4, 4, 1, 0.25)


def test_a_budget_that_is_cut_keeps_its_confidence() -> None:
    assert fit(Budget(12, 4, 3, 0.5), sequence(limit=4), 100) == Budget(12, 2, 3, 0.5)


def test_only_fresh_and_looked_up_drafts_change_the_next_length() -> None:
    controller, seq, other = LengthController(GammaTune(gamma=4, eta=0.5, delta=2)), sequence(), sequence()
    tree = chain(0.9, 0.9, 0.9, 0.9)
    for kind, expected in (
        (OfferKind.RESAMPLE, 4), (OfferKind.NONE, 4), (OfferKind.FRESH, 5), (OfferKind.LOOKUP, 5),
    ):  # fmt: skip
        observe(controller, seq, plan(kind), tree, outcome(tree, 4))
        assert controller.length(seq) == expected
    observe(controller, seq, plan(OfferKind.LOOKUP), chain(), outcome(chain(), 0))  # nothing was drafted
    assert (controller.length(seq), controller.length(other)) == (5, 4)


@pytest.mark.parametrize(("limit", "rows"), [(4, 100), (99, 3)])
def test_a_draft_that_the_room_cut_short_is_no_rejection(limit: int, rows: int) -> None:
    """With three tokens to go, or three rows, a draft has two: both were accepted."""
    controller, seq = LengthController(GammaTune(gamma=6, eta=0.5, delta=2)), sequence(limit=limit)
    limits = StepLimits(fit(controller.budget(seq), seq, rows))
    assert min(limits.budget.depth, limits.budget.nodes) == 2
    taken, tree = replace(planned(controller, seq), limits=limits), chain(0.9, 0.9)
    observe(controller, seq, taken, tree, outcome(tree, 2))
    assert controller.length(seq) == 6


def test_what_follows_an_uncertain_token_is_not_verified() -> None:
    controller, seq = LengthController(Confidence(threshold=0.4)), sequence()
    taken = planned(controller, seq)
    tree = cut(controller, seq, taken, chain(0.9, 0.3, 0.9))
    assert (taken.kind, tree.tokens.tolist()) == (OfferKind.FRESH, [0, 1, 2])
    assert len(cut(controller, seq, plan(OfferKind.LOOKUP, chain(0.1, 0.1)))) == 3


def test_drawn_drafts_are_verified_whole_as_draws() -> None:
    """Their probabilities are those of ranks and say nothing of a token. Without q, fewer would be accepted."""
    tree = replace(chain(0.5, 0.5, 0.5), draws=Draws.of(Proposed(lambda text: np.array([0.5, 0.5])), 4))
    for rule in (Confidence(threshold=0.6), Svip()):
        controller, seq = LengthController(rule), sequence()
        assert cut(controller, seq, planned(controller, seq), tree) is tree


@pytest.mark.parametrize("name", ["fixed,gamma=3", "gammatune", "gammatune+", "heuristic", "confidence", "svip"])
def test_texts_do_not_depend_on_the_rule(name: str) -> None:
    runtime = make_runtime(max_num_seqs=2)
    prompts = [[97, 98, 99] * 3, [98] * 9]
    how = [SpeculationParams("ngram", controller=name), SpeculationParams("ngram")]
    found = runtime.generate(prompts, greedy(40), how)
    assert [list(one.token_ids) for one in found] == [plain(mixing_rule, prompt, 40) for prompt in prompts]
    assert found[0].metrics.num_draft_tokens > 0


def test_lengths_follow_the_text() -> None:
    """A loop of five letters accepts every draft: chains become two longer each, from 2 to 10. Then it is noise."""
    letters = [97 + n % 5 for n in range(60)] + [ord("k") + n * n % 13 for n in range(200)]
    runtime = make_runtime(lambda tokens: letters[len(tokens)], max_model_len=250)
    runtime.generate([letters[:10]], greedy(43), SpeculationParams("ngram", controller="heuristic,gamma=2"))
    sizes = [width - 1 for _, width in engine_of(runtime.verifier).sizes[1:]]
    assert sizes[:5] == [2, 4, 6, 8, 10]


def test_a_budget_limits_every_length() -> None:
    runtime = make_runtime(lambda tokens: 97)
    how = SpeculationParams("ngram", budget=Budget(3, 3, 1), controller="fixed,gamma=9")
    runtime.generate([[97] * 9], greedy(30), how)
    assert max(width for _, width in engine_of(runtime.verifier).sizes[1:]) == 4


def test_a_rule_needs_no_budget_but_fixed_without_a_length_does() -> None:
    assert SpeculationParams(controller="gammatune").rule == GammaTune()
    assert not SpeculationParams(controller="fixed,gamma=2").adapts
    with pytest.raises(UsageError, match="fixed needs a budget"):
        SpeculationParams(controller="fixed")
    with pytest.raises(UsageError, match="controller must be a text"):
        SpeculationParams(controller=3)  # type: ignore[arg-type]
