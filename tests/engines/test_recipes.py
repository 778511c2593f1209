"""Recipes: the packaged ones load, and an invalid file is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from redraft.config import BuildConfig, DrafterBuild
from redraft.engines import recipes
from redraft.engines.recipes import load_recipe, recipe_names
from redraft.engines.tensorrt import target
from redraft.engines.tensorrt.target import TENSORRT, check_buildable
from redraft.errors import BackendError, UsageError
from redraft.export.drafters.lyanna import configuration_of, lyanna_shape
from redraft.methods.lyanna import METHOD


def test_packaged_recipes_load():
    assert "tiny" in recipe_names()
    tiny = load_recipe("tiny")
    assert tiny.source.endswith("assets/tiny")
    drafter, *extra = tiny.build.drafters
    assert drafter.source is not None
    assert drafter.source.endswith("assets/tiny/lyanna")
    assert not drafter.extra
    assert all(one.extra and one.source and Path(one.source).is_dir() for one in extra)
    assert len(extra) == 12
    assert tiny.build == BuildConfig(hidden_states=("last",), drafters=(drafter, *extra))


def test_a_users_recipe_finds_the_model_next_to_it(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "mine.toml"
    file.write_text('source = "model"\n[build]\nprecision = "int8"\nmax_model_len = 512\n')
    recipe = load_recipe(str(file))
    assert (recipe.name, recipe.source) == ("mine", str(tmp_path / "model"))
    assert recipe.build == BuildConfig(precision="int8", max_model_len=512)
    file.write_text('source = "someone/model-7b"\n')
    assert load_recipe(str(file)).source == "someone/model-7b"


def test_a_recipes_drafter_is_found_next_to_it_too(tmp_path):
    (tmp_path / "drafter").mkdir()
    file = tmp_path / "mine.toml"
    file.write_text('source = "x"\n[build.drafters.a]\nsource = "drafter"\nsteps = 2\ntoken_info = "fp8"\n')
    expected = DrafterBuild("a", str(tmp_path / "drafter"), options={"steps": 2, "token_info": "fp8"})
    assert load_recipe(str(file)).build == BuildConfig(drafters=(expected,))


def test_a_drafter_among_the_assets_is_left_out_if_this_installation_lacks_it(tmp_path, monkeypatch):
    """Its settings stay, as those of a recipe without a folder do. The model itself must be there."""
    monkeypatch.setattr(recipes, "_ASSETS", tmp_path)
    file = tmp_path / "mine.toml"
    file.write_text('source = "x"\n[build.drafters.a]\nsource = "asset:some/drafter"\nsteps = 2\n')
    assert load_recipe(str(file)).build.drafters == (DrafterBuild("a", None, options={"steps": 2}),)
    (tmp_path / "some" / "drafter").mkdir(parents=True)
    assert load_recipe(str(file)).build.drafters[0].source == str(tmp_path / "some" / "drafter")


PACKAGE = {
    "requirement": "some-model==1.0", "file": "some/model.gguf", "sha256": "a" * 64, "bytes": 7,
}  # fmt: skip


def with_package(folder, **changes):
    file = folder / "mine.toml"
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**PACKAGE, **changes}.items())
    file.write_text(f'source = "someone/model"\n[package]\n{lines}\n')
    return load_recipe(str(file))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requirement": "some-model"}, "requirement must be NAME==VERSION, not 'some-model'"),
        ({"requirement": "some-model==1 --pre"}, "requirement must be NAME==VERSION"),
        ({"file": "../model.gguf"}, "file must be the path of a .gguf file"),
        ({"file": "model.safetensors"}, "file must be the path of a .gguf file"),
        ({"sha256": "A" * 64}, "sha256 must be 64 hexadecimal digits in lower case"),
        ({"bytes": 0}, "package.bytes must be a positive number"),
    ],
)
def test_a_package_that_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        with_package(tmp_path, **changes)


def test_smollm2_comes_with_a_package_and_starts_as_a_cpu_model():
    recipe = load_recipe("smollm2-135m")
    assert recipe.package is not None
    assert (recipe.build.backend, recipe.build.precision, recipe.build.max_model_len) == ("onnxruntime", "fp32", None)
    assert {drafter.id: drafter.options for drafter in recipe.build.drafters if not drafter.extra} == {
        "lyanna": {"steps": 3, "nodes": 12},
    }


OWN = '[build.drafters.a]\nmethod = "lyanna"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('source = "x"\ncolour = 1\n', "unknown key colour; known keys are build, package, shape, source"),
        ('source = "x"\n[build]\nspeed = 1\n', "build: unknown key speed"),
        ('source = "x"\n[build]\nprecision = "fp12"\n', "build: precision must be one of fp32, fp16,"),
        ('source = "x"\n[build]\ndrafters = "y"\n', "expected a table [build.drafters.ID] for each"),
        ('source = "x"\n[build.drafters.a]\nsource = 3\n', "build.drafters.a: source must be text, not 3"),
        ('source = "x"\nshape = 3\n', "shape must be a table, not 3"),
        ('source = "x"\n[shape]\nhidden_size = 64\n', "expected [shape] with `model_type`"),
        ('source = "x"\n[build.drafters.a]\nsource = ""\n', "drafter a: source must name a folder"),
        (f'source = "x"\n{OWN}depth = 2\n', "build.drafters.a: unknown key depth; known keys"),
        (f'source = "x"\n{OWN}token_info = "fp4"\n', "token_info must be one of fp16, int8, fp8, lowrank, not 'fp4'"),
        (f'source = "x"\n{OWN}steps = 0\n', "steps must be a positive number, not 0"),
        ('source = "x"\n[build.drafters.a]\nmethod = "absent"\n', "unknown drafting method 'absent'; the methods are"),
        ('source = "x"\n[build.drafters.a]\nmethod = 3\n', "build.drafters.a: method must be text, not 3"),
        ('source = "x"\n[build.drafters.none]\nsource = "y"\n', "no drafter can have the id 'none'"),
        ("[build]\n", "missing key source"),
        ('source = ""\n', "expected `source` to name a model"),
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


def test_the_embedded_model_is_named_as_missing_if_only_the_wheel_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "_ASSETS", tmp_path)
    with pytest.raises(UsageError, match="it comes with the repository, not with the wheel; work in a clone"):
        load_recipe("tiny")


PARAMETERS = {
    "vicuna-7b": 6.74, "llama-2-7b": 6.74, "llama-2-13b": 13.0, "llama-3-8b": 8.03, "llama-3-70b": 70.6,
    "qwen2-7b": 7.62, "qwen3-8b": 8.19, "mixtral-8x7b": 46.7, "smollm2-135m": 0.135,
}  # fmt: skip
"""Published, in billions."""


def test_every_recipe_but_the_embedded_models_has_a_published_size():
    assert set(recipe_names()) == {"tiny", *PARAMETERS}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_has_the_published_shape_and_the_papers_budget(name):
    """Depth three, width four, twelve nodes; of more than 40 K tokens, the 32 K most frequent can be drafted."""
    recipe = load_recipe(name)
    config = CONFIG_MAPPING[recipe.shape["model_type"]].from_dict(dict(recipe.shape))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e9:.3g}" == f"{PARAMETERS[name]:.3g}"
    assert type(model).__name__ == recipe.shape["architectures"][0]
    limit = recipe.shape["max_position_embeddings"]
    assert (recipe.build.max_model_len or limit) <= limit
    if name == "smollm2-135m":
        return
    (drafter,) = recipe.build.drafters
    options = METHOD.parse_build(drafter.options, name)
    shape = lyanna_shape(configuration_of(config, config.vocab_size, steps=options.steps), options)
    assert (shape.steps, shape.width, shape.nodes - 1) == (3, 4, 12)
    assert shape.draft_vocabulary == {32000: 32000}.get(config.vocab_size, 32768)
    assert drafter.source is None


def test_without_tensorrt_its_backend_names_the_package_to_install(monkeypatch):
    check_buildable(BuildConfig())
    monkeypatch.setattr(target, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=f"not installed; {re.escape(TENSORRT.install)}, or build with --backend"):
        check_buildable(BuildConfig(backend="tensorrt"))
