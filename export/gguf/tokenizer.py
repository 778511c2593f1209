"""Writes a GGUF file's tokenizer, chat template and special tokens as files of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN, last_line
from redraft.export.gguf.config import TOKENS, header_for_transformers
from redraft.export.gguf.file import AS_FOLDER, Header

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TOKEN_TYPES = "tokenizer.ggml.token_type"
END_KEYS = ("eos", "eot", "eom")
"""Tokens that end a text or a turn. llama.cpp stops at each."""
TOKEN_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in (*END_KEYS, "bos", "unknown", "padding"))
ARRAYS = {"tokenizer.ggml.scores": float, TOKEN_TYPES: int}
"""Arrays with a number for each token."""
MERGES = "tokenizer.ggml.merges"
TEXTS = (MODEL, PRE, "tokenizer.chat_template")
LONGEST_TOKEN = 4096
"""Characters. transformers looks at every two parts of a token."""
SPLIT_AS_GPT2 = ("gpt-2", "default")
SPLIT_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of pre-tokenizers that make every digit a word and split the rest as GPT-2 does. transformers lacks them."""


def write_text_files(header: Header, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and the chat template below `folder`.

    The tokenizer is that of `AutoTokenizer.from_pretrained(..., gguf_file=...)`, except for the split of SPLIT_DIGITS.
    Raises CheckpointError if its parts do not fit each other, UnsupportedModelError if transformers cannot make it.
    """
    _check(header)
    with tempfile.TemporaryDirectory() as alone, header_for_transformers(header):
        # In an empty folder, since transformers reads any tokenizer_config.json next to the file.
        link = Path(alone) / header.path.name
        link.symlink_to(header.path.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=link.name)
            if header.metadata.get(MODEL) == "gpt2" and header.metadata.get(PRE) in SPLIT_DIGITS:
                tokenizer = _with_digits_apart(tokenizer)
            tokenizer.save_pretrained(folder)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # transformers raises many types; a panic of tokenizers is none of Exception
            model = header.metadata.get(MODEL)
            raise UnsupportedModelError(
                f"{header.path}: its tokenizer ({model!s:.40}) cannot be converted: {last_line(error)}", AS_FOLDER
            ) from error
    ends = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in END_KEYS]
    eos = sorted({token for token in ends if token is not None}, key=ends.index)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")


def read_tokens(header: Header) -> tuple[dict[int, str], frozenset[int]]:
    """Return a file's words by id, without unused ones, and the ids of tokens that are not words of text.

    Raises CheckpointError for a file without tokens, or with damaged ones.
    """
    if TOKENS not in header.metadata:
        raise CheckpointError(f"{header.path} has no tokenizer", AS_FOLDER)
    _check(header)
    words = header.array(TOKENS)
    kinds = header.array(TOKEN_TYPES) if TOKEN_TYPES in header.metadata else [TokenType.NORMAL] * len(words)
    used = {token: word for token, word in enumerate(words) if kinds[token] != TokenType.UNUSED}
    return used, frozenset(token for token in used if kinds[token] not in (TokenType.NORMAL, TokenType.BYTE))


def _check(header: Header) -> None:
    """Raise CheckpointError for values of the tokenizer that are of another type, or name tokens that it lacks."""
    tokens = header.array(TOKENS)
    if not all(isinstance(token, str) and len(token) <= LONGEST_TOKEN for token in tokens):
        raise _damaged(header, TOKENS, f"texts of at most {LONGEST_TOKEN} characters")
    for key, kind in ARRAYS.items():
        if key in header.metadata:
            values = header.array(key)
            if len(values) != len(tokens) or not all(type(value) is kind for value in values):
                raise _damaged(header, key, f"{len(tokens)} numbers, one for each token")
    if MERGES in header.metadata and not all(isinstance(merge, str) for merge in header.array(MERGES)):
        raise _damaged(header, MERGES, "texts")
    for key in TOKEN_IDS:
        token = header.metadata.get(key, 0)
        if type(token) is not int or not 0 <= token < len(tokens):
            raise _damaged(header, key, f"the id of one of {len(tokens)} tokens, found {token!r:.60}")
    for key in TEXTS:
        if not isinstance(header.metadata.get(key, ""), str):
            raise _damaged(header, key, "text")


def _damaged(header: Header, key: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{header.path}: expected {expected} in {key}", DOWNLOAD_AGAIN)


def _with_digits_apart(tokenizer: Any) -> PreTrainedTokenizerFast:
    """Return the tokenizer with the split of SPLIT_DIGITS.

    Its class is the general one, since those of some models replace the split when they are loaded.
    """
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    template = tokenizer.chat_template
    special = tokenizer.special_tokens_map
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=template, **special)


def unknown_split(header: Header) -> tuple[str, ...]:
    """Return a warning if it is unknown how the file's byte-level tokenizer splits text into words."""
    model, split = header.metadata.get(MODEL), header.metadata.get(PRE)
    if model != "gpt2" or split in (None, *SPLIT_AS_GPT2, *SPLIT_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS):
        return ()
    return (f"transformers does not know the pre-tokenizer {split!r} and splits text into words as GPT-2 does",)
