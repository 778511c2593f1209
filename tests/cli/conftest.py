"""A tiny checkpoint with random weights, and a bundle of it: what the commands are tried on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from redraft import names
from redraft.engines.manifest import signed

Redraft = Callable[..., subprocess.CompletedProcess[str]]
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", " ", ".", ","]
CONTEXT = 64


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the tests' own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def redraft(cache: Path) -> Redraft:
    """Run the command line as a user does; returns the finished process."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        environment.pop("REDRAFT_DEBUG", None)
        command = [sys.executable, "-c", "from redraft.cli.main import main; main()", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, **options)  # type: ignore[call-overload]

    return run


def write_tokenizer(folder: Path, bos: bool = True) -> None:
    """A tokenizer of single characters, with a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>" if bos else None, "eos_token": "</s>"}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}."
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


def write_checkpoint(folder: Path, bos: bool = True, shards: str = "20KB") -> Path:
    """A Llama of two layers with random weights, in several shards."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shards)
    write_tokenizer(folder, bos)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; not to be written to."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "little")


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, redraft: Redraft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of `checkpoint`; not to be written to."""
    out = tmp_path_factory.mktemp("engines") / "little"
    result = redraft("build", checkpoint, "-o", out, "--eval-text", "none")
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def with_template(bundle: Path, tmp_path: Path) -> Callable[[str | None], Path]:
    """Copy the bundle with another chat template, or with none."""

    def copy(template: str | None) -> Path:
        folder = Path(shutil.copytree(bundle, tmp_path / "templated"))
        manifest = json.loads((folder / "manifest.json").read_text())
        file = folder / names.CHAT_TEMPLATE_FILE
        if template is None:
            file.unlink()
            del manifest["files"][file.name]
        else:
            file.write_text(template)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            manifest["files"][file.name] = {"size": file.stat().st_size, "sha256": digest}
        (folder / "manifest.json").write_text(json.dumps(signed(manifest)))
        return folder

    return copy


@pytest.fixture
def refused(redraft: Redraft) -> Callable[..., str]:
    """Run a command that must fail as a user's mistake does: one line, no traceback. Returns the line."""

    def run(*arguments: object, status: int, **options: object) -> str:
        result = redraft(*arguments, **options)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("[")]
        assert result.returncode == status, result.stderr
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("redraft: error: ")
        assert result.stdout == ""
        return lines[0]

    return run
