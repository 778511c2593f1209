"""`python -m experiments.tiny`: training, publishing and measuring the embedded verifier."""

from __future__ import annotations

import json

import pytest

from experiments.tiny.__main__ import main
from redraft.errors import UsageError


def data_options(sources):
    return [option for kind, source in sources.items() for option in ("--data", f"{kind}={source}")]


def write_recipe(folder, steps=4):
    path = folder / "small.toml"
    path.write_text(
        f"steps = {steps}\nbatch_tokens = 64\nseq_len = 16\ndecay_seq_len = 32\nheld_out_every = 3\n"
        "[model]\nvocab_size = 400\nhidden_size = 32\nlayers = 2\nintermediate_size = 64\nheads = 2\nkv_heads = 1\n"
        "head_dim = 16\nmax_positions = 64\n",
        encoding="utf-8",
    )
    return path


def test_train_publish_evaluate(sources, tmp_path):
    """From training to measuring: `evaluate` measures the card's figures again."""
    recipe, run, out = write_recipe(tmp_path), tmp_path / "run", tmp_path / "out"
    common = ["train", *data_options(sources), "--out", str(run), "--config", str(recipe)]
    assert main([*common, "--checkpoint-every", "2"]) == {"out": str(run), "steps": 4, "steps_run": 4}
    with pytest.raises(UsageError, match="--resume"):
        main(common)

    published = main(["publish", str(run), *data_options(sources), "--out", str(out)])
    assert published == json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"{published['kinds']['prose']['bits_per_byte']:.3f}" in card
    assert "{" not in card
    assert main(["evaluate", str(out)]) == published


def test_lines_without_a_terminal_give_losses_speed_and_time_left(sources, tmp_path, capsys):
    """They go to the error stream: the standard output has the JSON object."""
    recipe = write_recipe(tmp_path)
    main(["train", *data_options(sources), "--out", str(tmp_path / "run"), "--config", str(recipe)])
    printed = capsys.readouterr()
    assert printed.out == ""
    last = next(line for line in printed.err.splitlines() if line.startswith("step 4"))
    assert last.startswith("step 4/4 ")
    assert all(word in last for word in ("code", "mtp", "tok/s", "eta"))


def test_kinds_other_than_the_recipes_are_refused(sources, tmp_path):
    with pytest.raises(UsageError, match="word_problems"):
        main(["train", "--data", f"code={sources['code']}", "--out", str(tmp_path / "run")])
