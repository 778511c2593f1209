"""Recipes."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace

import pytest

from redraft.errors import UsageError
from redraft.train.config import RECIPES, Recipe
from redraft.train.drafter_config import SelfText
from redraft.train.objectives import find_training

LyannaRecipe = find_training("lyanna").recipe
StudentRecipe = find_training("draft_model").recipe
SteeredRecipe = find_training("steered").recipe


@pytest.mark.parametrize(
    "values",
    [
        {"stesp": 1},
        {"steps": "many"},
        {"steps": 0},
        {"steps": True},
        {"matrix_lr": "high"},
        {"seq_len": 100},
        {"decay_seq_len": 3 * 1024},
        {"decay_share": 1.5},
        {"weights": {"code": -1.0}},
        {"weights": {"code": "much"}},
        {"decay": "step"},
        {"epochs": -1},
        {"optimizer": "lion"},
        {"method": 3},
        {"evaluate_every": 0},
        {"drafter": 3},
        {"drafter": {"depth": 3}},
        {"drafter": {"rank": 0}},
        {"drafter": {"init": "copy"}},
        {"drafter": {"alpha": 0, "beta": 0}},
        {"drafter": {"first_token": 1}},
        {"self_text": {"rows": 0}},
        {"self_text": {"temperatures": [1.0]}},
        {"self_text": {"temperatures": [0.0]}},
        {"self_text": {"temperatures": [-1.0, 0.0]}},
        {"self_text": {"temperatures": 1.0}},
        {"self_text": {"text": 0.0, "greedy": 0.0, "sampled": 0.0}},
    ],
)
def test_unknown_and_impossible_values_are_refused(values):
    with pytest.raises(UsageError):
        LyannaRecipe.from_dict(values)


@pytest.mark.parametrize("values", [{"betas": (0.9,)}, {"betas": (0.9, 1.0)}, {"grad_clip": 0.0}])
def test_impossible_settings_of_an_optimizer_are_refused(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        Recipe(**values)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="lyanna-tiny"):
        Recipe.load("absent")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = ", encoding="utf-8")
    with pytest.raises(UsageError, match="not TOML"):
        Recipe.load(str(broken))


DRAFTERS = sorted(path.stem for path in RECIPES.glob("*.toml") if not re.search("^compare|-text$", path.stem))


@pytest.mark.parametrize("name", DRAFTERS)
def test_shipped_recipes_load_and_go_through_plain_values(name):
    values = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    of_several = {"steered": "steered", "block": "dflash"}.get(name.partition("-")[0], "eagle")
    kind = find_training(values.get("method", of_several)).recipe
    recipe = kind.load(name)
    assert kind.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_schedule_warms_up_stays_and_falls_to_zero():
    recipe = Recipe(steps=100, warmup_steps=10, decay_share=0.2, decay_seq_len=512)
    factors = [recipe.lr_factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:81] == [1.0] * 71
    assert factors[99] == pytest.approx(1 / 20)
    assert sorted(factors[80:], reverse=True) == factors[80:]
    assert [recipe.row_length(79), recipe.row_length(80)] == [256, 512]


def test_epochs_give_the_steps_that_the_data_takes():
    recipe = Recipe(epochs=3, batch_tokens=1024, steps=7)
    assert recipe.for_epoch(9.8).steps == 30  # ceil(3 * 9.8)
    assert Recipe(steps=7).for_epoch(9.8).steps == 7
    assert recipe.with_options(steps=5, seed=2).for_epoch(9.8) == Recipe(batch_tokens=1024, steps=5, seed=2)
    assert recipe.with_options(None, None, epochs=1).for_epoch(9.8).steps == 10


def test_a_cosine_begins_after_the_warmup():
    """SD²'s schedule. It falls to half at the middle of the decay."""
    recipe = Recipe(steps=110, warmup_steps=10, decay_share=1.0, decay="cosine")
    factors = [recipe.lr_factor(step) for step in range(110)]
    assert factors[:11] == pytest.approx([(step + 1) / 10 for step in range(10)] + [1.0])
    assert factors[60] == pytest.approx(0.5)
    assert factors[35] == pytest.approx((1 + 0.5**0.5) / 2)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0 < factors[109] < 0.001
    late = Recipe(steps=100, warmup_steps=10, decay_share=0.2, decay="cosine")
    assert [late.lr_factor(step) for step in (10, 80, 90)] == pytest.approx([1.0, 1.0, 0.5])
    assert Recipe(steps=5, warmup_steps=1000, decay_share=1.0, decay="cosine").lr_factor(4) == pytest.approx(0.005)


def test_shares_of_texts_are_of_a_kind():
    spec = SelfText(text=0.5, greedy=0.0, sampled=0.25, temperatures=(0.7,))
    weights = LyannaRecipe(weights={"a": 2.0, "b": 1.0}, self_text=spec).stream_weights()
    assert weights == {"a": 1.0, "a.sampled": 0.5, "b": 0.5, "b.sampled": 0.25}


def test_lyannas_schedule_is_the_papers():
    recipe = LyannaRecipe.load("lyanna")
    assert (recipe.optimizer, recipe.lr, recipe.epochs, recipe.warmup_steps) == ("adam", 3e-5, 20, 0)
    assert recipe.for_epoch(50).steps == 1000
    assert replace(recipe, steps=100).lr_factor(50) == pytest.approx(0.5)


def test_the_schedule_of_steering_is_the_papers():
    """SD², appendix A.5."""
    recipe = SteeredRecipe.load("steered")
    assert (recipe.epochs, recipe.warmup_steps, recipe.decay, recipe.optimizer) == (6, 1000, "cosine", "adamw")
    assert (recipe.grad_clip, recipe.clip_by, recipe.texts) == (0.5, "norm", 24)
    assert recipe.batch_tokens == recipe.texts * recipe.seq_len == 24 * 256
    text = recipe.self_text
    assert (text.temperatures, text.shares(), recipe.answers) == ((1.0,), {"sampled": 1.0}, "sampled")
    assert text.prompt_tokens + text.new_tokens == 256
    table = recipe.drafter
    assert (table.draft_length, table.kl, table.frozen, table.offsets) == (8, 1.0, False, "text")
    assert (table.steering, table.steering_norm) == ("up", True)


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_distilled_and_steered_differ_in_the_steering_alone(model):
    steered, distilled = SteeredRecipe.load(f"steered-{model}"), StudentRecipe.load(f"distilled-{model}")
    pretrained = StudentRecipe.load(f"pretrained-{model}").drafter
    values = [{k: v for k, v in one.to_dict().items() if k != "method"} for one in (steered, distilled)]
    values[0]["drafter"] = {name: values[0]["drafter"][name] for name in values[1]["drafter"]}
    assert values[0] == values[1]
    assert distilled.drafter.layers == pretrained.layers
    assert (pretrained.hard > 0, pretrained.kl > 0) == (True, False)
    assert (distilled.drafter.hard > 0, distilled.drafter.kl > 0) == (False, True)
