"""A student three times: pretrained on plain text, then distilled or steered; and runs that begin with a drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from redraft.cli.train import app
from redraft.errors import CheckpointError, TrainingError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.train.checkpoint import load_checkpoint
from redraft.train.drafter_config import DrafterRecipe, SelfText
from redraft.train.drafter_evaluate import open_drafter
from redraft.train.drafter_publish import publish_drafter
from redraft.train.drafter_run import train_drafter
from redraft.train.model_publish import publish_model
from redraft.train.objectives import find_training
from redraft.train.objectives.decoder import SteeringTable, StudentTable
from redraft.train.verifier_model import open_verifier
from tests.train.test_drafter_run import KillAfter

SCHEDULE = dict(
    steps=6, batch_tokens=128, seq_len=16, decay_seq_len=16, warmup_steps=2, optimizer="adam", lr=0.003,
    held_out_every=3, evaluate_every=6,
)  # fmt: skip
PLAIN = SelfText(text=1.0, greedy=0.0, sampled=0.0, prompt_tokens=6, new_tokens=20, held_out_rows=3)
OWN = replace(PLAIN, text=0.0, sampled=1.0, temperatures=(1.0,), rows=12)
STUDENT = dict(layers=(0, 3), draft_vocabulary=300)
StudentRecipe, SteeredRecipe = (find_training(name).recipe for name in ("draft_model", "steered"))
PRETRAINED = StudentRecipe(drafter=StudentTable(**STUDENT, kl=0.0, hard=1.0), self_text=PLAIN, **SCHEDULE)  # type: ignore[arg-type]
DISTILLED = StudentRecipe(drafter=StudentTable(**STUDENT), self_text=OWN, **SCHEDULE)  # type: ignore[arg-type]
STEERED = SteeredRecipe(drafter=SteeringTable(**STUDENT), self_text=OWN, **SCHEDULE)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prose(sources: dict[str, str]) -> dict[str, str]:
    return {"prose": sources["prose"]}


def go(folder: Path, sources: dict[str, str], out: Path, recipe: DrafterRecipe, **options: object) -> KillAfter:
    """Run a recipe; the report has its losses by step."""
    report = KillAfter()
    train_drafter(recipe.method, folder, sources, out, recipe, report=report, **options)  # type: ignore[arg-type]
    return report


@pytest.fixture(scope="module")
def pretrained(verifier_folder: Path, prose: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pretrained") / "run"
    report = go(verifier_folder, prose, out, PRETRAINED)
    assert set(report.losses[1]) == {"ce", "loss"}, "plain text needs no verifier"
    return out


@pytest.fixture(scope="module")
def steered(
    verifier_folder: Path, prose: dict[str, str], pretrained: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("steered") / "run"
    go(verifier_folder, prose, out, STEERED, start=pretrained)
    return out


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return {name.removeprefix("drafter."): t for name, t in load_checkpoint(run)["objective"].items()}


def test_both_begin_with_the_pretrained_student_and_steering_that_does_nothing(
    verifier_folder: Path, prose: dict[str, str], pretrained: Path, tmp_path: Path
) -> None:
    """The first loss of both is the same: W_s is 0, and their text is the same."""
    first = [
        go(verifier_folder, prose, tmp_path / recipe.method, replace(recipe, steps=1), start=pretrained).losses[1]
        for recipe in (DISTILLED, STEERED)
    ]
    assert first[0]["kl"] == pytest.approx(first[1]["kl"], rel=1e-5)
    fresh = go(verifier_folder, prose, tmp_path / "fresh", replace(DISTILLED, steps=1)).losses[1]
    assert fresh["kl"] != pytest.approx(first[0]["kl"], rel=1e-3)


def test_steering_alone_lowers_the_divergence(
    verifier_folder: Path, prose: dict[str, str], pretrained: Path, tmp_path: Path
) -> None:
    """The verifier was trained for seconds, so its hidden states say little about the tokens to come."""
    recipe = replace(STEERED, steps=60, evaluate_every=60, drafter=replace(STEERED.drafter, frozen=True))
    losses = go(verifier_folder, prose, tmp_path / "run", recipe, start=pretrained).losses
    first, last = ([losses[step]["kl"] for step in steps] for steps in (range(1, 6), range(56, 61)))
    assert 0 < sum(last) < 0.99 * sum(first)
    before, after = weights_of(pretrained), weights_of(tmp_path / "run")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_published_drafter_loads_as_it_was_trained(verifier_folder: Path, steered: Path, tmp_path: Path) -> None:
    training = publish_drafter(steered, tmp_path)
    opened = DrafterCheckpoint.open(tmp_path)
    assert opened.method == "steered"
    assert opened.config["hidden_states"] == ["2", "1"]
    objective = open_drafter(opened, open_verifier(verifier_folder, "cpu"))
    for name, tensor in weights_of(steered).items():
        found = objective.drafter.state_dict()[name]
        assert (found - tensor).abs().max() <= 0.01 * tensor.abs().max()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"It began with the drafter whose weights have the digest {training['start'][:12]}…." in card
    assert "`redraft train steered`" in card
    with pytest.raises(UsageError, match="is not a model of its own"):
        publish_model(steered, tmp_path / "plain", open_verifier(verifier_folder, "cpu"), ())


def test_a_run_may_begin_with_a_published_drafter_and_with_a_steered_one(
    verifier_folder: Path, prose: dict[str, str], pretrained: Path, steered: Path, tmp_path: Path
) -> None:
    """As the paper's seventh epoch. Resuming needs no --start, but takes the same one only."""
    publish_drafter(pretrained, tmp_path / "student")
    again, run = replace(STEERED, steps=2), tmp_path / "again"
    go(verifier_folder, prose, tmp_path / "from", replace(STEERED, steps=1), start=tmp_path / "student")
    first = go(verifier_folder, prose, run, again, start=steered).losses[1]
    assert first["kl"] != pytest.approx(go(verifier_folder, prose, tmp_path / "b", again).losses[1]["kl"], rel=1e-3)
    for start in (None, steered):
        go(verifier_folder, prose, run, again, start=start, resume=True)
    with pytest.raises(TrainingError, match="began with another drafter; give the same --start"):
        go(verifier_folder, prose, run, again, start=pretrained, resume=True)


def test_drafters_that_a_run_cannot_begin_with_are_refused_in_one_line(
    verifier_folder: Path, prose: dict[str, str], pretrained: Path, steered: Path, tmp_path: Path
) -> None:
    def line(start: Path, recipe: DrafterRecipe = STEERED, **table: object) -> str:
        recipe = replace(recipe, drafter=replace(recipe.drafter, **table))  # type: ignore[arg-type]
        with pytest.raises((CheckpointError, TrainingError)) as caught:
            go(verifier_folder, prose, tmp_path / "run", recipe, start=start)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists(), "nothing is written before"
        return str(caught.value)

    assert "it has layers = (0, 3), the recipe's drafter has layers = (0, 2); give" in line(pretrained, layers=(0, 2))
    assert "reads hidden states 2, 1, expected 0" in line(steered, hidden_states=("0",))
    assert "reads hidden states 2, 1, expected none" in line(steered, DISTILLED)
    assert "is not a drafter: config.json cannot be read" in line(tmp_path / "absent")
    publish_drafter(steered, tmp_path / "published")
    values = json.loads((tmp_path / "published" / "config.json").read_text())
    values["verifier"]["weights"] = ["0" * 64]
    (tmp_path / "published" / "config.json").write_text(json.dumps(values))
    assert "was trained for another verifier; give a --start" in line(tmp_path / "published")
    other = find_training("lyanna").recipe.from_dict(
        {"steps": 1, **{k: v for k, v in SCHEDULE.items() if k != "steps"}, "self_text": {"held_out_rows": 3}}
    )
    assert "is a drafter of another method than the recipe's" in line(pretrained, other)


@pytest.mark.parametrize(
    "name",
    [
        "steered", "steered-tiny", "steered-smollm2", "pretrained-tiny", "pretrained-smollm2", "distilled-tiny",
        "distilled-smollm2",
    ],
)  # fmt: skip
def test_shipped_recipes_load_and_go_through_plain_values(name: str) -> None:
    kind = SteeredRecipe if name.startswith("steered") else StudentRecipe
    recipe = kind.load(name)
    assert kind.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    table = recipe.drafter
    assert (table.hard > 0, table.kl > 0) == ((True, False) if name.startswith("pretrained") else (False, True))


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_distilled_and_steered_differ_in_the_steering_alone(model: str) -> None:
    steered, distilled = (
        kind.load(f"{name}-{model}").to_dict()
        for kind, name in ((SteeredRecipe, "steered"), (StudentRecipe, "distilled"))
    )
    for values in (steered, distilled):
        del values["method"]
    steered["drafter"] = {name: steered["drafter"][name] for name in distilled["drafter"]}
    assert steered == distilled
    assert distilled["drafter"]["layers"] == StudentRecipe.load(f"pretrained-{model}").drafter.layers


def test_the_papers_schedule() -> None:
    """Appendix A.5."""
    recipe = SteeredRecipe.load("steered")
    assert (recipe.epochs, recipe.warmup_steps, recipe.decay, recipe.optimizer) == (6, 1000, "cosine", "adamw")
    assert (recipe.grad_clip, recipe.clip_by, recipe.texts) == (0.5, "norm", 24)
    assert recipe.batch_tokens == recipe.texts * recipe.seq_len == 24 * 256
    text = recipe.self_text
    assert (text.temperatures, text.shares(), recipe.answers) == ((1.0,), {"sampled": 1.0}, "sampled")
    assert text.prompt_tokens + text.new_tokens == 256
    table = recipe.drafter
    assert (table.draft_length, table.kl, table.frozen, table.offsets) == (8, 1.0, False, "text")


def test_steps_and_epochs_are_not_both_a_length(verifier_folder: Path, tmp_path: Path) -> None:
    command = ["steered", "--verifier", str(verifier_folder), "--out", str(tmp_path), "--steps", "2", "--epochs", "1"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UsageError)
    assert result.exception.message == "--steps and --epochs both give the length"
