"""The embedded model in `assets/tiny` agrees with its card and its recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from experiments.tiny.recipe import TINY as TINY_RECIPE
from experiments.tiny.recipe import VerifierRecipe
from redraft.train.data import is_held_out

TINY = Path(__file__).parents[2] / "assets" / "tiny"
RECIPE = VerifierRecipe.load(str(TINY_RECIPE))
KINDS = ("code", "word_problems", "prose")


def tensors(name):
    with safe_open(TINY / name, "np") as file:
        return {key: (file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def test_size_and_shape():
    everything = {path: path.stat().st_size for path in TINY.rglob("*") if path.is_file()}
    variant = {
        path: size for path, size in everything.items() if TINY / "multi_head" in path.parents
    }  # another verifier
    assert sum(variant.values()) <= 20_000_000
    sizes = {path: size for path, size in everything.items() if path not in variant}
    folders = {path.parent for path in sizes if path.name == "model.safetensors"} - {TINY}
    drafters = {one.name: sum(size for path, size in sizes.items() if path.parent == one) for one in folders}
    assert {"lyanna", "student", "eagle", "eagle3", "hass", "fspad", "griffin"} <= set(drafters)
    assert max(drafters.values()) <= 4_000_000
    assert sum(sizes.values()) - sum(drafters.values()) <= 22_000_000
    assert sum(everything.values()) <= 80_000_000
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == RECIPE.model.layers >= 8
    assert config["vocab_size"] == RECIPE.model.vocab_size == 4096
    main, mtp = tensors("model.safetensors"), tensors(config["redraft_mtp"]["file"])
    assert {dtype for dtype, _ in (*main.values(), *mtp.values())} == {"BF16"}
    counts = [sum(_product(shape) for _, shape in part.values()) for part in (main, mtp)]
    figures = json.loads((TINY / "evaluation.json").read_text(encoding="utf-8"))
    assert counts == [figures["parameters"], figures["mtp_parameters"]]
    assert 6e6 <= sum(counts) <= 10e6


def _product(shape):
    total = 1
    for length in shape:
        total *= length
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_of_held_out_documents(kind):
    lines = (TINY / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    assert len({item["turns"][0] for item in items}) >= 40
    assert all(is_held_out(kind, item["source"], RECIPE.held_out_every) for item in items)


def test_card_has_the_measured_figures_and_the_recipe():
    card = (TINY / "README.md").read_text(encoding="utf-8")
    figures = json.loads((TINY / "evaluation.json").read_text(encoding="utf-8"))
    assert f"{RECIPE.steps} steps of {RECIPE.batch_tokens} tokens" in card
    assert f"The first {RECIPE.grow_step} steps" in card
    for kind in KINDS:
        assert f"| {kind} | {figures['kinds'][kind]['bits_per_byte']:.3f} |" in card
    assert f"{figures['python_without_error']:.0%} have no syntax error" in card
