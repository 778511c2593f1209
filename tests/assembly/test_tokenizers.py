"""A bundle's tokenizer equals transformers' for the checkpoint's files, or the build names the fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from redraft.assembly import tokenizer_conversion
from redraft.assembly.models import HUB_FILES
from redraft.assembly.resolve import checkpoint_digests
from redraft.assembly.tokenizers import SpecialTokens, write_text_files
from redraft.errors import CheckpointError, RedraftError, UnsupportedModelError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.runtime.text.tokenizer import Tokenizer

from .tokenizer_files import (
    NAMES,
    PADDING,
    SAMPLES,
    TRUNCATION,
    Files,
    byte_level,
    metaspace,
    sentencepiece_model,
    tekken,
    tiktoken_vocabulary,
    vocabulary_and_merges,
    write_folder,
)  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A `tokenizer.json` like Llama 2's. Tests must not change it."""
    return metaspace(tmp_path_factory.mktemp("llama") / "source")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    return folder


def assert_text_is_that_of_transformers(checkpoint: Path, bundle: Path) -> None:
    special = write_text_files(checkpoint, bundle)
    expected = AutoTokenizer.from_pretrained(checkpoint)
    text = Tokenizer.load(bundle, special.bos, next(iter(special.eos), None))
    for sample in SAMPLES:
        for added in (True, False):
            ids = expected(sample, add_special_tokens=added)["input_ids"]
            assert text.encode(sample, special_tokens=added) == ids, sample
            assert text.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert len(expected(SAMPLES[0])["input_ids"]) < 21, "words, not bytes alone"
    written = json.loads((bundle / "special_tokens_map.json").read_text(encoding="utf-8"))
    assert written == expected.special_tokens_map


CLASS = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **NAMES}
ADDED = {"263": {"content": "<s>", "special": True}, "264": {"content": "<|eot|>", "special": True}}
FORMATS: dict[str, tuple[Files, str, dict[str, Any]]] = {
    "sentencepiece": ({"tokenizer.model": sentencepiece_model()}, "llama", CLASS),
    "sentencepiece, BOS and EOS": (
        {"tokenizer.model": sentencepiece_model()}, "llama", {**CLASS, "add_eos_token": True},
    ),
    "sentencepiece, no settings": ({"tokenizer.model": sentencepiece_model()}, "mistral", {}),
    "sentencepiece, unigram": ({"tokenizer.model": sentencepiece_model("unigram")}, "llama", {}),
    "tiktoken": (
        {"tokenizer.model": tiktoken_vocabulary()}, "llama",
        {"bos_token": "<s>", "eos_token": "<|eot|>", "added_tokens_decoder": ADDED},
    ),
    "tiktoken by its name": ({"tiktoken.model": tiktoken_vocabulary()}, "llama", {}),
    "tekken": ({"tekken.json": tekken()}, "mistral", {}),
    "vocabulary and merges": (vocabulary_and_merges(), "gpt2", {}),
    "vocabulary and merges of Qwen": (vocabulary_and_merges(), "qwen2", {}),
    "class named": (vocabulary_and_merges(), "llama", {"tokenizer_class": "GPT2Tokenizer"}),
}  # fmt: skip
"""Files, model type and settings by format."""


@pytest.mark.parametrize(("files", "model_type", "settings"), FORMATS.values(), ids=FORMATS)
def test_older_formats_are_converted(
    files: Files, model_type: str, settings: dict[str, Any], tmp_path: Path, bundle: Path
) -> None:
    folder = write_folder(tmp_path / "model", files, model_type, **settings)
    assert_text_is_that_of_transformers(folder, bundle)


EOT = {"600": {"content": "<|eot|>", "special": True}}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no prefix space": ({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, **NAMES}, {}),
    "added tokens of the settings": ({"added_tokens_decoder": EOT, **NAMES}, {}),
    "additional special tokens": ({"additional_special_tokens": ["<|eot|>"], "pad_token": "<|pad|>", **NAMES}, {}),
    "special_tokens_map.json": (NAMES, {"special_tokens_map.json": {"eos_token": "<|eot|>"}}),
    "added_tokens.json": (NAMES, {"added_tokens.json": {"<|eot|>": 600}}),
}


@pytest.mark.parametrize(("settings", "files"), CHANGES.values(), ids=CHANGES)
def test_changes_of_transformers_to_a_tokenizer_are_in_the_bundle(
    settings: dict[str, Any], files: dict[str, Any], llama: dict[str, Any], tmp_path: Path, bundle: Path
) -> None:
    folder = write_folder(tmp_path / "model", {"tokenizer.json": llama, **files}, **settings)
    assert_text_is_that_of_transformers(folder, bundle)
    assert_bundle_encodes_otherwise(folder, bundle)


def test_class_of_the_tokenizer_changes_how_text_is_split(tmp_path: Path, bundle: Path) -> None:
    folder = write_folder(tmp_path / "model", {"tokenizer.json": byte_level()}, "qwen2")
    assert_text_is_that_of_transformers(folder, bundle)
    assert_bundle_encodes_otherwise(folder, bundle)


def assert_bundle_encodes_otherwise(folder: Path, bundle: Path) -> None:
    """The result differs from the checkpoint's own `tokenizer.json`; otherwise the other tests prove nothing."""
    before, after = (tokenizers.Tokenizer.from_file(str(place / "tokenizer.json")) for place in (folder, bundle))
    assert any(before.encode(text).ids != after.encode(text).ids for text in SAMPLES)


@pytest.mark.parametrize("setting", [{"add_bos_token": False}, {"add_eos_token": True}, {"legacy": False}], ids=str)
def test_settings_that_transformers_ignores_change_nothing(
    setting: dict[str, Any], llama: dict[str, Any], tmp_path: Path, bundle: Path
) -> None:
    folder = write_folder(tmp_path / "model", {"tokenizer.json": llama}, **setting, **NAMES)
    assert_text_is_that_of_transformers(folder, bundle)


def test_truncation_and_padding_do_not_reach_the_bundle(llama: dict[str, Any], tmp_path: Path, bundle: Path) -> None:
    files = {"tokenizer.json": {**llama, "truncation": TRUNCATION, "padding": PADDING}}
    assert_text_is_that_of_transformers(write_folder(tmp_path / "model", files, **NAMES), bundle)
    written = json.loads((bundle / "tokenizer.json").read_text(encoding="utf-8"))
    assert (written["truncation"], written["padding"]) == (None, None)


def refused(folder: Path, bundle: Path, kind: type[RedraftError] = CheckpointError) -> str:
    with pytest.raises(kind) as found:
        write_text_files(folder, bundle)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("package", "content"), [("sentencepiece", None), ("protobuf", None), ("tiktoken", tiktoken_vocabulary())]
)
def test_missing_package_is_named_with_the_command_that_installs_it(
    package: str, content: str | None, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "model", {"tokenizer.model": content or sentencepiece_model()})
    versions = tokenizer_conversion.package_version
    monkeypatch.setattr(
        tokenizer_conversion, "package_version", lambda name: None if name == package else versions(name)
    )
    line = refused(folder, bundle)
    assert f"tokenizer.model needs a Python package that is missing: {package}" in line
    assert line.endswith(f"pip install {package}")


DAMAGED: dict[str, tuple[dict[str, str | bytes], dict[str, Any], str]] = {
    "nothing": ({}, {}, "has no tokenizer.json and no other file with a vocabulary"),
    "tokenizer.json cut off": ({"tokenizer.json": '{"a": ['}, {}, "tokenizer.json cannot be read as a tokenizer"),
    "tokenizer.json of another form": ({"tokenizer.json": "[]"}, {}, "tokenizer.json cannot be read as a tokenizer"),
    "settings": ({"tokenizer_config.json": "{", "tokenizer.json": "{}"}, {}, "tokenizer_config.json cannot be read"),
    "cut off": (
        {"tokenizer.model": sentencepiece_model()[:3000]}, {}, "neither a sentencepiece model nor a tiktoken",
    ),
    "empty": ({"tokenizer.model": b""}, {}, "tokenizer.model is empty"),
    "merges missing": ({"vocab.json": '{"a": 0}'}, {"tokenizer_class": "GPT2Tokenizer"}, "cannot convert .*vocab.json"),
    "class of another model": (
        {"vocab.json": '{"a": 0}'}, {"tokenizer_class": "LlamaTokenizer"}, "finds no tokens in .*vocab.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "settings", "match"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_named(
    files: dict[str, str | bytes], settings: dict[str, Any], match: str, tmp_path: Path, bundle: Path
) -> None:
    with pytest.raises(CheckpointError, match=match):
        write_text_files(write_folder(tmp_path / "model", files, **settings), bundle)


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tokenizer.model.v3"])
def test_formats_without_a_converter_are_refused_by_name(name: str, tmp_path: Path, bundle: Path) -> None:
    folder = write_folder(tmp_path / "model", {name: tiktoken_vocabulary()}, "qwen2")
    assert f"transformers cannot convert {name}" in refused(folder, bundle, UnsupportedModelError)


def test_code_of_a_repository_is_not_run(llama: dict[str, Any], tmp_path: Path, bundle: Path) -> None:
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    folder = write_folder(tmp_path / "model", {"tokenizer.json": llama}, **own)
    assert "needs code from its own repository" in refused(folder, bundle, UnsupportedModelError)


def test_encoding_that_tokenizer_json_cannot_express(llama: dict[str, Any], tmp_path: Path, bundle: Path) -> None:
    folder = write_folder(tmp_path / "model", {"tokenizer.json": llama}, split_special_tokens=True, **NAMES)
    assert "split_special_tokens" in refused(folder, bundle, UnsupportedModelError)


def test_tiktoken_reads_the_file_and_not_a_cache_of_its_path(tmp_path: Path, bundle: Path) -> None:
    folder = write_folder(tmp_path / "model", {"tokenizer.model": tiktoken_vocabulary()})
    write_text_files(folder, bundle)
    first = Tokenizer.load(bundle, None, None).encode("tree")
    (folder / "tokenizer.model").write_text(tiktoken_vocabulary().rpartition("\n")[0].rpartition("\n")[0] + "\n")
    write_text_files(folder, bundle)
    assert len(first) == 1 < len(Tokenizer.load(bundle, None, None).encode("tree"))


def templates(bundle: Path) -> dict[str, str]:
    found = {path.stem: path.read_text() for path in (bundle / "additional_chat_templates").glob("*.jinja")}
    single = bundle / "chat_template.jinja"
    return {**found, **({"default": single.read_text()} if single.exists() else {})}


NAMED = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
TEMPLATES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "settings": ({"chat_template": "a"}, {}, {"default": "a"}),
    "list": ({"chat_template": NAMED}, {}, {"default": "a", "tool_use": "b"}),
    "file": ({"chat_template": "a"}, {"chat_template.jinja": "c"}, {"default": "c"}),
    "folder": (
        {}, {"chat_template.jinja": "c", "additional_chat_templates/tool_use.jinja": "d"},
        {"default": "c", "tool_use": "d"},
    ),
    "older file": ({}, {"chat_template.json": {"chat_template": "e"}}, {"default": "e"}),
    "none": ({}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "files", "expected"), TEMPLATES.values(), ids=TEMPLATES)
def test_chat_templates_come_from_each_place(
    settings: dict[str, Any], files: dict[str, Any], expected: dict[str, str], llama: dict[str, Any], tmp_path: Path,
    bundle: Path,
) -> None:  # fmt: skip
    folder = write_folder(tmp_path / "model", {"tokenizer.json": llama, **files}, **settings, **NAMES)
    write_text_files(folder, bundle)
    assert templates(bundle) == expected


def test_name_of_a_template_does_not_leave_the_bundle(llama: dict[str, Any], tmp_path: Path, bundle: Path) -> None:
    named = [{"name": "../../outside", "template": "x"}]
    folder = write_folder(tmp_path / "model", {"tokenizer.json": llama}, chat_template=named)
    assert "expected chat templates by name, found '../../outside'" in refused(folder, bundle)


IDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], SpecialTokens]] = {
    "tokenizer alone": (NAMES, {}, {}, SpecialTokens(1, (2,))),
    "generation first": (NAMES, {"eos_token_id": [7, 9]}, {"eos_token_id": 8}, SpecialTokens(1, (7, 9))),
    "configuration": (NAMES, {"bos_token_id": 4}, {"eos_token_id": 8}, SpecialTokens(1, (8,))),
    "nested": (NAMES, {}, {"text_config": {"eos_token_id": [8]}}, SpecialTokens(1, (8,))),
    "null": (NAMES, {"eos_token_id": None}, {"eos_token_id": 8}, SpecialTokens(1, (8,))),
    "tokenizer without BOS": ({"eos_token": "</s>"}, {}, {"bos_token_id": 4}, SpecialTokens(None, (2,))),
    "no settings": ({}, {"bos_token_id": 4}, {"eos_token_id": 2}, SpecialTokens(4, (2,))),
}


@pytest.mark.parametrize(("settings", "generation", "config", "expected"), IDS.values(), ids=IDS)
def test_ids_that_begin_and_end_a_text(
    settings: dict[str, Any], generation: dict[str, Any], config: dict[str, Any], expected: SpecialTokens,
    llama: dict[str, Any], tmp_path: Path, bundle: Path,
) -> None:  # fmt: skip
    configs = {"generation_config.json": generation, "config.json": {"model_type": "llama", **config}}
    files = {"tokenizer.json": llama, **configs}
    assert write_text_files(write_folder(tmp_path / "model", files, **settings), bundle) == expected


def test_a_bundle_keeps_the_sampling_defaults_if_there_are_any(
    llama: dict[str, Any], tmp_path: Path, bundle: Path
) -> None:
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    generation = {**sampling, "min_p": None, "eos_token_id": 2, "transformers_version": "5"}
    folder = write_folder(tmp_path / "model", {"tokenizer.json": llama}, **NAMES)
    write_text_files(folder, bundle)
    assert not (bundle / "generation_config.json").exists()
    write_text_files(write_folder(folder, {"generation_config.json": generation}), bundle)
    assert json.loads((bundle / "generation_config.json").read_text()) == sampling


def test_ids_of_another_kind_are_refused(llama: dict[str, Any], tmp_path: Path, bundle: Path) -> None:
    files = {"tokenizer.json": llama, "generation_config.json": {"eos_token_id": "</s>"}}
    line = refused(write_folder(tmp_path / "model", files, **NAMES), bundle, UnsupportedModelError)
    assert "eos_token_id is '</s>'" in line


TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/rag.jinja", "qwen.tiktoken",
)  # fmt: skip


@pytest.mark.parametrize("name", TEXT_FILES)
def test_files_that_text_depends_on_are_downloaded_and_change_the_build(name: str, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    assert list(filter_repo_objects([name], allow_patterns=HUB_FILES)) == [name]
    folder = write_folder(tmp_path / "model", {})
    before = checkpoint_digests(Checkpoint.open(folder, weights=False))
    write_folder(folder, {name: "{}"})
    assert set(checkpoint_digests(Checkpoint.open(folder, weights=False))) - set(before) == {name}
