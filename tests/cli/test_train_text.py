"""`redraft train text --bundle`: engines write in place of the verifier's modules."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.little import write_checkpoint
from typer.testing import CliRunner

from redraft.cli.engine_writer import open_engines
from redraft.cli.main import app
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity
from redraft.train.text_shards import Shards, split
from redraft.train.writer import TextStart

RECIPE = (
    "greedy = {greedy}\nnew_tokens = 9\nrows = 5\nheld_out_every = 3\nhidden_states = {states}\nseed = {seed}\n"
    "[texts]\nmath = 7\n"
)
NAMES = ("tokens", "lengths", "prompts", "temperatures")


@pytest.fixture
def write(checkpoint, tmp_path):
    """Write texts about word problems, with options of the command. Returns the result and the only arrays."""
    problems = [
        {"question": f"how many are {'abcdefghijklmnopqrst'[i]} and u", "answer": "some " * 40} for i in range(18)
    ]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)), encoding="utf-8")

    def call(name, *options, greedy=1.0, states="[]", seed=0, verifier=checkpoint):
        (tmp_path / "few.toml").write_text(RECIPE.format(greedy=greedy, states=states, seed=seed), encoding="utf-8")
        common = ["--verifier", str(verifier), "--config", str(tmp_path / "few.toml"), "--dtype", "fp32"]
        data = ["--data", f"math={tmp_path / 'problems.jsonl'}", "--out", str(tmp_path / name)]
        result = CliRunner().invoke(app, ["train", "text", *common, *data, *map(str, options)])
        return result, list(Shards(tmp_path / name))

    return call


def arrays_of(written):
    result, shards = written
    assert result.exit_code == 0, result.output
    return {name: np.concatenate([shard.array(name) for shard in shards]) for name in NAMES}


@pytest.fixture
def engines(checkpoint, bundle):
    with open_engines(bundle, Identity.of(Checkpoint.open(checkpoint)), 3, None) as found:
        yield found


def test_engines_write_what_the_modules_write(write, bundle):
    expected = arrays_of(write("modules"))
    found = arrays_of(write("engines", "--bundle", bundle, "--max-num-seqs", 3))
    assert len(found["lengths"]) == 7
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)


def test_engines_sample_by_the_recipes_seed(write, bundle):
    first, again = (arrays_of(write(name, "--bundle", bundle, greedy=0.0)) for name in ("first", "again"))
    other = arrays_of(write("other", "--bundle", bundle, greedy=0.0, seed=1))
    assert first["tokens"].tolist() == again["tokens"].tolist()
    assert (first["temperatures"] == 1).all()
    assert first["tokens"].tolist() != other["tokens"].tolist()


def test_equal_prompts_are_sampled_anew_and_end_at_any_end_of_the_template(engines):
    """The bundle has one end token; a chat template may have another."""
    starts, nothing = [TextStart((5, 6), 1.0)] * 4, frozenset()
    written = engines.write(starts, nothing, 12, 0)
    texts = [text.tolist() for text in split(written.lengths, written.tokens)]
    assert len({*map(tuple, texts)}) > 1
    longest = max(texts, key=len)
    end = longest[6]
    cut = engines.write(starts, frozenset({end}), 12, 0)
    found = split(cut.lengths, cut.tokens)[texts.index(longest)].tolist()
    assert found == longest[: longest.index(end, 2) + 1] != longest


def test_one_folder_has_the_texts_of_one_writer(write, bundle):
    arrays_of(write("mixed", "--bundle", bundle))
    result, _ = write("mixed")
    assert "differs in its engines" in str(result.exception)


def test_impossible_requests_are_refused(write, bundle, tmp_path):
    result, _ = write("kept", "--bundle", bundle, states='["last"]')
    assert "engines keep no hidden states" in str(result.exception)
    result, _ = write("alone", "--max-num-seqs", 4)
    assert "--max-num-seqs belongs to --bundle" in str(result.exception)
    other = tmp_path / "other"
    other.mkdir()
    write_checkpoint(other, shards="1MB")
    result, _ = write("other", "--bundle", bundle, verifier=other)
    assert "was built from another verifier" in str(result.exception)
