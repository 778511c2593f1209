"""A drafter's run: learning, resuming, publishing, and refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from redraft.errors import CheckpointError, DataError, TrainingError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter
from redraft.train.acceptance import DRAFT_LOGIT_SCALES
from redraft.train.document_text import DocumentText, prompts_from
from redraft.train.drafter_config import SelfText
from redraft.train.drafter_run import COUNTS, TEXTS, train_drafter
from redraft.train.loop import load_checkpoint, save_checkpoint
from redraft.train.objectives import COMMANDS, METHODS, find_training
from redraft.train.progress import PROGRESS, read_progress
from redraft.train.publish import publish_drafter
from redraft.train.verifier_model import open_verifier
from tests.train.conftest import LYANNA, KillAfter, Killed, altered


@pytest.fixture(scope="module")
def two(sources):
    return {kind: sources[kind] for kind in ("code", "prose")}


def go(folder, sources, out, recipe=LYANNA, report=None, **options):
    return train_drafter("lyanna", folder, sources, out, recipe, checkpoint_every=4, report=report, **options)


@pytest.fixture(scope="module")
def finished(lyanna_run):
    return lyanna_run / "run"


def drafter_state(out):
    return load_checkpoint(out)["objective"]


def test_resumed_run_equals_an_uninterrupted_one(verifier_folder, two, lyanna_run, tmp_path):
    whole = json.loads((lyanna_run / "losses.json").read_text())
    with pytest.raises(Killed):
        go(verifier_folder, two, tmp_path, report=KillAfter(step=7))
    assert [line["step"] for line in read_progress(tmp_path / PROGRESS)] == [3, 6]
    report = KillAfter()
    assert go(verifier_folder, two, tmp_path, report=report, resume=True) == 4
    for step in range(5, 9):  # threads add in any order, so the last digit may differ
        assert report.losses[step] == pytest.approx(whole[str(step)], rel=1e-5)
    assert not report.written  # texts are not written again
    ours, theirs = drafter_state(tmp_path), drafter_state(lyanna_run / "run")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    lines = [[line["step"] for line in read_progress(run / PROGRESS)] for run in (tmp_path, lyanna_run / "run")]
    assert lines[0] == lines[1]  # step 6, run twice, has one line


def medusa(**changes):
    fields = ("steps", "batch_tokens", "seq_len", "decay_seq_len", "held_out_every", "self_text")
    return find_training("medusa").recipe(**{**{name: getattr(LYANNA, name) for name in fields}, **changes})


def test_a_start_that_was_interrupted_keeps_its_texts(verifier_folder, two, tmp_path):
    """A restart uses written texts again, but drops texts of other prompts. Medusa's configuration has tuples, which
    are lists in JSON."""

    def killed(recipe, **end):
        report = KillAfter(**end)
        with pytest.raises(Killed):
            train_drafter("medusa", verifier_folder, two, tmp_path, recipe, report=report)
        return set(report.written)

    killed(medusa(), text="prose.train.0")
    names = sorted(path.name for path in (tmp_path / TEXTS).iterdir())
    assert names == ["code.train.0.rows.npy", "code.train.1.rows.npy", "code.train.npy", "prose.train.npy"]
    expected = {"prose.train.0", "prose.train.1", "code.held_out.0", "prose.held_out.0"}
    assert killed(medusa(), step=1) == expected
    assert "code.train.0" in killed(medusa(seed=1), text="code.train.0")


def test_a_run_may_begin_with_published_medusa_heads(verifier_folder, two, tmp_path):
    """Their measured accuracies are no part of their form."""
    recipe = medusa(steps=1, self_text=replace(LYANNA.self_text, greedy=0.0, sampled=0.0))
    train_drafter("medusa", verifier_folder, two, tmp_path / "first", recipe)
    publish_drafter(tmp_path / "first", tmp_path / "heads")
    start = tmp_path / "heads"
    train_drafter("medusa", verifier_folder, two, tmp_path / "second", recipe, start=start)
    other = replace(recipe, drafter=replace(recipe.drafter, heads=3))
    with pytest.raises(
        CheckpointError, match="begin this run: it has heads = 4, the recipe's drafter has heads = 3; give a"
    ):
        train_drafter("medusa", verifier_folder, two, tmp_path / "third", other, start=start)


def test_only_a_run_can_be_published(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        with pytest.raises(TrainingError, match=f"{name} is not a drafter's run: it has no run.json; give a folder"):
            publish_drafter(tmp_path / name, tmp_path / "out")


def test_an_interrupted_write_leaves_no_text(verifier_folder, two, tmp_path, monkeypatch):
    def torn(file, array):
        file.write(b"half")
        raise Killed

    monkeypatch.setattr("redraft.train.document_text.np.save", torn)
    with pytest.raises(Killed):
        go(verifier_folder, two, tmp_path)
    assert not list((tmp_path / TEXTS).glob("*.npy"))


def test_progress_has_losses_and_held_out_acceptance_of_every_kind(lyanna_run):
    lines = read_progress(lyanna_run / "run" / PROGRESS)
    assert [line["step"] for line in lines] == [3, 6, 8]
    losses = json.loads((lyanna_run / "losses.json").read_text())
    assert lines[1]["losses"]["mse"] == pytest.approx(sum(losses[step]["mse"] for step in "456") / 3)
    for line in lines:
        assert set(line["acceptance"]) == {"code", "prose"}
        for found in line["acceptance"].values():
            assert len(found["top"]) == len(found["wide"]) == 3
            assert found["starts"][0] == 3 * (6 + 20 - 3 - 5)  # rows by starts from the prompt's last token on


def test_prompts_come_from_their_own_side_of_the_split(finished, verifier_folder, two):
    """A held-out document in training would improve every figure wrongly."""
    texts = finished / TEXTS
    for kind in two:
        sides = {}
        for side in ("train", "held_out"):
            stream = np.load(texts / f"{kind}.{side}.npy").tolist()
            sides[side] = " ".join(map(str, stream)) + " "
            rows = np.load(texts / f"{kind}.{side}.0.rows.npy")
            assert all(" ".join(map(str, row[:6])) + " " in sides[side] for row in rows.tolist())
        document = sides["held_out"].split()[:60]
        assert " ".join(document) not in sides["train"]


def test_token_counts_are_of_every_stream(finished):
    texts, expected = finished / TEXTS, np.zeros(400, np.int64)
    for path in texts.glob("*.npy"):
        if "held_out" not in path.name:
            np.add.at(expected, np.load(path).reshape(-1).astype(int), 1)
    assert np.array_equal(np.load(finished / COUNTS), expected)


def test_published_drafter_loads_as_it_was_trained(finished, lyanna_run):
    published = lyanna_run / "published"
    checkpoint = DrafterCheckpoint.open(published)
    config = checkpoint.configure(LyannaConfig)
    assert (config.rank, config.steps, config.hidden_size, config.vocab_size) == (4, 3, 32, 400)
    drafter = LyannaDrafter(config)
    counts = checkpoint.load(drafter).counts
    assert torch.equal(counts, torch.from_numpy(np.load(finished / COUNTS)))
    trained = drafter_state(finished)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, trained[f"drafter.{name}"].bfloat16().float())
    card = (published / "README.md").read_text(encoding="utf-8")
    measured = read_progress(finished / PROGRESS)[-1]["acceptance"]["code"]
    assert f"{measured['top'][0]:.3f} / {measured['wide'][0]:.3f}" in card
    assert "{" not in card
    training = json.loads((published / "config.json").read_text())["training"]
    assert training["recipe"]["steps"] == 8
    assert training["spent"]["tokens"] == sum(line["tokens"] for line in read_progress(finished / PROGRESS))


def test_a_run_published_on_its_way_is_as_sharp_as_last_measured(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    lines = read_progress(run / PROGRESS)
    assert all(line["draft_logit_scale"] in DRAFT_LOGIT_SCALES for line in lines)
    lines[-1]["step"] += 1  # measured after the checkpoint
    lines[-2]["draft_logit_scale"] = DRAFT_LOGIT_SCALES[5]
    (run / PROGRESS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    publish_drafter(run, tmp_path / "published")
    config = DrafterCheckpoint.open(tmp_path / "published").configure(LyannaConfig)
    assert config.draft_logit_scale == DRAFT_LOGIT_SCALES[5]


def test_a_card_names_its_optimizer(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    state, names = (
        load_checkpoint(run),
        {"adamw": "AdamW (learning rate 3e-05)", "scaled_adam": "Adam, its steps divided by the rms"},
    )
    for optimizer, name in names.items():
        state["recipe"]["optimizer"] = optimizer
        save_checkpoint(run, state)
        publish_drafter(run, tmp_path / "published")
        assert name in (tmp_path / "published/README.md").read_text()


def test_a_run_that_was_not_measured_is_not_published_until_it_is(verifier_folder, two, finished, tmp_path):
    """With a draft logit scale of 1, its trees would be too wide and slow without a visible reason."""
    run = shutil.copytree(finished, tmp_path / "run")
    (run / PROGRESS).unlink()
    with pytest.raises(TrainingError, match=r"has no measurement up to step 8; continue .* --resume"):
        publish_drafter(run, tmp_path / "published")
    assert not (tmp_path / "published").exists()
    assert go(verifier_folder, two, run, resume=True) == 0
    publish_drafter(run, tmp_path / "published")
    (line,), whole = read_progress(run / PROGRESS), read_progress(finished / PROGRESS)[-1]
    assert (line["step"], line["acceptance"], line["draft_logit_scale"]) == (
        8,
        whole["acceptance"],
        whole["draft_logit_scale"],
    )


def test_resuming_something_else_is_refused(verifier_folder, two, sources, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(TrainingError, match=r"matrix_lr was 0\.02, it is 0\.5"):
        go(verifier_folder, two, out, replace(LYANNA, matrix_lr=0.5), resume=True)
    with pytest.raises(TrainingError, match="drafter was"):
        go(verifier_folder, two, out, replace(LYANNA, drafter=replace(LYANNA.drafter, alpha=0.1)), resume=True)
    report, spec = KillAfter(), replace(LYANNA.self_text, temperatures=(0.0, 0.5))
    with pytest.raises(TrainingError, match="self_text was"):
        go(verifier_folder, two, out, replace(LYANNA, self_text=spec), report, resume=True)
    assert not report.written
    before = {name: (out / name).read_bytes() for name in (COUNTS, "data.json", "run.json")}
    with pytest.raises(TrainingError, match="other data"):
        go(verifier_folder, two | {"prose": sources["code"]}, out, resume=True)
    assert before == {name: (out / name).read_bytes() for name in before}
    with pytest.raises(TrainingError, match="another verifier"):
        go(altered(verifier_folder, tmp_path / "other"), two, out, resume=True)
    with pytest.raises(UsageError, match="already holds a run"):
        go(verifier_folder, two, out)
    with pytest.raises(TrainingError, match="to resume"):
        go(verifier_folder, two, tmp_path / "nothing", resume=True)
    (out / "checkpoint.pt").unlink()
    with pytest.raises(TrainingError, match="no step was saved; start the run without --resume"):
        go(verifier_folder, two, out, resume=True)


def test_corpus_shorter_than_a_row_is_refused_before_any_text_is_written(verifier_folder, two, tmp_path):
    """The first batch would find the error an hour too late."""
    report = KillAfter()
    material = DocumentText(tmp_path, open_verifier(verifier_folder, "cpu"), LYANNA, two, report.writing)
    with pytest.raises(DataError, match=r"corpus of code has .* tokens, too few for rows of 16"):
        material.plan(lookahead=10**6)
    assert not report.written


def test_rows_longer_than_the_verifiers_positions_are_refused(verifier_folder, two, tmp_path):
    with pytest.raises(UsageError, match=r"rows of 67 tokens .* must fit the verifier's 64 positions"):
        go(verifier_folder, two, tmp_path, replace(LYANNA, seq_len=64, decay_seq_len=64))


def test_kinds_that_do_not_match_are_refused(verifier_folder, two, tmp_path):
    with pytest.raises(UsageError, match="the recipe has weights for"):
        go(verifier_folder, two, tmp_path, replace(LYANNA, weights={"code": 1.0}))
    with pytest.raises(UsageError, match="no --data"):
        go(verifier_folder, {}, tmp_path, replace(LYANNA, weights={"code": 1.0}))


def test_run_without_documents_learns_from_the_verifiers_own_text(verifier_folder, tmp_path):
    own = SelfText(rows=8, prompt_tokens=3, new_tokens=30, temperatures=(0.0, 0.5, 1.0), text=0.0, held_out_rows=2)
    with pytest.raises(UsageError, match="recipe draws documents"):
        go(verifier_folder, {}, tmp_path)
    epochs = replace(LYANNA, self_text=own, epochs=1, batch_tokens=512)
    assert go(verifier_folder, {}, tmp_path, epochs) == 2  # 3 * 8 * 33 tokens
    facts = json.loads((tmp_path / "data.json").read_text())
    assert facts["kinds"]["self"] == {"tokens": {"greedy": 8 * 33, "sampled": 2 * 8 * 33}}
    rows = np.load(tmp_path / TEXTS / "self.train.0.rows.npy")
    held_out = np.load(tmp_path / TEXTS / "self.held_out.0.rows.npy")
    assert (rows[:, 0] == 0).all()  # BOS
    assert not {tuple(row) for row in held_out[:, :3].tolist()} & {tuple(row) for row in rows[:, :3].tolist()}


def test_verifier_folder_that_is_missing_is_refused(two, tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        go(tmp_path / "absent", two, tmp_path / "run")


def test_every_method_is_found_and_has_a_recipe_of_its_commands_name():
    assert tuple(COMMANDS.values()) == METHODS
    for command, name in COMMANDS.items():
        method = find_training(name)
        assert method.recipe.load(method.schedule or command).method == name
    with pytest.raises(CheckpointError, match="unknown drafting method 'absent'"):
        find_training("absent")


def test_prompts_need_a_longer_stream():
    with pytest.raises(DataError, match="7 tokens, too few for prompts of 7"):
        prompts_from(np.arange(7), 1, 7, 0)
