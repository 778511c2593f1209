"""Recipes."""

from __future__ import annotations

import pytest

from redraft.errors import UsageError
from redraft.train.config import Recipe

from .small_verifier import VerifierRecipe


@pytest.mark.parametrize(
    "values",
    [
        {"stesp": 1},
        {"model": {"depth": 3}},
        {"steps": "many"},
        {"steps": 0},
        {"steps": True},
        {"matrix_lr": "high"},
        {"seq_len": 100},
        {"decay_seq_len": 1024},
        {"decay_share": 1.5},
        {"weights": {"code": -1.0}},
        {"model": {"kv_heads": 3}},
        {"grow_step": 5, "start_layers": 5},
        {"optimizer": "sgd"},
        {"decay": "step"},
        {"epochs": -1},
        {"weights": {"code": "much"}},
        {"model": 3},
    ],
)
def test_unknown_and_impossible_values_are_refused(values):
    with pytest.raises(UsageError):
        VerifierRecipe.from_dict(values)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="tiny"):
        VerifierRecipe.load("absent")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = ", encoding="utf-8")
    with pytest.raises(UsageError, match="not TOML"):
        VerifierRecipe.load(str(broken))


def test_round_trip_through_plain_values(recipe):
    assert VerifierRecipe.from_dict(recipe.to_dict()) == recipe


def test_schedule_warms_up_stays_and_falls_to_zero():
    recipe = VerifierRecipe(steps=100, warmup_steps=10, decay_share=0.2)
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


def test_linear_decay_over_the_whole_run_without_warmup():
    """The paper's schedule: from the full rate to zero."""
    recipe = Recipe(steps=10, warmup_steps=0, decay_share=1.0)
    assert [recipe.lr_factor(step) for step in range(10)] == pytest.approx([1 - step / 10 for step in range(10)])


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
