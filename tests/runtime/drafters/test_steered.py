"""A steered drafter in the runtime: texts are the verifier's, and its logits are those of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from redraft import names
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import Verifier
from redraft.types import Budget
from tests.runtime.devices import opener
from tests.runtime.drafters.test_rejection_drafts import FAR, chi_square
from tests.runtime.fakes import fix_costs

from .decoder_bundle import ABLATIONS, STEPS, Draft, Rows, drafter_of, open_student, watched

PROMPTS = [[5, 9, 3, 17, 12, 8], [1], [3 + number * number % 27 for number in range(90)]]
CLOSE = 1e-4
HOT = 2.0
"""A temperature at which long drafts are accepted too."""
WAYS = (
    SpeculationParams("sd2", budget=Budget(STEPS, STEPS, 1)),
    SpeculationParams("sd2", budget=Budget(3, 3, 1)),
    "ngram+sd2",
)


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    """Calls cost the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        yield


def opened(folder: Path, slots: int) -> Runtime:
    return Runtime.open(folder / "engines", threads=1, max_num_seqs=slots, verify=False)


def params(temperature: float, tokens: int = 40, **values: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=temperature, seed=4, ignore_eos=True, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[float, list[list[int]]]:
    """The verifier's own texts after PROMPTS, by temperature."""
    with opened(folder, 1) as runtime:
        return {t: [text.token_ids for text in runtime.generate(PROMPTS, params(t), "none")] for t in (0.0, 1.0)}


def check(drafts: list[Draft], folder: Path, name: str = "sd2") -> Counter[int]:
    """Compare every draft's logits with training's. Returns how many tokens were accepted."""
    accepted: Counter[int] = Counter()
    for seq in {id(draft.seq): draft.seq for draft in drafts}.values():
        rows, before, last = Rows(folder, name), list[int](), 0
        for draft in [draft for draft in drafts if draft.seq is seq]:
            drawn, count = draft.tree.tokens.tolist()[1:], draft.rows + 1  # the last drafted token may have a row
            if before:
                accepted[matching(before, draft.tokens[last:])] += 1
            expected = rows.draft(draft.tokens, drawn, count)
            for depth, logits in enumerate(expected[: len(drawn)]):
                found = draft.tree.draws.proposal.logits(depth, draft.tree.tokens[depth]) * HOT  # type: ignore[union-attr]
                assert abs(found - logits.numpy()).max() < CLOSE
            before, last = drawn, len(draft.tokens)
    return accepted


def matching(drafted: list[int], committed: list[int]) -> int:
    """How many drafted tokens were committed."""
    pairs = enumerate(zip(drafted, committed, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(drafted), len(committed)))


CHAINS = SpeculationParams("sd2", budget=Budget(4, 4, 1))


def test_steering_is_the_papers_equation_2(folder: Path) -> None:
    """MLP(a, g) = W_d ((W_u a + W_s g) ⊙ σ(W_g a)), with the W_s of the second layer, whose rows come last."""
    student = open_student(folder / "sd2")
    mlp, steering = student.get_submodule("model.layers.1.mlp"), student.steering
    assert steering is not None
    with torch.no_grad():
        a, features = torch.randn(1, 5, mlp.up_proj.in_features), torch.randn(1, 5, steering.vector.in_features)
        g = features @ steering.vector.weight.T
        biases = g @ steering.bias.weight[-mlp.up_proj.out_features :].T
        expected = mlp.down_proj((mlp.up_proj(a) + biases) * F.silu(mlp.gate_proj(a)))
        with steering.applied(steering(features, torch.arange(1, 6)[None])):
            torch.testing.assert_close(mlp(a), expected)


def test_logits_are_those_of_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many passes with rejections at every position: kept rows have the steering that they were made with."""
    with opened(folder, 3) as runtime:
        drafts = watched(drafter_of(runtime, "sd2"), monkeypatch)
        runtime.generate(PROMPTS, params(HOT, 60, acceptance="rejection"), CHAINS)
    assert set(check(drafts, folder)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("kind", "slots"),
    [("host", 1), ("host", 3), ("cpu", 1), ("cpu", 3), ("tensorrt", 3), ("onnxruntime on a GPU", 3)],
)
def test_texts_are_the_verifiers_and_logits_those_of_training(
    kind: str, slots: int, folder: Path, plain: dict[float, list[list[int]]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also next to sequences of other drafters, with drafts of other lengths, and when sequences change slots."""
    if kind != "host":
        monkeypatch.setattr(Verifier, "warm", lambda self: None)  # so that requests prepare shapes while they run
    with opener(kind, folder / "engines", tmp_path, monkeypatch)(slots) as runtime:
        for temperature, ways in ((0.0, WAYS[:1]), (1.0, WAYS[1:])):
            for way in (*ways, ["ngram", *WAYS[:2]]):
                found = runtime.generate(PROMPTS, params(temperature), way)
                assert [text.token_ids for text in found] == plain[temperature], (temperature, way)
                assert all(text.metrics.num_draft_tokens > 0 for text in found[1:])
        drafts = watched(drafter_of(runtime, "sd2"), monkeypatch)
        how = [CHAINS, SpeculationParams("sd2", budget=Budget(2, 2, 1)), "ngram+sd2"]
        runtime.generate(PROMPTS, params(HOT, 20, acceptance="rejection"), how)
    assert len({id(draft.seq) for draft in drafts}) == 3
    check(drafts, folder)


@pytest.mark.parametrize("kind", ["host", "cpu"])
@pytest.mark.parametrize("name", ABLATIONS)
def test_other_mechanisms_decode_as_they_were_trained(
    name: str, kind: str, folder: Path, plain: dict[float, list[list[int]]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Texts are the verifier's, and kept rows have the steering that they were made with."""
    way = SpeculationParams(name, budget=Budget(4, 4, 1))
    with opener(kind, folder / "engines", tmp_path, monkeypatch)(3) as runtime:
        for temperature, expected in plain.items():
            found = runtime.generate(PROMPTS, params(temperature), way)
            assert [text.token_ids for text in found] == expected
            assert all(text.metrics.num_draft_tokens > 0 for text in found[1:])
        drafts = watched(drafter_of(runtime, name), monkeypatch)
        runtime.generate(PROMPTS, params(HOT, acceptance="rejection"), way)
    assert len(check(drafts, folder, name)) > 2


def test_drawn_drafts_leave_the_verifiers_distribution(folder: Path) -> None:
    with opened(folder, 1) as runtime:
        assert chi_square(runtime, CHAINS, "rejection", requests=12) < FAR


def test_rows_of_plain_steps_have_the_steering_of_the_position_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of more steps than the buffer holds wait, since the drafter catches up before it is full."""
    monkeypatch.setattr(names, "MAX_PENDING_FEATURES", 160)
    with opened(folder, 1) as runtime:
        drafter = drafter_of(runtime, "sd2")
        found = watched(drafter, monkeypatch)
        offers, make_space, made = drafter.offers, drafter._make_space, []
        monkeypatch.setattr(drafter, "_make_space", lambda seq, slot: made.append(slot) or make_space(seq, slot))
        monkeypatch.setattr(drafter, "offers", lambda seq, budget: offers(seq, budget) if drafts(seq) else ())

        def drafts(seq: Request) -> bool:
            return len(seq.tokens) > 280 or (len(seq.tokens) % 9 == 3 and len(seq.tokens) < 120)

        drawn, prompt = params(HOT, 200, acceptance="rejection"), PROMPTS[2]
        runtime.generate([prompt], drawn, SpeculationParams("sd2", budget=Budget(3, 3, 1)))
    lengths = [len(draft.tokens) for draft in found]
    assert max(after - before for before, after in pairwise(lengths)) > 160
    assert made
    check(found, folder)
