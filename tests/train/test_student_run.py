"""A student's run: learning, resuming, and both published forms."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from redraft.cli.train import app
from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig
from redraft.train.acceptance import DRAFT_LOGIT_SCALES
from redraft.train.checkpoint import load_checkpoint
from redraft.train.drafter_config import SelfText
from redraft.train.drafter_evaluate import open_drafter
from redraft.train.drafter_log import read_progress
from redraft.train.drafter_publish import publish_drafter
from redraft.train.drafter_run import PROGRESS, train_drafter
from redraft.train.model_publish import publish_model
from redraft.train.objectives import find_training
from redraft.train.objectives.decoder import StudentTable
from redraft.train.objectives.decoder_drafter import DEPTHS
from redraft.train.verifier_model import open_verifier
from tests.train.test_drafter_run import KillAfter, Killed

StudentRecipe = find_training("draft_model").recipe
RECIPE = StudentRecipe(
    steps=8,
    batch_tokens=128,
    seq_len=16,
    decay_seq_len=16,
    warmup_steps=2,
    optimizer="adam",
    lr=0.003,
    held_out_every=3,
    evaluate_every=4,
    drafter=StudentTable(layers=(0, 3), draft_vocabulary=300),
    self_text=SelfText(rows=12, prompt_tokens=6, new_tokens=20, held_out_rows=3),
)
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def prose(sources):
    return {"prose": sources["prose"]}


def go(folder, sources, out, recipe=RECIPE, report=None, **options):
    return train_drafter("draft_model", folder, sources, out, recipe, checkpoint_every=4, report=report, **options)


@pytest.fixture(scope="module")
def finished(verifier_folder, prose, tmp_path_factory):
    out = tmp_path_factory.mktemp("student") / "run"
    report = KillAfter()
    assert go(verifier_folder, prose, out, report=report) == 8
    return out, report.losses


@pytest.fixture(scope="module")
def published(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("student") / "published"
    publish_drafter(finished[0], out)
    return out


def student_of(run):
    """The student of a run's checkpoint."""
    values = json.loads((run / "run.json").read_text(encoding="utf-8"))["config"]
    student = DraftModel(DraftModelConfig(**values | {"layers": tuple(values["layers"])}))
    state = load_checkpoint(run)["objective"]
    student.load_state_dict({name.removeprefix("drafter."): tensor for name, tensor in state.items()})
    return student.eval()


def test_the_divergence_falls(verifier_folder, prose, tmp_path):
    report = KillAfter()
    go(verifier_folder, prose, tmp_path / "run", replace(RECIPE, steps=60, evaluate_every=60), report)
    first, last = ([report.losses[step]["kl"] for step in steps] for steps in (range(1, 6), range(56, 61)))
    assert 0 < sum(last) < 0.8 * sum(first)


def test_resumed_run_equals_an_uninterrupted_one(verifier_folder, prose, finished, tmp_path):
    out, whole = finished
    with pytest.raises(Killed):
        go(verifier_folder, prose, tmp_path, report=KillAfter(step=7))
    report = KillAfter()
    assert go(verifier_folder, prose, tmp_path, report=report, resume=True) == 4
    for step in range(5, 9):
        assert report.losses[step] == pytest.approx(whole[step], rel=1e-4)
    ours, theirs = (load_checkpoint(run)["objective"] for run in (tmp_path, out))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


def test_progress_has_acceptance_of_every_depth(finished):
    lines = read_progress(finished[0] / PROGRESS)
    assert [line["step"] for line in lines] == [4, 8]
    assert all(len(line["acceptance"]["prose"][name]) == DEPTHS for line in lines for name in ("top", "wide"))
    assert lines[-1]["draft_logit_scale"] in DRAFT_LOGIT_SCALES


def test_a_published_student_has_8_bits_and_neither_embedding_nor_head(finished, published, verifier_folder):
    stored = load_file(str(published / "model.safetensors"))
    student = student_of(finished[0])
    matrices = {name for name, tensor in student.state_dict().items() if tensor.dim() == 2}
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.int8} == matrices
    others = {"token_counts", "draft_vocabulary", *(f"{name}.scales" for name in matrices)}
    assert set(stored) == set(student.state_dict()) | others
    checkpoint = DrafterCheckpoint.open(published)
    config = checkpoint.configure(DraftModelConfig)
    assert (checkpoint.method, config.layers, config.draft_vocab_size) == ("draft_model", (0, 3), 300)
    assert config.draft_logit_scale == read_progress(finished[0] / PROGRESS)[-1]["draft_logit_scale"]
    objective = open_drafter(checkpoint, open_verifier(verifier_folder, "cpu"))
    for name, tensor in objective.drafter.state_dict().items():
        assert (tensor - student.state_dict()[name]).abs().max() <= 0.01 * student.state_dict()[name].abs().max()
    card = (published / "README.md").read_text(encoding="utf-8")
    assert "`redraft train student`" in card
    assert "has matrices in 8 bits" in card


def plain_form(folder, out, verifier_folder):
    command = ["publish", str(folder), "--out", str(out), "--format", "transformers", "--json"]
    result = RUNNER.invoke(app, [*command, "--verifier", str(verifier_folder)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"out": str(out)}
    return AutoModelForCausalLM.from_pretrained(str(out))


def test_transformers_runs_the_plain_form(finished, verifier_folder, tmp_path):
    model = plain_form(finished[0], tmp_path, verifier_folder)
    assert model.config.num_hidden_layers == 2
    verifier = open_verifier(verifier_folder, "cpu")
    tokens = torch.randint(0, 400, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = student_of(finished[0])(verifier.model.get_input_embeddings()(tokens))
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
    model = plain_form(published, tmp_path, verifier_folder)
    found = DraftModel(DrafterCheckpoint.open(published).configure(DraftModelConfig))
    DrafterCheckpoint.open(published).load(found)
    whole = model.state_dict()
    assert all(torch.equal(whole[name], tensor) for name, tensor in found.state_dict().items())


def test_a_plain_form_needs_the_verifier_of_the_training(finished, verifier_folder, tmp_path):
    result = RUNNER.invoke(app, ["publish", str(finished[0]), "--out", str(tmp_path), "--format", "transformers"])
    assert isinstance(result.exception, UsageError)
    assert "needs the verifier's embedding" in result.exception.message
    other = replace(open_verifier(verifier_folder, "cpu"))
    other.__dict__["identity"] = replace(other.identity, weights=("other",))
    with pytest.raises(CheckpointError, match="was trained for another verifier"):
        publish_model(finished[0], tmp_path, other, ())
    assert not list(tmp_path.iterdir())


def test_a_way_to_begin_that_a_student_lacks_is_refused(verifier_folder, prose, tmp_path):
    recipe = replace(RECIPE, drafter=replace(RECIPE.drafter, init="mtp"))
    with pytest.raises(UsageError, match=r"drafter\.init = 'mtp' is not possible for draft_model"):
        go(verifier_folder, prose, tmp_path, recipe)


@pytest.mark.parametrize("name", ["student", "student-smollm2", "student-tiny"])
def test_shipped_recipes_load_and_go_through_plain_values(name):
    recipe = StudentRecipe.load(name)
    assert StudentRecipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_the_command_is_student(verifier_folder, sources, tmp_path):
    command = ["student", "--verifier", str(verifier_folder), "--data", f"prose={sources['prose']}"]
    result = RUNNER.invoke(app, [*command, "--out", str(tmp_path), "--config", "lyanna"])
    assert result.exit_code != 0
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'method = "draft_model"\nbatch_tokens = 64\nseq_len = 16\ndecay_seq_len = 16\nheld_out_every = 3\n'
        "[self_text]\nrows = 4\nprompt_tokens = 6\nnew_tokens = 20\nheld_out_rows = 2\n",
        encoding="utf-8",
    )
    run = tmp_path / "run"
    result = RUNNER.invoke(app, [*command, "--out", str(run), "--config", str(recipe), "--steps", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads((run / "run.json").read_text())["config"]["layers"] == [0, 1, 2, 3]
