"""The texts of SmolLM2 that are shipped, its drafter, and the embedded model, which agrees with its card."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from redraft.engines.recipes import load_recipe
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.train.data import is_held_out
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.objectives import find_training
from redraft.train.text_batches import WrittenText
from redraft.train.text_shards import PACKED, Shards, load_facts
from redraft.train.write_text import written_tokens

LyannaRecipe = find_training("lyanna").recipe

FOLDER = Path(__file__).parents[2] / "assets" / "smollm2" / "text"
DRAFTER = FOLDER.parent / "lyanna"
END = 2  # <|im_end|>
TINY, QWEN = FOLDER.parents[1] / "tiny", FOLDER.parents[1] / "qwen-coder"
KINDS = ("code", "word_problems", "prose")


def test_smollm2s_texts_are_enough_and_of_the_recipes_verifier() -> None:
    """Three million tokens that the model wrote, a third code and mathematics, in one small file."""
    tokens = written_tokens(Shards(FOLDER))
    total = sum(tokens.values())
    assert total >= 3_000_000
    assert tokens["code"] + tokens["math"] >= total / 3
    assert (FOLDER / PACKED).stat().st_size <= 8_000_000
    (digest,) = load_facts(FOLDER)["verifier"]["weights"]
    package = load_recipe("smollm2-135m").package
    assert package is not None
    assert digest == package.sha256


def test_smollm2s_texts_end_and_leave_some_to_measure_on() -> None:
    (shard,) = Shards(FOLDER)
    tokens, lengths = shard.array("tokens"), shard.array("lengths")
    assert int(tokens.max()) < 49_152
    assert 0.3 < np.mean(tokens[np.cumsum(lengths) - 1] == END) < 1.0  # the others reached the limit
    assert 0.5 < np.mean(shard.array("temperatures") == 0) < 0.7
    held_out = WrittenText(FOLDER, DrafterRecipe(held_out_every=40), ("last",)).held_out(0)
    assert set(held_out) == {"chat", "code", "math", "prose"}


def test_smollm2s_drafter_is_small_trained_on_enough_and_of_the_recipes_verifier() -> None:
    """Six million tokens seen, in at most 16 MB, bound to the package's file; its texts are those of the repository."""
    checkpoint = DrafterCheckpoint.open(DRAFTER)
    package = load_recipe("smollm2-135m").package
    assert package is not None
    assert checkpoint.verifier.weights == (package.sha256,)
    assert (DRAFTER / "model.safetensors").stat().st_size <= 16_000_000
    training = json.loads((DRAFTER / "config.json").read_text())["training"]
    recipe = LyannaRecipe.from_dict(training["recipe"])
    assert recipe == LyannaRecipe.load("lyanna-smollm2")
    assert training["data"] == WrittenText(FOLDER, recipe, ("last",)).facts()
    texts, tokens = (sum(kind["tokens"][name] for kind in training["data"].values()) for name in ("texts", "all"))
    assert training["step"] * recipe.texts / texts * tokens >= 6_000_000


@pytest.mark.parametrize(
    ("size", "name", "least"), [("0.5b", "lyanna-qwen-coder", 600_000), ("1.5b", "lyanna-qwen-coder-1.5b", 250_000)]
)
def test_qwens_drafter_is_small_and_learned_from_the_texts_beside_it(size: str, name: str, least: int) -> None:
    """Mostly code; bound to the file that wrote them. The model's files are not in the repository."""
    texts, drafter = QWEN / f"text-{size}", QWEN / f"lyanna-{size}"
    tokens = written_tokens(Shards(texts))
    assert sum(tokens.values()) >= least
    assert tokens["code"] + tokens["edit"] >= sum(tokens.values()) / 2
    checkpoint = DrafterCheckpoint.open(drafter)
    assert list(checkpoint.verifier.weights) == load_facts(texts)["verifier"]["weights"]
    assert sum(path.stat().st_size for path in drafter.iterdir()) <= 60_000_000
    training = json.loads((drafter / "config.json").read_text())["training"]
    recipe = LyannaRecipe.from_dict(training["recipe"])
    assert recipe == LyannaRecipe.load(name)
    assert training["data"] == WrittenText(texts, recipe, ("last",)).facts()


def test_the_embedded_model_is_small_and_of_its_shape() -> None:
    everything = {path: path.stat().st_size for path in TINY.rglob("*") if path.is_file()}
    variant = {path: size for path, size in everything.items() if TINY / "multi_head" in path.parents}
    assert sum(variant.values()) <= 20_000_000  # another verifier
    sizes = {path: size for path, size in everything.items() if path not in variant}
    folders = {path.parent for path in sizes if path.name == "model.safetensors"} - {TINY}
    drafters = {one.name: sum(size for path, size in sizes.items() if path.parent == one) for one in folders}
    assert {"lyanna", "student", "eagle", "eagle3", "hass", "fspad", "griffin"} <= set(drafters)
    assert max(drafters.values()) <= 4_000_000
    assert sum(sizes.values()) - sum(drafters.values()) <= 22_000_000
    assert sum(everything.values()) <= 80_000_000
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert (config["num_hidden_layers"], config["vocab_size"]) == (12, 4096)
    counts = []
    for name in ("model.safetensors", config["redraft_mtp"]["file"]):
        with safe_open(TINY / name, "np") as file:
            slices = [file.get_slice(key) for key in file.keys()]  # noqa: SIM118
        assert {one.get_dtype() for one in slices} == {"BF16"}
        counts.append(sum(int(np.prod(one.get_shape())) for one in slices))
    figures = json.loads((TINY / "evaluation.json").read_text(encoding="utf-8"))
    assert counts == [figures["parameters"], figures["mtp_parameters"]]
    assert 6e6 <= sum(counts) <= 10e6


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_of_held_out_documents(kind: str) -> None:
    """One document in 20, as the card says. A prompt from a training file would improve all figures wrongly."""
    lines = (TINY / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    assert len({item["turns"][0] for item in items}) >= 40
    assert all(is_held_out(kind, item["source"], 20) for item in items)


def test_the_card_has_the_measured_figures() -> None:
    card = (TINY / "README.md").read_text(encoding="utf-8")
    figures = json.loads((TINY / "evaluation.json").read_text(encoding="utf-8"))
    for kind in KINDS:
        assert f"| {kind} | {figures['kinds'][kind]['bits_per_byte']:.3f} |" in card
    assert f"{figures['python_without_error']:.0%} have no syntax error" in card
