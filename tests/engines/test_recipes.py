"""Recipes: the packaged ones load, and a file that does not fit is refused by name."""

import re

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from redraft.config import BuildConfig, LyannaBuild
from redraft.engines import backends, recipes
from redraft.engines.backends import check_buildable
from redraft.engines.recipes import load_recipe, recipe_names
from redraft.engines.tensorrt.target import INSTALL
from redraft.errors import BackendError, UsageError
from redraft.export.drafters.lyanna import beside
from redraft.export.drafters.lyanna_graphs import lyanna_shape


def test_packaged_recipes_load():
    assert "tiny" in recipe_names()
    tiny = load_recipe("tiny")
    assert tiny.source.endswith("assets/tiny")
    assert tiny.build.lyanna is not None
    assert tiny.build.lyanna.source.endswith("assets/tiny/lyanna")
    assert tiny.build == BuildConfig(hidden_states=("last",), lyanna=tiny.build.lyanna)


def test_a_recipe_of_ones_own_finds_the_model_beside_it(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "mine.toml"
    file.write_text('source = "model"\n[build]\nprecision = "int8"\nmax_model_len = 512\n')
    recipe = load_recipe(str(file))
    assert (recipe.name, recipe.source) == ("mine", str(tmp_path / "model"))
    assert recipe.build == BuildConfig(precision="int8", max_model_len=512)
    file.write_text('source = "someone/model-7b"\n')
    assert load_recipe(str(file)).source == "someone/model-7b"


def test_a_recipes_drafter_is_found_beside_it_too(tmp_path):
    (tmp_path / "drafter").mkdir()
    file = tmp_path / "mine.toml"
    file.write_text('source = "x"\n[build.lyanna]\nsource = "drafter"\nsteps = 2\ntoken_info = "fp8"\n')
    expected = LyannaBuild(str(tmp_path / "drafter"), steps=2, token_info="fp8")
    assert load_recipe(str(file)).build == BuildConfig(lyanna=expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('source = "x"\ncolour = 1\n', "unknown key colour; known keys are build, shape, source"),
        ('source = "x"\n[build]\nspeed = 1\n', "build: unknown key speed"),
        ('source = "x"\n[build]\nprecision = "fp12"\n', "unknown precision 'fp12'"),
        ('source = "x"\n[build]\nlyanna = "y"\n', "expected a table [build.lyanna]"),
        ('source = "x"\n[build.lyanna]\nsource = 3\n', "lyanna.source must name a drafter's folder"),
        ('source = "x"\nshape = 3\n', "expected [shape] with `model_type`"),
        ('source = "x"\n[shape]\nhidden_size = 64\n', "expected [shape] with `model_type`"),
        ('source = "x"\n[build.lyanna]\nsource = ""\n', "lyanna.source must name a drafter's folder"),
        ('source = "x"\n[build.lyanna]\nsource = "y"\ndepth = 2\n', "build.lyanna: unknown key depth; known keys"),
        ('source = "x"\n[build.lyanna]\nsource = "y"\ntoken_info = "fp4"\n', "unknown lyanna.token_info 'fp4'"),
        ('source = "x"\n[build.lyanna]\nsource = "y"\nprecision = "fp8"\n', "unknown lyanna.precision 'fp8'"),
        ('source = "x"\n[build.lyanna]\nsource = "y"\nsteps = 0\n', "lyanna.steps must be a positive number, not 0"),
        ('source = "x"\n[build.lyanna]\nsource = "y"\nwidth = true\n', "lyanna.width must be a positive number"),
        ('source = "x"\n[build.lyanna]\nsource = "y"\nnodes = "12"\n', "lyanna.nodes must be a positive number"),
        ('source = "x"\n[build.lyanna]\nsource = "y"\nhot_tokens = 1.5\n', "lyanna.hot_tokens must be a positive"),
        ('source = "x"\n[build.lyanna]\nsource = "y"\nprune_above = -1\n', "lyanna.prune_above must be a positive"),
        ("[build]\n", "expected `source` as text"),
        ("source = \n", "expected a TOML recipe"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(tmp_path, text, message):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        load_recipe(str(file))
    assert message in str(error.value)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match=r"no recipe 'huge'; give one of .*tiny"):
        load_recipe("huge")


def test_the_embedded_model_is_missed_by_name_where_only_the_wheel_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "_ASSETS", tmp_path)
    with pytest.raises(UsageError, match="it comes with the repository, not with the wheel; work in a clone"):
        load_recipe("tiny")


PARAMETERS = {
    "vicuna-7b": 6.74, "llama-2-7b": 6.74, "llama-2-13b": 13.0, "llama-3-8b": 8.03, "llama-3-70b": 70.6,
    "qwen2-7b": 7.62, "qwen3-8b": 8.19, "mixtral-8x7b": 46.7,
}  # fmt: skip
"""Published, in billions."""


def test_every_recipe_but_the_embedded_models_has_a_published_size():
    assert set(recipe_names()) == {"tiny", *PARAMETERS}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipes_shape_has_the_published_number_of_parameters(name):
    recipe = load_recipe(name)
    config = CONFIG_MAPPING[recipe.shape["model_type"]].from_dict(dict(recipe.shape))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e9:.3g}" == f"{PARAMETERS[name]:.3g}"
    assert type(model).__name__ == recipe.shape["architectures"][0]
    assert recipe.build.max_model_len <= recipe.shape["max_position_embeddings"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_budget_and_hot_tokens_are_the_papers(name):
    """Three deep, four wide, twelve verified; of more than 40 K tokens, the 32 K most frequent are hot."""
    recipe = load_recipe(name)
    config = CONFIG_MAPPING[recipe.shape["model_type"]].from_dict(dict(recipe.shape))
    options = recipe.build.lyanna
    shape = lyanna_shape(beside(config, config.vocab_size, steps=options.steps), options)
    assert (shape.steps, shape.width, shape.nodes - 1) == (3, 4, 12)
    assert shape.hot == options.hot_tokens == {32000: 32000}.get(config.vocab_size, 32768)
    assert options.source is None


def test_without_tensorrt_its_backend_names_what_to_install(monkeypatch):
    check_buildable(BuildConfig())
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=f"not installed; {re.escape(INSTALL)}, or build with --backend"):
        check_buildable(BuildConfig(backend="tensorrt"))


def test_with_tensorrt_its_backend_asks_for_the_rest(monkeypatch):
    asked = []
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    monkeypatch.setattr(backends, "find_tools", asked.append)
    check_buildable(BuildConfig(backend="tensorrt"))
    assert asked == [BuildConfig(backend="tensorrt")]
