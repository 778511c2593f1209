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
from redraft.export.gguf_config import AS_FOLDER, header_for_transformers
from redraft.export.gguf_file import Header

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
END_KEYS = ("eos", "eot", "eom")
"""Tokens that end a text or a turn. llama.cpp stops at each."""
SPLIT_AS_GPT2 = ("gpt-2", "default")
SPLIT_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of pre-tokenizers that make every digit a word and split the rest as GPT-2 does. transformers lacks them."""


def write_text_files(header: Header, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and the chat template below `folder`.

    The tokenizer is that of `AutoTokenizer.from_pretrained(..., gguf_file=...)`, except for the split of SPLIT_DIGITS.
    Raises UnsupportedModelError if transformers cannot make it.
    """
    with tempfile.TemporaryDirectory() as alone, header_for_transformers(header):
        # In an empty folder, since transformers reads any tokenizer_config.json next to the file.
        link = Path(alone) / header.path.name
        link.symlink_to(header.path.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=link.name)
            if header.metadata.get(MODEL) == "gpt2" and header.metadata.get(PRE) in SPLIT_DIGITS:
                tokenizer = _with_digits_apart(tokenizer)
            tokenizer.save_pretrained(folder)
        except Exception as error:  # transformers raises many types
            model = header.metadata.get(MODEL)
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise UnsupportedModelError(
                f"{header.path}: its tokenizer ({model}) cannot be converted: {reason}", AS_FOLDER
            ) from error
    ends = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in END_KEYS]
    eos = sorted({int(token) for token in ends if token is not None}, key=ends.index)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")


def read_tokens(header: Header) -> tuple[dict[int, str], frozenset[int]]:
    """Return a file's words by id, without unused ones, and the ids of tokens that are not words of text.

    Raises CheckpointError for a file without tokens.
    """
    words = header.metadata.get(TOKENS)
    if not isinstance(words, list) or not words:
        raise CheckpointError(f"{header.path} has no tokenizer", AS_FOLDER)
    kinds = header.metadata.get(TOKEN_TYPES)
    kinds = kinds if isinstance(kinds, list) and len(kinds) == len(words) else [TokenType.NORMAL] * len(words)
    used = {token: word for token, word in enumerate(words) if kinds[token] != TokenType.UNUSED}
    return used, frozenset(token for token in used if kinds[token] not in (TokenType.NORMAL, TokenType.BYTE))


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
