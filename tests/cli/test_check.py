"""`redraft check lossless`: a good bundle passes, and each planted fault fails by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import copy_with_template
from tests.engines.bundles import build_tiny

from redraft.bench import lossless
from redraft.cli import check, main
from redraft.runtime.drafters import method_words
from redraft.runtime.drafters.ngram import DRAFTER as Ngram
from redraft.runtime.sampling import path_sampler, rejection
from redraft.runtime.sampling.path_sampler import PathSampler

Refused = Callable[..., str]
Check = Callable[..., dict[str, Any]]
QUICK = ("--threads", "1", "--no-verify", "--max-new-tokens", "24")


@pytest.fixture(scope="module")
def engines(lyanna_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of ten letters, which its chat template does not know."""
    return copy_with_template(lyanna_bundle, tmp_path_factory.mktemp("plain") / "engines", None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = ("abababab", "fig", "cabbage")
    file.write_text("".join(json.dumps({"id": text[:3], "category": "k", "turns": [text]}) + "\n" for text in texts))
    return file


@pytest.fixture
def checked(engines: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run the check in this process, where faults can be planted. Returns its JSON object."""

    def run(*options: object, status: int = 0) -> dict[str, Any]:
        given = ("--engines", engines, "--prompts", prompts, *QUICK, "--json", *options)
        assert main.run(["check", "lossless", *map(str, given)]) == status
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert found["holds"] is (status == 0)
        return found

    return run


def failing(found: dict[str, Any]) -> list[str]:
    return [method for method, one in found["methods"].items() if not one["holds"]]


def failed_tests(found: dict[str, Any], method: str) -> set[str]:
    drawn = found["methods"][method]["distribution"]
    return {name for name, test in drawn["tests"].items() if test["p_value"] < drawn["least_p_value"]}


def test_texts_of_every_method_and_the_noise_of_plain_decoding(checked: Check) -> None:
    found = checked("--draws", 4000)
    assert found["methods"].keys() == {"none", *method_words(["lyanna"])}
    texts = found["methods"]["lyanna"]["texts"]
    assert {(one["temperature"], one["trees"], one["max_num_seqs"]) for one in texts} == {
        (temperature, trees, slots)
        for temperature in (0, 1)
        for trees, slots in (("adaptive", 1), ("trees", 1), ("chains", 1), ("adaptive", 3), ("trees", 3))
    }
    assert all(one["texts"] == 3 and one["tokens"] == 72 and one["differences"] == [] for one in texts)
    assert sum(one["num_accepted_draft_tokens"] for one in texts) > 0
    assert found["methods"]["lyanna"]["distribution"] is None
    drawn = found["methods"]["none"]["distribution"]
    assert drawn["draws"] == 4000
    assert set(drawn["tests"]) == {"ranks", "pairs", "tokens"}
    assert 0.05 < drawn["total_variation"] < 0.1
    assert found["seeds"]["differing"] == 3
    assert (found["temperature"], found["acceptance"], found["exact"]) == (1, "coupled", True)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rejection_tests_the_draws_of_fresh_and_of_resampled_drafts(checked: Check, acceptance: str) -> None:
    found = checked("--method", "lyanna", "--acceptance", acceptance, "--draws", 4000)
    assert {one["temperature"] for one in found["methods"]["lyanna"]["texts"]} == {0}
    drawn = found["methods"]["lyanna"]["distribution"]
    assert drawn["draws"] == 4000
    assert set(drawn["trees"]) == {"fresh", "resample"}
    assert drawn["num_accepted_draft_tokens"] > 500
    assert found["seeds"] is None
    assert found["methods"]["none"]["distribution"] is None


def test_lookups_and_pairs_are_drawn_too(checked: Check) -> None:
    for method in ("ngram", "ngram+lyanna"):
        drawn = checked("--method", method, "--acceptance", "rejection", "--draws", 2000)["methods"][method][
            "distribution"
        ]
        assert drawn["num_draft_tokens"] > 500


def test_greedy_alone(checked: Check) -> None:
    found = checked("--temperature", 0, "--method", "ngram")
    assert [one["temperature"] for one in found["methods"]["ngram"]["texts"]] == [0] * 5
    assert found["seeds"] is None
    assert all(one["distribution"] is None for one in found["methods"].values())


def swapped(p: Any, q: Any, token: int) -> float:
    """Accept a token with p and q swapped."""
    return min(1.0, q[token] / max(p[token], 1e-12))


@pytest.mark.parametrize(
    ("name", "fault", "acceptance", "options"),
    [
        ("acceptance", swapped, "rejection", ("--draws", 4000)),
        ("residual", lambda p, q: np.maximum(p - q, 0), "rejection", ("--draws", 8000, "--temperature", 0.4)),
        ("residual", lambda p, q: p, "rejection", ("--draws", 4000)),
        ("_normalised", lambda weights, otherwise: otherwise, "block", ("--draws", 4000)),
    ],
    ids=["p and q swapped", "residual not normalised", "residual is p", "bonus from the target"],
)
def test_faults_of_acceptance(
    checked: Check, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, acceptance: str, options: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(rejection, name, fault)
    found = checked("--method", "lyanna", "--acceptance", acceptance, *options, status=1)
    assert failing(found) == ["lyanna"]
    if name == "acceptance":
        assert {"ranks", "tokens"} <= failed_tests(found, "lyanna")


def biased(monkeypatch: pytest.MonkeyPatch, token: int, share: float) -> None:
    """Make every draw of `Rejection` this token, with this probability."""
    right = rejection.verify

    def verify(tree: Any, target: Any, chance: Any, block: bool) -> rejection.Accepted:
        found = right(tree, target, chance, block)
        return ((), token) if chance.accepts(share) else found

    monkeypatch.setattr(rejection, "verify", verify)


@pytest.mark.slow
def test_a_token_that_is_drawn_a_hundredth_too_often(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--method", "ngram", "--acceptance", "rejection", "--draws", 200_000)
    found = checked(*options)
    assert found["methods"]["ngram"]["distribution"]["total_variation"] < 0.0115
    biased(monkeypatch, 5, 0.01)
    assert failing(checked(*options, status=1)) == ["ngram"]


def test_noise_that_forgets_its_position(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token alone has the right distribution, and texts agree, but tokens depend on each other."""
    right = path_sampler.perturbed
    monkeypatch.setattr(path_sampler, "perturbed", lambda support, seed, position: right(support, seed, 0))
    found = checked("--method", "ngram", "--draws", 4000, status=1)
    assert failing(found) == ["none"]
    assert failed_tests(found, "none") == {"pairs"}


def test_noise_that_counts_nodes_of_the_tree(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts then depend on what was drafted."""
    right = PathSampler.verify

    def verify(self: PathSampler, logits: Any, tree: Any, tokens: Any) -> Any:
        if self._params.temperature:
            self._seed = len(tree)
        return right(self, logits, tree, tokens)

    monkeypatch.setattr(PathSampler, "verify", verify)
    found = checked("--method", "lyanna", "--draws", 1000, status=1)
    assert "lyanna" in failing(found)
    text = next(one for one in found["methods"]["lyanna"]["texts"] if not one["holds"])
    assert text["temperature"] == 1
    assert set(text["differences"][0]) == {"prompt", "turn", "token", "logit_margin", "near_tie"}


def test_missing_noise(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_sampler, "perturbed", lambda support, seed, position: support.scores)
    found = checked("--method", "ngram", "--draws", 1000, status=1)
    assert failing(found) == ["none"]
    assert found["seeds"]["differing"] == 0
    assert found["seeds"]["holds"] is False


def test_equal_texts_of_two_seeds_are_no_fault_if_they_are_likely(checked: Check) -> None:
    found = checked("--method", "ngram", "--temperature", 1e-4, "--draws", 1000)
    assert found["seeds"]["differing"] == 0
    assert found["seeds"]["same_texts_log10"] > -6
    assert any("two seeds wrote the same texts" in line for line in found["warnings"])


def test_a_proof_without_accepted_drafts_says_so(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ngram, "offers", lambda self, seq, budget: ())
    found = checked("--method", "ngram", "--temperature", 0)
    assert found["warnings"] == [
        "ngram, texts at temperature 0: none of 0 drafted tokens was accepted, so this proves nothing about accepted "
        "drafts"
    ]
    found = checked("--method", "ngram", "--acceptance", "rejection", "--draws", 1000)
    assert "ngram: no text of the prompts had a draft to draw from" in found["warnings"]


@pytest.mark.parametrize(("exact", "status"), [(True, 1), (False, 0)])
def test_a_near_tie_is_named_and_counts_only_where_texts_are_exact(
    checked: Check, monkeypatch: pytest.MonkeyPatch, exact: bool, status: int
) -> None:
    near = {"prompt": "cab", "turn": 1, "token": 3, "logit_margin": 1e-6, "near_tie": True}
    monkeypatch.setattr(lossless, "difference", lambda run, way, margin_of: near if run.prompt.id == "cab" else None)
    monkeypatch.setattr(lossless, "_is_exact", lambda runtime: exact)
    found = checked("--method", "ngram", "--temperature", 0, status=status)
    assert found["methods"]["ngram"]["texts"][0]["differences"] == [near]


def test_a_person_sees_a_table_and_each_fault(
    engines: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--engines", engines, "--prompts", prompts, *QUICK, "--method", "lyanna", "--acceptance", "rejection"]
    command = ["check", "lossless", *map(str, options), "--draws", "2000"]
    assert main.run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "acceptance rejection, device host"
    assert lines[1].split()[:2] == ["method", "temperature"]
    assert [line.split()[0] for line in lines[2:]] == ["none", "lyanna", "lyanna", "lossless"]
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    assert main.run(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "NOT lossless"
    assert any(line.startswith("BIASED: lyanna, ranks: chi-square ") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), "temperature must be 0 (greedy) or above, at most 1e30, not -1.0"),
        (("--temperature", "nan"), "temperature must be"),
        (("--acceptance", "maybe"), "unknown acceptance 'maybe'"),
        (("--acceptance", "block", "--temperature", "0"), "--acceptance block needs a temperature above 0"),
        (("--method", "none"), "no drafting method 'none'; choose one of ngram, suffix, lookahead, lyanna"),
        (("--method", "other"), "no drafting method 'other'"),
        (("--draws", "10"), "--draws"),
        (("--limit", "0"), "--limit"),
        (("--seed", "-1"), "seed must be from 0 to 2^63 - 1, not -1"),
        (("--seed", str((1 << 63) - 5)), "seed must be from 0 to 2^63 - 1"),
        (("--prompts", "absent.jsonl"), "cannot read absent.jsonl"),
    ],
    ids=str,
)
def test_bad_usage(refused: Refused, engines: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refused("check", "lossless", "--engines", engines, *QUICK, "--json", *options, status=2)


def test_default_prompts_fit_a_short_context(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chat template of this bundle, whose tokens are characters, leaves space for the shortest ones only."""
    command = ["check", "lossless", "--engines", str(bundle), *QUICK, "--json", "--temperature", "0"]
    assert main.run(command) == 0
    texts = json.loads(capsys.readouterr().out)["methods"]["ngram"]["texts"]
    assert 1 <= texts[0]["texts"] < len(check.TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_the_embedded_model(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, acceptance: str
) -> None:
    """The default prompts, through the chat template. A residual that is not taken is found."""
    tiny = build_tiny(root, tmp_path / "tiny", "onnxruntime", "fp32", None).path
    options = ("--engines", tiny, *QUICK, "--method", "lyanna", "--acceptance", acceptance, "--draws", 6000, "--json")
    command = ["check", "lossless", *map(str, options)]
    assert main.run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["warnings"] == []
    if acceptance == "rejection":
        monkeypatch.setattr(rejection, "residual", lambda p, q: p)
        assert main.run(command) == 1
        assert failing(json.loads(capsys.readouterr().out)) == ["lyanna"]
