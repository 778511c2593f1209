"""`redraft check lossless`: a good bundle passes, and each planted fault fails by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import Refused, Run, copy_with_template
from tests.little import Redraft

from redraft.bench import lossless
from redraft.cli import check
from redraft.runtime.drafters import method_words
from redraft.runtime.drafters.ngram import DRAFTER as Ngram
from redraft.runtime.sampling import path_sampler, rejection
from redraft.runtime.sampling.path_sampler import PathSampler

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
def checked(engines: Path, prompts: Path, redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run the check in this process, where faults can be planted. Returns its JSON object.

    slots: sequences at once, 1 unless a test looks at batches. Each number of them opens the engines again.
    """

    def run(*options: object, status: int = 0, slots: int = 1) -> dict[str, Any]:
        monkeypatch.setattr(lossless, "BATCH", slots)
        done = redraft("check", "lossless", "--engines", engines, "--prompts", prompts, *QUICK, "--json", *options)
        assert done.returncode == status, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["holds"] is (status == 0)
        return found

    return run


def failing(found: dict[str, Any]) -> list[str]:
    return [method for method, one in found["methods"].items() if not one["holds"]]


def failed_tests(found: dict[str, Any], method: str) -> set[str]:
    drawn = found["methods"][method]["distribution"]
    return {name for name, test in drawn["tests"].items() if test["p_value"] < drawn["least_p_value"]}


def test_texts_of_every_method_and_the_noise_of_plain_decoding(checked: Check) -> None:
    found = checked("--draws", 1000, slots=lossless.BATCH)
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
    assert drawn["draws"] == 1000
    assert set(drawn["tests"]) == {"ranks", "pairs", "tokens"}
    assert 0.1 < drawn["total_variation"] < 0.2
    assert found["seeds"]["differing"] == 3
    assert (found["temperature"], found["acceptance"], found["exact"]) == (1, "coupled", True)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rejection_tests_the_draws_of_fresh_and_of_resampled_drafts(checked: Check, acceptance: str) -> None:
    found = checked("--method", "lyanna", "--acceptance", acceptance, "--draws", 1000)
    assert {one["temperature"] for one in found["methods"]["lyanna"]["texts"]} == {0}
    drawn = found["methods"]["lyanna"]["distribution"]
    assert drawn["draws"] == 1000
    assert set(drawn["trees"]) == {"fresh", "resample"}
    assert drawn["num_accepted_draft_tokens"] > 125
    assert found["seeds"] is None
    assert found["methods"]["none"]["distribution"] is None


def test_lookups_and_pairs_are_drawn_too(checked: Check) -> None:
    for method in ("ngram", "ngram+lyanna"):
        found = checked("--method", method, "--acceptance", "rejection", "--draws", 1000)
        assert found["methods"][method]["distribution"]["num_draft_tokens"] > 250


def test_greedy_alone(checked: Check) -> None:
    found = checked("--temperature", 0, "--method", "ngram")
    assert [one["temperature"] for one in found["methods"]["ngram"]["texts"]] == [0] * 3
    assert found["seeds"] is None
    assert all(one["distribution"] is None for one in found["methods"].values())


def swapped(p: Any, q: Any, token: int) -> float:
    """Accept a token with p and q swapped."""
    return min(1.0, q[token] / max(p[token], 1e-12))


@pytest.mark.parametrize(
    ("name", "fault", "acceptance", "options"),
    [
        ("acceptance", swapped, "rejection", ("--draws", 4000)),
        ("residual", lambda p, q: np.maximum(p - q, 0), "rejection", ("--draws", 8000, "--temperature", 0.7)),
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


def test_noise_that_forgets_its_position(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token alone has the right distribution, and texts agree, but tokens depend on each other."""
    right = path_sampler.perturbed
    monkeypatch.setattr(path_sampler, "perturbed", lambda support, seed, position: right(support, seed, 0))
    found = checked("--method", "ngram", "--draws", 1000, status=1)
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
    engines: Path, prompts: Path, redraft: Redraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--engines", engines, "--prompts", prompts, *QUICK, "--method", "lyanna", "--acceptance", "rejection")
    command = ("check", "lossless", *options, "--draws", "2000")
    done = redraft(*command)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "acceptance rejection, device host"
    assert lines[1].split()[:2] == ["method", "temperature"]
    assert [line.split()[0] for line in lines[2:]] == ["none", "lyanna", "lyanna", "lossless"]
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    done = redraft(*command)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
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


def test_default_prompts_fit_a_short_context(bundle: Path, run: Run) -> None:
    """The chat template of this bundle, whose tokens are characters, leaves space for the shortest ones only."""
    found = run("check", "lossless", "--engines", bundle, *QUICK, "--method", "ngram", "--temperature", "0")
    assert 1 <= found["methods"]["ngram"]["texts"][0]["texts"] < len(check.TEXTS)


@pytest.mark.slow
def test_the_embedded_model(tiny_bundle: Path, run: Run) -> None:
    """Of its default prompts, through the chat template. Drafts are accepted, or else a warning says so."""
    options = ("--method", "lyanna", "--acceptance", "rejection", "--draws", 1000, "--limit", 3)
    found = run("check", "lossless", "--engines", tiny_bundle, *QUICK, *options)
    assert (found["holds"], found["warnings"]) == (True, [])
