"""`redraft train text`: a chat verifier writes texts, and drafters learn from them."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from redraft.cli.main import app
from redraft.errors import DataError, TrainingError, UsageError
from redraft.records import to_plain
from redraft.train.data import load_corpus
from redraft.train.drafter_run import train_drafter
from redraft.train.objectives import find_training
from redraft.train.objectives.decoder import SteeringTable
from redraft.train.objectives.lyanna import LyannaTable
from redraft.train.progress import ProgressReport
from redraft.train.publish import publish_drafter
from redraft.train.questions import ChatTurns, word_problems
from redraft.train.text_batches import WrittenText
from redraft.train.text_shards import PACKED, Shards, load_facts, pack, save_facts, split
from redraft.train.verifier_model import open_verifier
from redraft.train.write_text import TextRecipe, compute_states, write_text, written_tokens
from redraft.train.writer import Engines
from tests.train.conftest import altered

LyannaRecipe = find_training("lyanna").recipe
SteeredRecipe = find_training("steered").recipe

TEMPLATE = "{% for m in messages %}<q>{{ m.content }}</q>{% endfor %}<a>"
RECIPE = TextRecipe(
    texts={"chat": 6, "math": 8, "prose": 10}, new_tokens=8, question_tokens=12, rows=8, hidden_states=("last", "2"),
    held_out_every=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def chat_folder(verifier_folder, tmp_path_factory):
    """The verifier with a chat template. Positions are few, so questions must be short."""
    out = shutil.copytree(verifier_folder, tmp_path_factory.mktemp("chat") / "verifier")
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return out


@pytest.fixture(scope="module")
def verifier(chat_folder):
    return open_verifier(chat_folder, "cpu")


@pytest.fixture(scope="module")
def corpora(sources):
    return {
        "math": load_corpus("math", sources["word_problems"], 3),
        "prose": load_corpus("prose", sources["prose"], 3),
    }


def write(verifier, *args):
    """Write texts. The toy verifier hardly ever ends its own questions: any token may end them."""
    turns = replace(ChatTurns.of(str(verifier.texts), verifier.ends), ends=frozenset(range(0, verifier.vocab_size, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTurns, "of", lambda folder, ends: turns)
        write_text(verifier, *args)


@pytest.fixture(scope="module")
def asked(verifier, corpora, tmp_path_factory):
    out = tmp_path_factory.mktemp("texts")
    write(verifier, corpora, RECIPE, out)
    return out


@pytest.fixture(scope="module")
def packed(asked, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed")
    pack(asked, out)
    return out


def texts_of(folder):
    for shard in Shards(folder):
        yield from split(shard.array("lengths"), shard.array("tokens"))


def test_every_kind_is_answered_through_the_template(asked, verifier):
    kinds = np.concatenate([shard.array("kinds") for shard in Shards(asked)])
    assert sorted(kinds.tolist()) == ["chat"] * 6 + ["math"] * 8 + ["prose"] * 10
    for text in texts_of(asked):
        assert verifier.tokenizer.decode(text.tolist(), skip_special_tokens=False).startswith("<q>")
        assert "</q><a>" in verifier.tokenizer.decode(text.tolist(), skip_special_tokens=False)
    assert set(written_tokens(Shards(asked))) == {"chat", "math", "prose"}


def test_writing_continues_after_an_interrupt_with_the_same_texts(asked, verifier, corpora, tmp_path):
    shutil.copytree(asked, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "shards" / "0001")
    written = []
    write(verifier, corpora, RECIPE, tmp_path / "again", lambda *line: written.append(line[:2]))
    assert written == [("texts", 2)]
    for one, other in zip(texts_of(asked), texts_of(tmp_path / "again"), strict=True):
        assert one.tolist() == other.tolist()


def test_a_folder_of_another_recipe_is_refused_and_kept(asked, verifier, corpora):
    before = sorted(path.name for path in asked.rglob("*"))
    with pytest.raises(TrainingError, match="holds texts of a run that differs in its recipe"):
        write_text(verifier, corpora, replace(RECIPE, new_tokens=9), asked)
    other = {**corpora, "prose": corpora["math"]}
    with pytest.raises(TrainingError, match="holds texts of a run that differs in its data"):
        write_text(verifier, other, RECIPE, asked)
    assert sorted(path.name for path in asked.rglob("*")) == before


def limit_disk(monkeypatch, free):
    """`free` bytes above those that are left free."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("redraft.train.text_shards.shutil.disk_usage", lambda path: usage(1, 1, (4 << 30) + free))


def test_without_space_tokens_are_kept_alone_and_it_says_so(verifier, corpora, tmp_path, monkeypatch):
    """The need is that of the longest texts possible: two hidden states of 32 halves, 64 ids and halves, a sum."""
    lines = []
    recipe = replace(RECIPE, texts={"math": 8})
    limit_disk(monkeypatch, 1 << 30)
    write_text(verifier, corpora, recipe, tmp_path / "enough", warn=lines.append)
    assert not lines
    (shard,) = Shards(tmp_path / "enough")
    longest = max(shard.array("prompts")) + recipe.new_tokens
    need = 8 * longest * (2 * (32 + 2) + 64 * 6 + 4)
    assert shard.array("tokens").size <= 8 * longest
    limit_disk(monkeypatch, need + 1)
    write_text(verifier, corpora, recipe, tmp_path / "just", warn=lines.append)
    assert not lines
    limit_disk(monkeypatch, need)
    write_text(verifier, corpora, recipe, tmp_path / "out", warn=lines.append)
    assert lines == ["the disk has too little space for hidden states: shard 0 keeps tokens alone"]
    (shard,) = Shards(tmp_path / "out")
    assert "tokens" in shard
    assert "hidden8.last" not in shard


def test_states_of_packed_texts_are_computed_without_writing_again(asked, packed, verifier, tmp_path):
    """Those of all texts are the states that were kept in writing; of seven texts, they are the first ones."""
    whole, few = tmp_path / "states", tmp_path / "few"
    compute_states(verifier, packed, whole, ("last",), rows=5)
    names = ("tokens", "hidden8.last", "log_sum")
    written, computed = ([np.concatenate([s.array(n) for s in Shards(f)]) for n in names] for f in (asked, whole))
    assert written[0].tolist() == computed[0].tolist()
    assert np.abs(written[1][:, :32].astype(int) - computed[1][:, :32]).max() <= 1
    assert np.allclose(written[2], computed[2], atol=1e-3)
    done = []
    compute_states(verifier, packed, whole, ("last",), 5, lambda *line: done.append(line))
    assert not done
    with pytest.raises(TrainingError, match="differs in its hidden_states"):
        compute_states(verifier, packed, whole, ("2",), rows=5)
    facts = {name: value for name, value in load_facts(whole).items() if name != "states"}
    save_facts(whole, facts)  # as a version that kept them in another form
    with pytest.raises(TrainingError, match="differs in its states"):
        compute_states(verifier, packed, whole, ("last",), rows=5)
    compute_states(verifier, packed, few, ("last",), rows=5, limit=7)
    assert [len(shard.array(name)) for shard in Shards(few) for name in ("lengths", "kinds")] == [5, 5, 2, 2]
    Shards(few).check_complete()
    tokens = np.concatenate([shard.array("tokens") for shard in Shards(few)]).tolist()
    assert tokens == written[0].tolist()[: len(tokens)]
    with pytest.raises(TrainingError, match="differs in its texts"):
        compute_states(verifier, packed, few, ("last",), rows=5, limit=8)


def test_states_that_cannot_be_computed_are_refused_before_anything_is_written(
    asked, packed, verifier, verifier_folder, tmp_path, monkeypatch
):
    other, out = altered(verifier_folder, tmp_path / "other"), tmp_path / "states"
    with pytest.raises(UsageError, match=r"has no texts\.npz"):
        compute_states(verifier, asked, out, ("last",))
    with pytest.raises(UsageError, match="unknown hidden state 'first'"):
        compute_states(verifier, packed, out, ("last", "first"))
    with pytest.raises(UsageError, match="another verifier wrote the texts"):
        compute_states(open_verifier(other, "cpu"), packed, out, ("last",))
    assert not out.exists()
    limit_disk(monkeypatch, 100)
    with pytest.raises(TrainingError, match="is full"):
        compute_states(verifier, packed, out, ("last",))


def test_an_interrupted_folder_is_not_taken_for_whole(asked, chat_folder, tmp_path):
    part = shutil.copytree(asked, tmp_path / "part")
    shutil.rmtree(part / "shards" / "0002")
    for use in (
        lambda: pack(part, tmp_path / "packed"),
        lambda: train_drafter("lyanna", chat_folder, {}, tmp_path / "run", drafter_recipe(), texts=part),
    ):
        with pytest.raises(DataError, match="has 16 of 24 texts"):
            use()


def test_a_run_says_which_hidden_states_the_texts_lack(asked, packed, chat_folder, tmp_path, capsys):
    """Silently computing them again would cost a run of the verifier at every step. Packed texts keep none."""
    table = SteeringTable(layers=(0,), hidden_states=("2", "1"))
    recipe = SteeredRecipe(drafter=table, steps=1, texts=3, warmup_steps=1, held_out_every=4, evaluate_every=1)
    for name, texts in (("some", asked), ("packed", packed)):
        report = ProgressReport(Console(width=1000))
        train_drafter("steered", chat_folder, {}, tmp_path / name, recipe, texts=texts, report=report)
        lines = [line for line in capsys.readouterr().out.splitlines() if "hidden states" in line]
        assert len(lines) == (name == "some")
    lacking = WrittenText(asked, recipe, ("last", "2", "1")).computed_again
    assert lacking.startswith(f"{asked} keeps no hidden states 1: the verifier computes all states again")
    assert "`redraft train states PACKED --hidden-states last,2,1`" in lacking
    assert not WrittenText(asked, recipe, ("last",)).computed_again


def test_texts_inside_the_run_are_not_dropped(asked, chat_folder, tmp_path):
    texts = shutil.copytree(asked, tmp_path / "run" / "texts")
    assert train_drafter("lyanna", chat_folder, {}, tmp_path / "run", drafter_recipe(), texts=texts) == 4


def test_questions_that_do_not_fit_the_verifier_are_left_out(verifier, corpora, tmp_path, monkeypatch):
    turns = ChatTurns.of(str(verifier.texts), verifier.ends)
    lengths = sorted(len(turns.ask(question)) for question in word_problems(corpora["math"].train))
    monkeypatch.setattr(verifier.config, "max_position_embeddings", lengths[2] + RECIPE.new_tokens)
    recipe = replace(RECIPE, texts={"math": 8}, hidden_states=())
    write_text(verifier, corpora, recipe, tmp_path / "out")
    assert max(shard.array("prompts").max() for shard in Shards(tmp_path / "out")) == lengths[2]
    monkeypatch.setattr(verifier.config, "max_position_embeddings", lengths[0] + RECIPE.new_tokens - 1)
    with pytest.raises(UsageError, match="no question of kind math that fits"):
        write_text(verifier, corpora, recipe, tmp_path / "none")


def drafter_recipe(**table):
    return LyannaRecipe(
        steps=4, texts=3, warmup_steps=1, held_out_every=4, evaluate_every=2,
        drafter=LyannaTable(rank=4, chain=3, **table),
    )  # fmt: skip


@pytest.mark.parametrize("folder", ["asked", "packed"])
def test_a_drafter_learns_from_texts_and_drafts_its_vocabulary(chat_folder, tmp_path, folder, request):
    texts, run = request.getfixturevalue(folder), tmp_path / "run"
    recipe = drafter_recipe(draft_vocabulary=90, gamma=0.5)
    assert train_drafter("lyanna", chat_folder, {}, run, recipe, texts=texts, checkpoint_every=2) == 4
    facts = json.loads((run / "data.json").read_text())
    assert set(facts["kinds"]) == {"chat", "math", "prose"}
    publish_drafter(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "drafts the 90 most frequent tokens" in card
    assert "4 steps of 3 whole texts" in card
    with pytest.raises(TrainingError, match=r"texts was 3, it is 2"):
        train_drafter("lyanna", chat_folder, {}, run, replace(recipe, texts=2), texts=texts, resume=True)


def test_texts_of_another_verifier_are_refused(asked, verifier_folder, tmp_path):
    """Its hidden states and tokens are not those of this verifier."""
    other = altered(verifier_folder, tmp_path / "other")
    with pytest.raises(UsageError, match="another verifier wrote the texts"):
        train_drafter("lyanna", other, {}, tmp_path / "run", drafter_recipe(), texts=asked)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"texts": {"poems": 3}}, "texts.poems is not a kind"),
        ({"texts": {"chat": 0}}, "positive number"),
        ({}, "at least one kind"),
        ({"texts": {"chat": 1}, "greedy": 1.5}, "greedy must be a share"),
    ],
)
def test_impossible_recipes_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        TextRecipe(**values)


def test_the_shipped_recipes_have_a_third_of_code_and_mathematics():
    texts = TextRecipe.load("smollm2-text").texts
    assert texts["code"] + texts["math"] >= sum(texts.values()) / 3
    assert TextRecipe(**to_plain(TextRecipe.load("smollm2-text"))).rows == 256
    coder = TextRecipe.load("qwen-coder-text").texts
    assert coder["code"] + coder["edit"] >= sum(coder.values()) / 2


def test_questions_fit_the_context_of_engines(verifier, corpora, tmp_path):
    """Which may be shorter than the verifier's: answers would be cut, or refused in the middle of a run."""
    recipe = replace(RECIPE, texts={"math": 8}, hidden_states=())
    with pytest.raises(UsageError, match="no question of kind math that fits"):
        write_text(verifier, corpora, recipe, tmp_path, engines=Engines(None, recipe.new_tokens + 3, "short"))


def test_the_commands(chat_folder, sources, tmp_path):
    recipe = tmp_path / "few.toml"
    recipe.write_text("new_tokens = 6\nrows = 4\nheld_out_every = 3\n[texts]\nmath = 8\n", encoding="utf-8")
    runner, common = CliRunner(), ["--verifier", str(chat_folder), "--dtype", "fp32"]
    out, packed, kept = (str(tmp_path / name) for name in ("out", "packed", "kept"))
    write = ["train", "text", *common, "--out", out, "--config", str(recipe)]
    result = runner.invoke(app, write)
    assert "--data gives [], the recipe asks about ['math']" in str(result.exception or result.output)
    result = runner.invoke(app, [*write, "--data", f"math={sources['word_problems']}"])
    assert result.exit_code == 0, result.output
    assert "texts 2/2 | " in result.stdout
    assert " min left" in result.stdout
    result = runner.invoke(app, ["train", "pack", out, "--out", packed, "--json"])
    assert json.loads(result.stdout)["bytes"] == (tmp_path / "packed" / PACKED).stat().st_size
    result = runner.invoke(app, ["train", "states", packed, *common, "--out", kept, "--json"])
    assert json.loads(result.stdout)["hidden_states"] == ["last"]
