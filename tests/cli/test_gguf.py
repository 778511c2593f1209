"""`redraft build FILE.gguf`: a bundle with the file's model, tokenizer and template, or a line with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Refused, Run
from tests.export.gguf_files import TEMPLATE, by_transformers, random_file
from tests.little import Redraft

PROMPT = "the cat 12 and the dog"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 in Q8_0, with byte-level BPE; not to be written to."""
    return random_file("qwen2", "Q8_0").write(tmp_path_factory.mktemp("gguf") / "little-Q8_0.gguf")


@pytest.fixture(scope="module")
def gguf_bundle(gguf_file: Path, redraft: Redraft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of `gguf_file`, which also drafts for itself; not to be written to."""
    out = tmp_path_factory.mktemp("engines") / "little"
    result = redraft("build", gguf_file, "-o", out, "--drafter", f"draft={gguf_file}", "--eval-text", "none")
    assert result.returncode == 0, result.stderr
    assert "drafter draft (draft_model): 2 layers, 24 steps" in result.stdout
    return out


def test_text_is_that_of_transformers(run: Run, gguf_file: Path, gguf_bundle: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    model = by_transformers(gguf_file)
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=[2, 3], pad_token_id=0)
    found = run("generate", "--engines", gguf_bundle, "--prompt", PROMPT, "--max-new-tokens", 24)
    assert found["token_ids"] == expected[0, ids.shape[1] :].tolist()


def test_a_file_drafts(run: Run, redraft: Redraft, gguf_bundle: Path) -> None:
    options = ("--engines", gguf_bundle, "--prompt", PROMPT, "--max-new-tokens", 24)
    plain, drafted = (run("generate", *options, "--method", method) for method in ("none", "draft"))
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["metrics"]["num_accepted_draft_tokens"] > 0
    inspected = redraft("inspect", gguf_bundle).stdout
    assert "drafter    draft: a drafted token reads 0." in inspected, "its products have 8 bits, the verifier's 32"


def test_a_file_that_cannot_draft(refused: Refused, gguf_file: Path, tmp_path: Path) -> None:
    path = random_file("llama").write(tmp_path / "m.gguf")
    line = refused("build", gguf_file, "-o", tmp_path / "out", "--drafter", f"d={path}", status=1)
    assert "has another tokenizer than the verifier: " in line


def test_bundle_has_the_files_name_ends_and_template(gguf_file: Path, gguf_bundle: Path) -> None:
    manifest = json.loads((gguf_bundle / "manifest.json").read_text())
    assert manifest["name"] == "little-Q8_0"
    assert manifest["model"]["architecture"] == "Qwen2ForCausalLM"
    assert list(manifest["model"]["weights"]) == [gguf_file.name]
    assert (manifest["bos_token_id"], manifest["eos_token_ids"]) == (1, [2, 3])
    assert (gguf_bundle / "chat_template.jinja").read_text() == TEMPLATE
    assert "inexact" not in manifest["model"] or manifest["model"]["inexact"] == []


def test_building_again_does_nothing_until_the_file_changes(run: Run, gguf_file: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(gguf_file, tmp_path / "m.gguf"))
    build = ("build", file, "-o", tmp_path / "out", "--weights", "random")
    assert [run(*build)["cached"] for _ in range(2)] == [False, True]
    content = file.read_bytes()
    shorter = content.replace(b"qwen2.context_length\5\0\0\0\x40", b"qwen2.context_length\5\0\0\0\x20")
    assert shorter != content
    file.write_bytes(shorter)
    changed = run(*build)
    assert (changed["cached"], changed["max_model_len"]) == (False, 32)


def test_differences_from_the_file_are_reported(run: Run, tmp_path: Path) -> None:
    file = random_file("qwen2", "Q4_1")
    file.tokenizer["tokenizer.ggml.pre"] = "rwkv-5"
    path = file.write(tmp_path / "m.gguf")
    (split,) = run("build", path, "-o", tmp_path / "out", "--precision", "int4", "--eval-text", "none")["caveats"]
    assert split.startswith("transformers does not know the pre-tokenizer 'rwkv-5'")


def test_no_such_file(refused: Refused, gguf_file: Path) -> None:
    line = refused("build", gguf_file.with_name("other.gguf"), status=2)
    assert "there is no file" in line
    assert "its folder has little-Q8_0.gguf" in line


def test_folder_of_gguf_files(refused: Refused, gguf_file: Path, tmp_path: Path) -> None:
    for options in ((gguf_file.parent,), (gguf_file, "--drafter", f"draft={gguf_file.parent}")):
        line = refused("build", *options, "-o", tmp_path / "out", status=1)
        assert f"give the file itself: {gguf_file}" in line


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model", "its tokenizer (rwkv) cannot be converted"),
        ("tokens", "has no tokenizer; give the model's Hugging Face folder instead"),
    ],
)
def test_a_file_that_cannot_be_built_leaves_nothing(refused: Refused, tmp_path: Path, key: str, message: str) -> None:
    file = random_file("qwen2")
    del file.tokenizer[f"tokenizer.ggml.{key}"]
    if key == "model":
        file.tokenizer["tokenizer.ggml.model"] = "rwkv"
    line = refused("build", file.write(tmp_path / "m.gguf"), "-o", tmp_path / "out", status=1)
    assert message in line
    assert [other.name for other in tmp_path.iterdir()] == ["m.gguf"]
