"""The texts of SmolLM2 that are shipped, and its drafter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from redraft.engines.recipes import load_recipe
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.train.objectives import find_training
from redraft.train.text_batches import TextSet
from redraft.train.text_shards import PACKED, Shards, load_facts
from redraft.train.write_text import written_tokens

FOLDER = Path(__file__).parents[2] / "assets" / "smollm2" / "text"
DRAFTER = FOLDER.parent / "lyanna"
END = 2  # <|im_end|>


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
    held_out = TextSet(FOLDER, 40, ("last",)).greedy_held_out(24, 8)
    assert set(held_out) == {"chat", "code", "math", "prose"}


def test_smollm2s_drafter_is_small_trained_on_enough_and_of_the_recipes_verifier() -> None:
    """Six million tokens seen, in at most 16 MB, bound to the package's file; its texts are those of the repository."""
    checkpoint = DrafterCheckpoint.open(DRAFTER)
    package = load_recipe("smollm2-135m").package
    assert package is not None
    assert checkpoint.verifier.weights == (package.sha256,)
    assert (DRAFTER / "model.safetensors").stat().st_size <= 16_000_000
    training = json.loads((DRAFTER / "config.json").read_text())["training"]
    sizes = TextSet(FOLDER, training["recipe"]["held_out_every"], ("last",)).sizes()
    assert training["data"] == {kind: {"tokens": found} for kind, found in sizes.items()}
    texts, tokens = (sum(found[name] for found in sizes.values()) for name in ("texts", "all"))
    assert training["step"] * training["recipe"]["texts"] / texts * tokens >= 6_000_000
    recipe = find_training("lyanna").recipe
    assert recipe.from_dict(training["recipe"]) == recipe.load("lyanna-smollm2")
