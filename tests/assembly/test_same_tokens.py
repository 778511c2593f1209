"""A draft model's tokens must be the verifier's, but for padding and added ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.export.gguf_files import random_file

from redraft.assembly.tokenizers import Tokens, check_same_tokens
from redraft.errors import CheckpointError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.gguf.checkpoint import GgufCheckpoint

WORDS = ("<s>", "a", "b", "c", "d")


def tokens(*words: str, added: tuple[int, ...] = (0,)) -> Tokens:
    return Tokens(dict(enumerate(words)), frozenset(added))


VERIFIER = tokens(*WORDS, "<turn>", added=(0, 5))


@pytest.mark.parametrize(
    "own",
    [
        VERIFIER,
        tokens(*WORDS),
        tokens(*WORDS, "<turn>", "<tool>", added=(0, 5, 6)),
        tokens("<begin>", *WORDS[1:], "<end>", added=(0, 5)),
        tokens(*WORDS, "[end]"),
        tokens(*WORDS[:4]),
    ],
)
def test_added_and_missing_tokens_may_differ(own: Tokens) -> None:
    check_same_tokens("drafter d", Path("m"), own, VERIFIER)
    check_same_tokens("drafter d", Path("m"), VERIFIER, own)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (tokens("<s>", "a", "c", "b", "d"), "2 of 4 tokens differ, first token 2, 'c' instead of 'b'"),
        (tokens("<s>", "x", *WORDS[1:4]), "4 of 4 tokens differ, first token 1, 'x' instead of 'a'"),
        (tokens("<s>", "<x>", added=(0, 1)), "no word is in both"),
    ],
)
def test_other_tokens_are_refused(own: Tokens, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        check_same_tokens("drafter d", Path("m"), own, VERIFIER)
    assert error.value.message == f"drafter d: m has another tokenizer than the verifier: {message}"


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_gguf_file_and_its_folder_have_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    """Unused tokens fill a file's vocabulary up; a folder does not have them."""
    file = random_file(architecture)
    file.tokenizer["tokenizer.ggml.tokens"].append("[PAD]")
    file.tokenizer["tokenizer.ggml.token_type"].append(5)
    if "tokenizer.ggml.scores" in file.tokenizer:
        file.tokenizer["tokenizer.ggml.scores"].append(0.0)
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    folder = tmp_path / "folder"
    checkpoint.write_text_files(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    own, other = Tokens.of(checkpoint), Tokens.of(Checkpoint(folder, {}, {}))
    assert len(own.words) == len(file.tokenizer["tokenizer.ggml.tokens"]) - 1
    assert own.words == {token: word for token, word in other.words.items() if token in own.words}
    assert other.added <= {*own.added, len(own.words)}


def test_a_file_without_tokens(tmp_path: Path) -> None:
    file = random_file("qwen2")
    del file.tokenizer["tokenizer.ggml.tokens"]
    with pytest.raises(CheckpointError, match=r"m\.gguf has no tokenizer"):
        Tokens.of(GgufCheckpoint.open(file.write(tmp_path / "m.gguf")))
