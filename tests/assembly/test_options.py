"""Options of `redraft build`: the drafters that they name or refuse, and options that repeat a build."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from redraft.assembly import models
from redraft.assembly.drafters import settings_of
from redraft.assembly.options import (
    BuildRequest,
    PrecisionOption,
    choose_drafters,
    configurations,
    options_of,
    parse_precisions,
)  # fmt: skip
from redraft.config import BuildConfig, DrafterBuild
from redraft.errors import RedraftError, UsageError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine,method=lyanna,depth=3", "drafter lyanna: unknown key depth; known keys are draft_vocabulary, nodes"),
        ("mine,method=lyanna,source=x", "drafter lyanna: unknown key source"),
        ("mine,method=lyanna,nodes", "'nodes' is not KEY=VALUE, or is repeated"),
        ("mine,method=lyanna,nodes=", "'nodes=' is not KEY=VALUE, or is repeated"),
        ("mine,method=lyanna,nodes=3,nodes=4", "'nodes=4' is not KEY=VALUE, or is repeated"),
        ("a=mine,method=lyanna,nodes=0", "drafter a: nodes must be a positive number, not 0"),
        ("mine,method=lyanna,nodes=-1", "drafter lyanna: nodes must be a positive number, not -1"),
        ("mine,method=medusa,nodes=-1", "drafter medusa: nodes must be a number from 1 to 255, not -1"),
        ("mine,method=mtp,steps=-2", "drafter mtp: steps must be a number from 1 to 16, not -2"),
        (f"mine,method=mtp,steps={'9' * 5000}", "drafter mtp: steps must be a whole number, not '999"),
        ("mine,method=lyanna,nodes=many", "drafter lyanna: nodes must be a positive number, not 'many'"),
        ("mine,method=lyanna,precision=fp8", "drafter lyanna: precision must be one of fp32, fp16, bf16"),
        ("mine,method=lyanna,token_info=fp3", "drafter lyanna: token_info must be one of fp16, int8, fp8, lowrank"),
        ("mine,method=absent", "unknown drafting method 'absent'; the methods are none, ngram, suffix, lookahead"),
        ("mine,method=ngram", "the method ngram has no drafter in bundles; methods with a drafter are lyanna"),
        ("random", "random weights need a method; add method=, one of lyanna"),
        ("", "--drafter '': expected [ID=]DIR[,KEY=VALUE…]; DIR is a folder, a GGUF file, a Hugging Face id, "),
        ("a=", "--drafter 'a=': expected [ID=]DIR[,KEY=VALUE…]; DIR is a folder, a GGUF file, a Hugging Face id, "),
        ("a.b=mine,method=lyanna", "no drafter can have the id 'a.b'; take letters, digits, - and _"),
        ("suffix=mine,method=lyanna", "no drafter can have the id 'suffix', which means something else"),
        ("lookahead=mine,method=lyanna", "no drafter can have the id 'lookahead', which means something else"),
        ("ngram=mine,method=lyanna", "no drafter can have the id 'ngram', which means something else"),
        ("prediction=mine,method=lyanna", "no drafter can have the id 'prediction', which means something else"),
        ("native=mine,method=lyanna", "no drafter can have the id 'native', which means something else"),
        ("native,depth=3", "drafter mtp: unknown key depth; known keys are draft_vocabulary, precision, steps"),
        ("a=./no/folder", "--drafter 'a=./no/folder': there is no folder ./no/folder; give a drafter's folder; or a "),
        ("no/model.gguf", "there is no file no/model.gguf"),
    ],
)
def test_a_drafter_option_that_does_not_fit(text: str, message: str) -> None:
    with pytest.raises(RedraftError) as error:
        [settings_of(drafter, BuildConfig()) for drafter in choose_drafters(BuildConfig(), [text])]
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["someone/model", "qwen2-7b"])
def test_a_drafter_by_a_hugging_face_id_or_a_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are downloaded, and the options that repeat the build name the id or the recipe."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(models, "_download", lambda hub_id, report: tmp_path)
    (found,) = choose_drafters(BuildConfig(), [f"d={name},steps=5"])
    assert (found.source, found.method, found.given) == (str(tmp_path), "draft_model", name)
    options = options_of(BuildConfig(), BuildConfig(drafters=(found,)))
    assert options == ("--drafter", f"d={name},method=draft_model,steps=5")


def test_two_drafters_of_one_id() -> None:
    """Without ids, both have their method's id."""
    with pytest.raises(UsageError, match="two drafters have the id 'lyanna'; give each its own: --drafter ID=DIR"):
        choose_drafters(BuildConfig(), ["mine,method=lyanna", "yours,method=lyanna"])
    first, second = choose_drafters(BuildConfig(), ["mine,method=lyanna", "b=yours,method=lyanna,steps=2"])
    assert (first.id, first.source, first.options) == ("lyanna", "mine", {})
    assert (second.id, second.source, second.options) == ("b", "yours", {"steps": 2})


def test_none_goes_with_no_other_drafter() -> None:
    with pytest.raises(UsageError, match="--drafter none cannot be used with other --drafter options"):
        choose_drafters(BuildConfig(), ["none", "mine,method=lyanna"])


def drafter_of(source: str | None, name: str = "lyanna", **options: object) -> DrafterBuild:
    return DrafterBuild(name, source, "lyanna", options)


OWN = drafter_of("recipes", steps=3, nodes=12)
RECIPE = BuildConfig(drafters=(OWN,))


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        (BuildConfig(), BuildConfig()),
        (BuildConfig(), BuildConfig(precision="int4", max_model_len=64, random_weights=True)),
        (RECIPE, RECIPE),
        (RECIPE, BuildConfig()),
        (RECIPE, BuildConfig(random_weights=True)),
        (RECIPE, replace(RECIPE, random_weights=True)),
        (RECIPE, BuildConfig(drafters=(drafter_of("mine", steps=3, nodes=12, token_info="int8"),))),
        (RECIPE, BuildConfig(drafters=(drafter_of("recipes", steps=2, nodes=32, precision="fp32"),))),
        (RECIPE, BuildConfig(drafters=(OWN, drafter_of("mine", "second", steps=2)))),
        (BuildConfig(), BuildConfig(drafters=(drafter_of("random", "a", steps=2, token_info="lowrank"),))),
    ],
)
def test_listed_options_make_the_same_configuration_again(recipe: BuildConfig, config: BuildConfig) -> None:
    pairs = list(zip(*[iter(options_of(recipe, config))] * 2, strict=True))
    values = dict(pairs)
    drafters = [text if text == "none" or "method" in text else f"{text},method=lyanna"
                for flag, text in pairs if flag == "--drafter"]  # fmt: skip
    request = BuildRequest(
        "m",
        precision=values.get("--precision"),
        random_weights="--weights" in values,
        max_model_len=int(values["--max-model-len"]) if "--max-model-len" in values else None,
        drafters=tuple(drafters),
    )
    assert configurations(request, recipe, lambda line: None) == [config]


def test_the_command_line_overrides_the_recipes_drafter() -> None:
    assert choose_drafters(RECIPE, []) == RECIPE.drafters
    assert choose_drafters(RECIPE, ["none"]) == ()
    assert choose_drafters(RECIPE, ["mine,method=lyanna"]) == (drafter_of("mine", steps=3, nodes=12),)
    (own,) = choose_drafters(RECIPE, ["lyanna,token_info=fp8,steps=2"])
    assert own == drafter_of("recipes", steps=2, nodes=12, token_info="fp8")
    assert choose_drafters(RECIPE, ["other=mine,method=lyanna"]) == (drafter_of("mine", "other"),)
    settings = BuildConfig(drafters=(drafter_of(None, steps=3),))
    assert choose_drafters(settings, []) == ()
    assert choose_drafters(settings, ["mine,method=lyanna"]) == (drafter_of("mine", steps=3),)
    with pytest.raises(UsageError, match="has no folder for the drafter 'lyanna'; give lyanna=DIR"):
        choose_drafters(settings, ["lyanna"])


def test_extra_drafters_are_built_if_the_command_line_names_them() -> None:
    own, absent = replace(drafter_of("more", "b", steps=2), extra=True), replace(drafter_of(None, "c"), extra=True)
    recipe = replace(RECIPE, drafters=(*RECIPE.drafters, own, absent))
    assert choose_drafters(recipe, []) == RECIPE.drafters
    assert [drafter.id for drafter in choose_drafters(replace(recipe, random_weights=True), [])] == ["lyanna"]
    assert choose_drafters(recipe, ["b"]) == (drafter_of("more", "b", steps=2),)
    chosen = choose_drafters(recipe, ["all", "d=mine,method=lyanna"])
    assert [drafter.id for drafter in chosen] == ["lyanna", "b", "d"]


def test_a_recipes_drafter_is_random_with_random_weights() -> None:
    recipe = replace(RECIPE, random_weights=True)
    assert choose_drafters(recipe, []) == (drafter_of("random", steps=3, nodes=12),)
    assert choose_drafters(recipe, ["none"]) == ()
    assert choose_drafters(BuildConfig(random_weights=True), []) == ()


def test_the_folder_names_the_method_and_an_option_overrides_it(tmp_path: Path) -> None:
    values = {"config": {}, "verifier": {"weights": [], "tokenizer": ""}}
    (tmp_path / "config.json").write_text(json.dumps({**values, "method": "lyanna"}))
    (found,) = choose_drafters(BuildConfig(), [f"{tmp_path},steps=2"])
    assert (found.id, found.method, found.options) == ("lyanna", "lyanna", {"steps": 2})
    (tmp_path / "config.json").write_text(json.dumps({**values, "method": "absent"}))
    (found,) = choose_drafters(BuildConfig(), [f"{tmp_path},method=lyanna"])
    assert found.method == "lyanna"


def test_precisions_with_keys() -> None:
    found = parse_precisions("int4,target=2.5,*lm_head*=8,*down_proj*=32,fp32")
    assert found == [
        PrecisionOption("int4", 0.025, (("*lm_head*", 8), ("*down_proj*", 32))),
        PrecisionOption("fp32"),
    ]
    request = BuildRequest("m", precision="int4,target=2.5,*lm_head*=8,*down_proj*=32")
    (config,) = configurations(request, BuildConfig(), lambda line: None)
    assert options_of(BuildConfig(), config) == ("--precision", "int4,target=2.5,*lm_head*=8,*down_proj*=32")
    with pytest.raises(UsageError, match="fp32 of the backend onnxruntime has no target and no bits by weight"):
        BuildConfig(target=0.1)


@pytest.mark.parametrize(
    "text", ["int5", "", "int4,int4", "target=2", "int4,target=0", "int4,target=x", "int4,a=5", "int4,=8"]
)
def test_precisions_of_another_form(text: str) -> None:
    with pytest.raises(UsageError, match="--precision '"):
        parse_precisions(text)
