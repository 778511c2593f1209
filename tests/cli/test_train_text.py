"""`redraft train text --bundle`: engines write in place of the verifier's modules."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.little import write_checkpoint
from typer.testing import CliRunner

from redraft.cli.main import app
from redraft.train.text_shards import Shards

RECIPE = (
    "greedy = {greedy}\nnew_tokens = 9\nrows = 5\nheld_out_every = 3\nhidden_states = {states}\n[texts]\nmath = 7\n"
)


@pytest.fixture
def write(checkpoint, tmp_path):
    """Write texts about word problems, with options of the command. Returns the result and the only arrays."""
    problems = [
        {"question": "how many are {} and {}".format(*"abcdefghijklmnopqrst"[i : i + 2]), "answer": "some " * 40}
        for i in range(18)
    ]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)), encoding="utf-8")

    def call(name, *options, greedy=1.0, states="[]", verifier=checkpoint):
        (tmp_path / "few.toml").write_text(RECIPE.format(greedy=greedy, states=states), encoding="utf-8")
        common = ["--verifier", str(verifier), "--config", str(tmp_path / "few.toml"), "--dtype", "fp32"]
        data = ["--data", f"math={tmp_path / 'problems.jsonl'}", "--out", str(tmp_path / name)]
        result = CliRunner().invoke(app, ["train", "text", *common, *data, *map(str, options)])
        shards = list(Shards(tmp_path / name))
        names = ("tokens", "lengths", "prompts", "temperatures")
        return result, {name: np.concatenate([shard.array(name) for shard in shards]) for name in names if shards}

    return call


def test_engines_write_what_the_modules_write(write, bundle):
    _, expected = write("modules")
    result, found = write("engines", "--bundle", bundle, "--max-num-seqs", 3)
    assert result.exit_code == 0, result.output
    assert len(found["lengths"]) == 7
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)


def test_engines_sample_by_seed(write, bundle):
    _, first = write("first", "--bundle", bundle, greedy=0.0)
    _, again = write("again", "--bundle", bundle, greedy=0.0, states="[]")
    _, greedy = write("greedy", "--bundle", bundle)
    np.testing.assert_array_equal(first["tokens"], again["tokens"])
    assert (first["temperatures"] == 1).all()
    assert first["tokens"].tolist() != greedy["tokens"].tolist()


def test_what_engines_cannot_write_is_refused(write, bundle, tmp_path):
    result, _ = write("kept", "--bundle", bundle, states='["last"]')
    assert "engines keep no hidden states" in str(result.exception)
    other = tmp_path / "other"
    other.mkdir()
    write_checkpoint(other, shards="1MB")
    result, _ = write("other", "--bundle", bundle, verifier=other)
    assert "was built from another verifier" in str(result.exception)
