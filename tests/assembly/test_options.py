"""Options of `redraft build`: the drafters that they name or refuse, and options that repeat a build."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redraft.assembly import models
from redraft.assembly.drafters import settings_of
from redraft.assembly.options import (
    BuildRequest,
    choose_drafters,
    configurations,
    options_of,
    parse_precisions,
)  # fmt: skip
from redraft.config import BuildConfig, DrafterBuild, TensorRtBuild
from redraft.errors import RedraftError, UsageError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine,method=lyanna,depth=3", "drafter lyanna: unknown key depth; known keys are draft_vocabulary, head_rank"),
        ("mine,method=lyanna,nodes", "'nodes' is not KEY=VALUE, or is repeated"),
        ("mine,method=lyanna,nodes=", "'nodes=' is not KEY=VALUE, or is repeated"),
        ("mine,method=lyanna,nodes=3,nodes=4", "'nodes=4' is not KEY=VALUE, or is repeated"),
        (f"mine,method=mtp,steps={'9' * 5000}", "drafter mtp: steps must be a whole number, not '999"),
        ("mine,method=lyanna,precision=fp8", "drafter lyanna: precision must be one of fp32, fp16, bf16"),
        ("mine,method=absent", "unknown drafting method 'absent'; the methods are none, ngram, suffix, lookahead"),
        ("mine,method=ngram", "the method ngram has no drafter in bundles; methods with a drafter are lyanna"),
        ("random", "random weights need a method; add method=, one of lyanna"),
        ("", "--drafter '': expected [ID=]DIR[,KEY=VALUE…]; DIR is a folder, a GGUF file, a Hugging Face id, "),
        ("a=", "--drafter 'a=': expected [ID=]DIR[,KEY=VALUE…]; DIR is a folder, a GGUF file, a Hugging Face id, "),
        ("a.b=mine,method=lyanna", "no drafter can have the id 'a.b'; take letters, digits, - and _"),
        ("suffix=mine,method=lyanna", "no drafter can have the id 'suffix', which means something else"),
        ("native=mine,method=lyanna", "no drafter can have the id 'native', which means something else"),
        ("native,depth=3", "drafter mtp: unknown key depth; known keys are draft_vocabulary, head_rank, precision"),
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
    """Its files are downloaded."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(models, "_download", lambda hub_id, report: tmp_path)
    (found,) = choose_drafters(BuildConfig(), [f"d={name},steps=5"])
    assert (found.source, found.method, found.options) == (str(tmp_path), "draft_model", {"steps": 5})


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


def configured(recipe: BuildConfig = RECIPE, **options: Any) -> list[tuple[BuildConfig, tuple[str, ...]]]:
    """Return the configurations of a request, and the options that repeat each."""
    request = BuildRequest("m", **options)
    return [(each, options_of(request, each)) for each in configurations(request, recipe)]


def test_a_request_overrides_the_recipe_and_its_options_repeat_it() -> None:
    assert configured() == [(RECIPE, ())]
    asked = dict(backend="tensorrt", max_model_len=64, random_weights=True, model_path=Path("m"), drafters=("none",))
    words = "--model-path m --backend tensorrt --max-model-len 64 --weights random --drafter none"
    config = replace(RECIPE, backend="tensorrt", max_model_len=64, random_weights=True)
    assert configured(**asked) == [(config, tuple(words.split()))]
    given = dict(attention="plugin", embed_plugin=True, batch=2, tree_nodes=16, ignore_memory=True)
    engines = TensorRtBuild("plugin", True, 2, 16, ignore_memory=True)
    words = "--attention plugin --embed-plugin --batch 2 --tree-nodes 16 --ignore-memory"
    recipe = BuildConfig(backend="tensorrt")
    assert configured(recipe, tensorrt=given) == [(replace(recipe, tensorrt=engines), tuple(words.split()))]


def test_each_of_several_precisions_has_its_own_options() -> None:
    precisions = "int4,target=2.5,*lm_head*=8,*down_proj*=32,fp32"
    (rounded, its), (exact, others) = configured(precision=precisions, drafters=("mine,method=lyanna",))
    assert (rounded.precision, rounded.target) == ("int4", 0.025)
    assert rounded.bits == (("*lm_head*", 8), ("*down_proj*", 32))
    drafter = ("--drafter", "mine,method=lyanna")
    assert its == ("--precision", "int4,target=2.5,*lm_head*=8,*down_proj*=32", *drafter)
    assert (exact.precision, exact.target, exact.bits) == ("fp32", None, ())
    assert others == ("--precision", "fp32", *drafter)
    assert configured(replace(RECIPE, precision="int8", target=0.1))[0][0].target == 0.1
    with pytest.raises(UsageError, match="fp32 of the backend onnxruntime has no target and no bits by weight"):
        BuildConfig(target=0.1)


def test_the_precision_of_keys_and_values() -> None:
    ((config, words), (other, _)) = configured(precision="int8,kv=fp16,target=1,int4")
    assert (config.kv, other.kv) == ("fp16", None)
    assert words == ("--precision", "int8,kv=fp16,target=1")
    assert configured(replace(RECIPE, kv="fp16"))[0][0].kv == "fp16"
    with pytest.raises(UsageError, match="keys and values are fp32, or fp16 with kv=fp16, not 'fp17'; give PRECISION"):
        configured(precision="int8,kv=fp17")
    for precision in ("fp16", "bf16"):
        with pytest.raises(UsageError, match=f"{precision} bundles have keys and values in {precision}; leave kv= out"):
            configured(precision=f"{precision},kv=fp16")
    with pytest.raises(UsageError, match="kv=fp16 is for CPUs: engines of tensorrt have keys and values of their own"):
        configured(precision="int8,kv=fp16", backend="tensorrt")


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
    (found,) = choose_drafters(BuildConfig(), [f"{tmp_path},method=dspark,confidence=false"])
    assert found.options == {"confidence": False}
    (tmp_path / "config.json").write_text(json.dumps({**values, "method": "absent"}))
    (found,) = choose_drafters(BuildConfig(), [f"{tmp_path},method=lyanna"])
    assert found.method == "lyanna"


@pytest.mark.parametrize(
    "text", ["int5", "", "int4,int4", "target=2", "int4,target=0", "int4,target=x", "int4,a=5", "int4,=8"]
)
def test_precisions_of_another_form(text: str) -> None:
    with pytest.raises(UsageError, match="--precision '"):
        parse_precisions(text)
