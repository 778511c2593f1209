"""Students: plain, distilled and steered runs, runs that begin with a drafter, and both published forms."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from redraft.cli.train import app
from redraft.errors import CheckpointError, TrainingError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig
from redraft.train.drafter_config import SelfText
from redraft.train.drafter_evaluate import open_drafter
from redraft.train.drafter_run import train_drafter
from redraft.train.loop import load_checkpoint
from redraft.train.objectives import find_training
from redraft.train.objectives.decoder import SteeringTable, StudentTable
from redraft.train.objectives.decoder_drafter import DEPTHS
from redraft.train.progress import PROGRESS, read_progress
from redraft.train.publish import publish_drafter, publish_model
from redraft.train.trained_drafter import TrainedDrafter
from tests.train.conftest import KillAfter

StudentRecipe = find_training("draft_model").recipe
SteeredRecipe = find_training("steered").recipe

SCHEDULE = dict(
    steps=6, batch_tokens=128, seq_len=16, decay_seq_len=16, warmup_steps=2, optimizer="adam", lr=0.003,
    held_out_every=3, evaluate_every=6,
)  # fmt: skip
PLAIN = SelfText(text=1.0, greedy=0.0, sampled=0.0, prompt_tokens=6, new_tokens=20, held_out_rows=3)
OWN = replace(PLAIN, text=0.0, sampled=1.0, temperatures=(1.0,), rows=12)
STUDENT = dict(layers=(0, 3), draft_vocabulary=300)
PRETRAINED = StudentRecipe(drafter=StudentTable(**STUDENT, kl=0.0, hard=1.0), self_text=PLAIN, **SCHEDULE)
DISTILLED = StudentRecipe(drafter=StudentTable(**STUDENT), self_text=OWN, **SCHEDULE)
STEERED = SteeredRecipe(drafter=SteeringTable(**STUDENT), self_text=OWN, **SCHEDULE)
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def go(verifier_folder, prose, tmp_path_factory):
    """Run a recipe. Returns its losses by step. Runs on the verifier's text share it."""
    texts = tmp_path_factory.mktemp("texts")

    def run(out, recipe, **options):
        report, kept = KillAfter(), texts if recipe.self_text == OWN else None
        train_drafter(recipe.method, verifier_folder, prose, out, recipe, kept=kept, report=report, **options)
        return report.losses

    return run


@pytest.fixture(scope="module")
def pretrained(go, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "run"
    assert set(go(out, PRETRAINED)[1]) == {"ce", "loss"}, "plain text needs no verifier"
    return out


@pytest.fixture(scope="module")
def steered_run(go, pretrained, tmp_path_factory):
    """A finished run, and its first loss."""
    out = tmp_path_factory.mktemp("steered") / "run"
    return out, go(out, STEERED, start=pretrained)[1]["kl"]


@pytest.fixture(scope="module")
def published(pretrained, tmp_path_factory):
    out = tmp_path_factory.mktemp("student") / "published"
    publish_drafter(pretrained, out)
    return out


def weights_of(run):
    return {name.removeprefix("drafter."): t for name, t in load_checkpoint(run)["objective"].items()}


def test_a_run_begins_with_a_run_or_a_published_drafter(go, pretrained, published, steered_run, tmp_path):
    """At first W_s is 0, so a steered student begins with the loss of the plain one, on the same text.

    A steered one begins with a steered one too, as in the paper's seventh epoch. Resuming needs no --start, but takes
    the same one only.
    """

    def first(name, recipe, start):
        return go(tmp_path / name, replace(recipe, steps=1), start=start)[1]["kl"]

    steered, first_steered = steered_run
    assert first("plain", DISTILLED, pretrained) == pytest.approx(first_steered, rel=1e-5)
    fresh = first("fresh", DISTILLED, None)
    assert fresh != pytest.approx(first_steered, rel=1e-3)
    assert abs(first("published", STEERED, published) - first_steered) < 0.1 * abs(fresh - first_steered)
    assert first("again", STEERED, steered) != pytest.approx(first_steered, rel=1e-3)
    for start in (None, steered):
        go(tmp_path / "again", replace(STEERED, steps=1), start=start, resume=True)
    with pytest.raises(TrainingError, match="began with another drafter; give the same --start"):
        go(tmp_path / "again", replace(STEERED, steps=1), start=pretrained, resume=True)


def test_a_published_student_has_8_bits_and_neither_embedding_nor_head(pretrained, published, verifier):
    stored, trained = load_file(str(published / "model.safetensors")), weights_of(pretrained)
    matrices = {name for name, tensor in trained.items() if tensor.dim() == 2}
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.int8} == matrices
    assert set(stored) == set(trained) | {"token_counts", "draft_vocabulary", *(f"{name}.scales" for name in matrices)}
    checkpoint = DrafterCheckpoint.open(published)
    config = checkpoint.configure(DraftModelConfig)
    assert (checkpoint.method, config.layers, config.draft_vocab_size) == ("draft_model", (0, 3), 300)
    (line,) = read_progress(pretrained / PROGRESS)
    assert config.draft_logit_scale == line["draft_logit_scale"]
    assert len(line["acceptance"]["prose"]["top"]) == DEPTHS
    objective = open_drafter(checkpoint, verifier)
    for name, tensor in objective.drafter.state_dict().items():
        assert (tensor - trained[name]).abs().max() <= 0.01 * trained[name].abs().max()
    card = (published / "README.md").read_text(encoding="utf-8")
    assert "`redraft train student`" in card
    assert "has matrices in 8 bits" in card


def test_a_published_steered_drafter_loads_as_it_was_trained(steered_run, verifier, tmp_path):
    steered, _ = steered_run
    training = publish_drafter(steered, tmp_path)
    opened = DrafterCheckpoint.open(tmp_path)
    assert (opened.method, opened.config["hidden_states"]) == ("steered", ["2", "1"])
    objective = open_drafter(opened, verifier)
    for name, tensor in weights_of(steered).items():
        assert (objective.drafter.state_dict()[name] - tensor).abs().max() <= 0.01 * tensor.abs().max()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"It began with the drafter whose weights have the digest {training['start'][:12]}…." in card
    assert "`redraft train steered`" in card
    with pytest.raises(UsageError, match="is not a model of its own"):
        publish_model(steered, tmp_path / "plain", verifier, ())


def plain_form(folder, out, verifier_folder):
    command = ["publish", str(folder), "--out", str(out), "--format", "transformers", "--json"]
    result = RUNNER.invoke(app, [*command, "--verifier", str(verifier_folder)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"out": str(out)}
    return AutoModelForCausalLM.from_pretrained(str(out))


def test_transformers_runs_the_plain_form(pretrained, verifier, verifier_folder, tmp_path):
    model = plain_form(pretrained, tmp_path, verifier_folder)
    assert model.config.num_hidden_layers == 2
    tokens = torch.randint(0, 400, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = TrainedDrafter.open(pretrained).module.eval()(verifier.model.get_input_embeddings()(tokens))
        expected = hidden @ verifier.model.get_output_embeddings().weight.T
        assert torch.allclose(model(tokens).logits, expected, atol=1e-4)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o044
    assert "lm_head.weight" not in load_file(str(tmp_path / "model.safetensors"))  # tied, as the verifier's
    tokenizers = [AutoTokenizer.from_pretrained(str(folder)) for folder in (tmp_path, verifier_folder)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assisted = verifier.model.generate(tokens[:1], assistant_model=model, max_new_tokens=12, do_sample=False)
    plain = verifier.model.generate(tokens[:1], max_new_tokens=12, do_sample=False)
    assert torch.equal(assisted, plain)


def test_a_published_students_plain_form_has_its_8_bit_weights(published, verifier_folder, tmp_path):
    whole = plain_form(published, tmp_path, verifier_folder).state_dict()
    found = DraftModel(DrafterCheckpoint.open(published).configure(DraftModelConfig))
    DrafterCheckpoint.open(published).load(found)
    assert all(torch.equal(whole[name], tensor) for name, tensor in found.state_dict().items())


def test_a_plain_form_needs_the_verifier_of_the_training(pretrained, verifier, tmp_path):
    result = RUNNER.invoke(app, ["publish", str(pretrained), "--out", str(tmp_path), "--format", "transformers"])
    assert isinstance(result.exception, UsageError)
    assert "needs the verifier's embedding" in result.exception.message
    other = replace(verifier)
    other.__dict__["identity"] = replace(other.identity, weights=("other",))
    with pytest.raises(CheckpointError, match="was trained for another verifier"):
        publish_model(pretrained, tmp_path, other, ())
    assert not list(tmp_path.iterdir())


def test_drafters_that_a_run_cannot_begin_with_are_refused_in_one_line(
    go, pretrained, steered_run, published, tmp_path
):
    steered, _ = steered_run

    def line(start, recipe=STEERED, **table):
        with pytest.raises((CheckpointError, TrainingError, UsageError)) as caught:
            go(tmp_path / "run", replace(recipe, drafter=replace(recipe.drafter, **table)), start=start)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists(), "nothing is written before"
        return str(caught.value)

    assert "it has layers = (0, 3), the recipe's drafter has layers = (0, 2); give" in line(pretrained, layers=(0, 2))
    assert "reads hidden states 2, 1, expected 0" in line(steered, hidden_states=("0",))
    assert "reads hidden states 2, 1, expected none" in line(steered, DISTILLED)
    assert "it has steering = up, the recipe's drafter has steering = after" in line(steered, steering="after")
    assert "it has steering_norm = True, the recipe's" in line(steered, steering_norm=False)
    assert "is not a drafter: config.json cannot be read" in line(tmp_path / "absent")
    assert "drafter.init = 'mtp' is not possible for draft_model" in line(None, DISTILLED, init="mtp")
    values = json.loads((published / "config.json").read_text())
    values["verifier"]["weights"] = ["0" * 64]
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(values))
    (tmp_path / "published" / "model.safetensors").symlink_to(published / "model.safetensors")
    assert "was trained for another verifier; give a --start" in line(tmp_path / "published")
    other = find_training("lyanna").recipe(**{**SCHEDULE, "steps": 1}, self_text=PLAIN)
    assert "is a drafter of another method than the recipe's" in line(pretrained, other)


def test_options_that_do_not_fit_the_command_are_refused(verifier_folder, prose, tmp_path):
    command = ["student", "--verifier", str(verifier_folder), "--data", f"prose={prose['prose']}"]
    result = RUNNER.invoke(app, [*command, "--out", str(tmp_path), "--config", "lyanna"])
    assert isinstance(result.exception, UsageError)
    result = RUNNER.invoke(app, [*command, "--out", str(tmp_path), "--steps", "2", "--epochs", "1"])
    assert isinstance(result.exception, UsageError)
    assert result.exception.message == "--steps and --epochs both give the length"
