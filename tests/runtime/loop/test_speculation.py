"""Requests with speculation of their own in one batch: the text is always the model's own."""

from __future__ import annotations

import gc
import io
import random
import time
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.runtime import Budget, Runtime, SpeculationParams
from redraft.runtime.controllers.cost import CostCurve
from redraft.runtime.controllers.experience import MethodRecord
from redraft.runtime.drafters.chain_lookups import PredictionDrafter
from redraft.runtime.drafters.ngram import NgramDrafter
from redraft.runtime.loop.speculation import _MOST_CONTROLLERS
from redraft.runtime.observe.trace import replay
from redraft.runtime.requests.request import Request
from redraft.runtime.trees.offers import Offer
from tests.runtime.fakes import CURVE, VOCABULARY, engine_of, greedy, make_runtime, mixing_rule, plain, script

PROMPTS = [[97 + (i * 7 + n) % 5 for i in range(6 + 5 * n)] for n in range(9)]
WAYS = [
    "none",
    "ngram",
    SpeculationParams("ngram", budget=Budget(6, 4, 2)),
    SpeculationParams("ngram", budget=Budget(3, 3, 1), controller="adaptive"),
    SpeculationParams(prediction=plain(mixing_rule, PROMPTS[4], 30)),
    SpeculationParams("ngram", prediction=[97, 98] * 9, budget=Budget(8, 8, 2)),
    "suffix",
    SpeculationParams("suffix", prediction=plain(mixing_rule, PROMPTS[0], 30), budget=Budget(6, 4, 2)),
    None,
]


@pytest.mark.parametrize("max_num_seqs", [1, 4, 9])
def test_requests_of_several_ways_share_a_batch(max_num_seqs: int) -> None:
    """Each text is the model's own, each call verifies a whole batch, and its trace replays."""
    runtime, trace = make_runtime(max_num_seqs=max_num_seqs), io.StringIO()
    found = runtime.generate(PROMPTS, greedy(30), WAYS, trace=trace)
    assert [list(one.token_ids) for one in found] == [plain(mixing_rule, prompt, 30) for prompt in PROMPTS]
    assert found[0].metrics.num_draft_tokens == 0 < found[2].metrics.num_draft_tokens
    steps = [line for line in trace.getvalue().splitlines() if "position" in line]
    assert sum(replay(trace.getvalue().splitlines()).steps.values()) == len(steps)
    calls = [batch for batch, _ in engine_of(runtime.verifier).sizes]
    assert min(max_num_seqs, 8) <= max(calls) <= max_num_seqs


def test_a_fixed_budget_next_to_an_adaptive_one_is_spent_whole() -> None:
    """Verification is so expensive that adaptive requests pause. The fixed request does not."""
    dear = CostCurve.from_points({1: 1.0, 32: 320.0})
    prompt = [97, 98, 99] * 8
    fixed = SpeculationParams("ngram", budget=Budget(4, 4, 1))
    adaptive = make_runtime(max_num_seqs=2, curve=dear).generate([prompt] * 2, greedy(60), "ngram")
    mixed = make_runtime(max_num_seqs=2, curve=dear).generate([prompt] * 2, greedy(60), ["ngram", fixed])
    assert max(text.metrics.num_draft_tokens for text in adaptive) < 20
    assert mixed[1].metrics.num_draft_tokens > 40
    assert {text.token_ids for text in (*adaptive, *mixed)} == {adaptive[0].token_ids}


def test_a_fixed_budget_may_be_larger_than_any_tree_that_was_timed() -> None:
    runtime = make_runtime(lambda tokens: 97 + len(tokens) % 3, max_num_seqs=2, max_model_len=400)
    prompt = [97 + i % 3 for i in range(24)]
    found = runtime.generate([prompt] * 2, greedy(150), ["ngram", SpeculationParams("ngram", budget=Budget(40, 40, 1))])
    assert found[0].token_ids == found[1].token_ids == tuple(97 + (24 + i) % 3 for i in range(150))
    assert max(width for _, width in engine_of(runtime.verifier).sizes[2:]) > 33


def test_nodes_within_another_sequences_larger_tree_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded node costs ten steps. Alone, no tree pays. Next to a tree of eight nodes, eight nodes are free."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    dear = CostCurve.from_points({1: 1.0, 32: 320.0})
    wide = SpeculationParams("ngram", budget=Budget(8, 8, 1))
    prompt, drafted = [97 + i % 3 for i in range(24)], []
    for neighbour in ("none", wide):
        runtime = make_runtime(lambda tokens: 97 + len(tokens) % 3, max_num_seqs=2, max_model_len=400, curve=dear)
        runtime.costs.packed = False
        found = runtime.generate([prompt, prompt], greedy(150), ["ngram", neighbour])
        assert found[0].token_ids == found[1].token_ids
        drafted.append(found[0].metrics.num_draft_tokens)
    assert drafted[0] < 20
    assert drafted[1] > 80


def test_controllers_of_many_settings_are_bounded() -> None:
    factory = make_runtime()._speculation
    for gamma in range(1, 2 * _MOST_CONTROLLERS):
        how = factory.create(SpeculationParams("ngram", controller=f"fixed,gamma={gamma}"), False)
    assert len(factory._controllers._values) == _MOST_CONTROLLERS
    assert (
        factory.create(SpeculationParams("ngram", controller=f"fixed,gamma={gamma}"), False).controller
        is how.controller
    )


def test_requests_without_a_prediction_do_not_share_the_experience_of_those_with_one() -> None:
    """Otherwise plain lookups would start with the experience of predictions that were always correct."""
    runtime = make_runtime(script(TEXT, 1), max_model_len=400)
    before = runtime.generate([[97]], greedy(150), "ngram")[0].metrics.num_spec_steps
    controller = runtime._speculation._adaptive
    record = controller._methods.record("ngram", "none")
    known = (record.experience.tokens, record.experience.plain_steps)
    for _ in range(4):
        runtime.generate([[97]], greedy(150), SpeculationParams("ngram", TEXT))
    assert (record.experience.tokens, record.experience.plain_steps) == known
    assert before < 150


def test_sampled_requests_begin_without_what_greedy_ones_taught() -> None:
    """A method that pays for greedy requests would draft long in sampled ones, where it may not pay."""
    runtime = make_runtime(lambda tokens: 97 + len(tokens) % 3, max_model_len=400)
    record = runtime._speculation._adaptive._methods.record
    prompt = [97 + i % 3 for i in range(24)]
    runtime.generate([prompt], greedy(150), "ngram")
    known = record("ngram", "none").experience
    kept = known.tokens, known.plain_steps
    assert known.tokens > 1.3 * known.plain_steps
    runtime.generate([prompt], greedy(6, temperature=1.0), "ngram")
    begun = record("ngram", "coupled").experience
    assert begun != MethodRecord().experience
    assert begun.tokens < 1.15 * begun.plain_steps, "a few steps after the credit"
    assert (known.tokens, known.plain_steps) == kept


@pytest.mark.parametrize("budget", [Budget(8, 4, 0), Budget(8, 0, 4), Budget(0, 4, 4)], ids=str)
def test_a_budget_without_nodes_is_plain_decoding(monkeypatch: pytest.MonkeyPatch, budget: Budget) -> None:
    runtime = make_runtime()
    monkeypatch.setattr(NgramDrafter, "offers", None)  # no step asks for offers
    (found,) = runtime.generate([[97, 98] * 9], greedy(20), SpeculationParams("ngram", budget=budget))
    assert found.metrics.num_draft_tokens == 0
    assert list(found.token_ids) == plain(mixing_rule, [97, 98] * 9, 20)


def test_a_closed_runtime_releases_its_verifier_after_a_prediction() -> None:
    runtime = make_runtime()
    runtime.generate([[97]], greedy(5), SpeculationParams("ngram", [98, 99]))
    verifier = weakref.ref(runtime.verifier)
    runtime.close()
    gc.collect()
    assert verifier() is None


def test_an_adaptive_budget_is_a_limit() -> None:
    """All tokens are accepted and verification is free. Without a limit, trees would be far larger."""
    free = CostCurve.from_points({1: 1.0, 32: 1.0})
    nodes = []
    for budget in (None, Budget(2, 2, 1)):
        runtime, trace = make_runtime(lambda tokens: 97 + len(tokens) % 3, curve=free), io.StringIO()
        how = SpeculationParams("ngram", budget=budget, controller="adaptive")
        runtime.generate([[97, 98, 99] * 4], greedy(40), how, trace=trace)
        nodes.append(max(line.count(",") for line in trace.getvalue().splitlines() if "position" in line))
        widest = max(width for _, width in engine_of(runtime.verifier).sizes[1:])
        assert (widest > 6) if budget is None else (widest == 3)


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (["ngram"], "found 1 parameters for 9 prompts"),
        ([5] * 9, "expected str or SpeculationParams, .* found int"),
        (5, "expected str or SpeculationParams, .* found int"),
        (["none"] * 8 + ["nothing"], "no drafter 'nothing'"),
        (SpeculationParams("none", prediction="abc"), "plain decoding takes no prediction"),
        (SpeculationParams(prediction=[97, VOCABULARY]), "the prediction has token ids from 97 to 258"),
        (SpeculationParams(prediction="a" * 300), "the prediction has 300 tokens and the context holds 200"),
        (SpeculationParams(prediction="a" * 10**7), "the prediction has 10000000 characters and the context holds 200"),
        (SpeculationParams(prediction="\ud800"), "the prediction is not UTF-8 .character 0."),
    ],
    ids=str,
)
def test_impossible_speculation_is_refused_before_any_computation(ways: object, message: str) -> None:
    runtime = make_runtime()
    with pytest.raises(UsageError, match=message):
        runtime.generate(PROMPTS, greedy(5), ways)
    assert engine_of(runtime.verifier).sizes == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": 3}, "method must be a word, not 3"),
        ({"method": ""}, "method must be a word, not ''"),
        ({"prediction": 3}, "a prediction is a text or a list of token ids, not int"),
        ({"prediction": b"ab"}, "a prediction is a text or a list of token ids, not bytes"),
        ({"prediction": bytearray(b"ab")}, "a prediction is a text or a list of token ids, not bytearray"),
        ({"prediction": {1, 2}}, "a prediction is a text or a list of token ids, not set"),
        ({"prediction": [1, 1.5]}, "a prediction's token ids are whole numbers, not 1.5"),
        ({"budget": 12}, "budget must be a Budget, not 12"),
        ({"controller": "bold"}, "unknown controller 'bold'; choose one of adaptive, fixed"),
        ({"controller": "fixed"}, "the controller fixed needs a budget"),
    ],
    ids=str,
)
def test_parameters_of_another_kind_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SpeculationParams(**values)


def test_sampling_parameters_may_differ_by_prompt() -> None:
    found = make_runtime(max_num_seqs=3).generate(PROMPTS[:3], [greedy(5), greedy(9), greedy(7)])
    assert [len(one.token_ids) for one in found] == [5, 9, 7]
    with pytest.raises(UsageError, match="found 2 parameters for 3 prompts"):
        make_runtime().generate(PROMPTS[:3], [greedy(5), greedy(9)])


# --- predicted outputs -----------------------------------------------------------------------------------------------

TEXT = random.Random(1).choices(range(97, 120), k=150)


def edited(text: list[int], changes: dict[int, list[int]]) -> list[int]:
    """Return `text` with other tokens at some positions."""
    return [token for place, own in enumerate(text) for token in changes.get(place, [own])]


@pytest.mark.parametrize(
    ("prediction", "most_steps"),
    [
        (TEXT, 12),
        (edited(TEXT, {40: [1], 80: [2], 120: [3]}), 18),
        (edited(TEXT, {40: [1, 2, 3], 80: [], 120: [4, 5]}), 22),
        (TEXT[60:] + TEXT[:60], 16),
    ],
    ids=["whole", "replaced", "other lengths", "in another order"],
)
@pytest.mark.parametrize("budget", [Budget(16, 16, 1), None])
def test_a_predicted_text_is_followed(
    monkeypatch: pytest.MonkeyPatch, prediction: list[int], most_steps: int, budget: Budget | None
) -> None:
    """The text is random, so n-grams find nothing. If the answer leaves the prediction, the drafter finds it again."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    runtime = make_runtime(script(TEXT, 1), max_model_len=400)
    (found,) = runtime.generate([[97]], greedy(150), SpeculationParams("ngram", prediction, budget))
    assert list(found.token_ids) == TEXT
    assert found.metrics.num_steps <= most_steps
    assert runtime.generate([[97]], greedy(150), "ngram")[0].metrics.num_steps > 100


def test_a_prediction_that_is_wrong_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other text has the same letters, so that the position in it is found and lost again and again."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    runtime = make_runtime(script(TEXT, 1), max_model_len=400)
    other = random.Random(2).choices(range(97, 120), k=150)
    offered = []
    offers = PredictionDrafter.offers

    def counted(self: PredictionDrafter, seq: Request, budget: Budget) -> Sequence[Offer]:
        found = offers(self, seq, budget)
        offered.append(len(found))
        return found

    monkeypatch.setattr(PredictionDrafter, "offers", counted)
    (found,) = runtime.generate([[97]], greedy(150), SpeculationParams("ngram", other, Budget(1, 1, 1)))
    assert list(found.token_ids) == TEXT
    assert len(offered) > 130
    assert sum(offered[-100:]) < 60  # one letter of 23 is correct by chance


def test_a_prediction_is_text_or_token_ids_and_may_be_empty() -> None:
    runtime = make_runtime(script(b"a text that comes as predicted", 1))
    texts = [
        runtime.generate([[97]], greedy(30), SpeculationParams("ngram", prediction, Budget(8, 8, 1)))[0]
        for prediction in ("a text that comes as predicted", list(b"a text that comes as predicted"), "", [])
    ]
    assert len({text.token_ids for text in texts}) == 1
    assert texts[0].metrics.num_steps == texts[1].metrics.num_steps < 8 < texts[2].metrics.num_steps
    assert texts[2].metrics.num_steps == texts[3].metrics.num_steps


# --- logits processors -----------------------------------------------------------------------------------------------


def never_twice(tokens: list[int], logits: np.ndarray) -> np.ndarray:
    """Forbids the latest token, so that the next one depends on the path."""
    changed = logits.copy()
    changed[tokens[-1]] = -1.0
    return changed


@pytest.mark.parametrize(
    ("how", "max_num_seqs"), [("none", 1), ("ngram", 3), (SpeculationParams("ngram", budget=Budget(12, 4, 3)), 3)]
)
def test_a_logits_processor_sees_every_path(how: str | SpeculationParams, max_num_seqs: int) -> None:
    """The text equals that of a model that computes such logits itself, and only accepted nodes cost a call."""
    seen: list[list[int]] = []

    def process(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append(list(tokens))
        return never_twice(tokens, logits)

    def rule(tokens: list[int]) -> int:
        token = mixing_rule(tokens)
        return token if token != tokens[-1] else 0  # the fake's other logits are zeros: the first of them

    runtime = make_runtime(max_num_seqs=max_num_seqs)
    found = runtime.generate(PROMPTS, greedy(30, logits_processors=(process,)), how)
    assert [list(one.token_ids) for one in found] == [plain(rule, prompt, 30) for prompt in PROMPTS]
    texts = [prompt + plain(rule, prompt, 30) for prompt in PROMPTS]
    expected = [text[:end] for text in texts for end in range(len(text) - 30, len(text))]
    assert sorted(seen) == sorted(expected)


def test_margins_are_those_of_the_processed_logits() -> None:
    runtime: Runtime = make_runtime(curve=CURVE)
    params = greedy(10, logits_processors=(lambda tokens, logits: logits * 3,))
    (found,) = runtime.generate([[97]], params, "ngram", record_logit_margins=True)
    assert found.logit_margins == (6.0,) * 10
