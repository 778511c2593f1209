"""Converts the tokenizer that transformers loads from a checkpoint's files into one `tokenizer.json`.

transformers changes a `tokenizer.json` by the tokenizer's class and by other files: `add_prefix_space`, added tokens
and special tokens change ids. A bundle keeps the result, so that the runtime needs only the tokenizers library.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from redraft import names
from redraft.errors import CheckpointError, RedraftError, UnsupportedModelError
from redraft.export import quiet_transformers
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN
from redraft.packages import package_version

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

VOCABULARIES = (
    names.TOKENIZER_FILE, "tekken.json", "tokenizer.model", "vocab.json", "*.model", "vocab.txt", "*.tiktoken",
    "tokenizer.model.*",
)  # fmt: skip
"""Patterns of files that hold a vocabulary. transformers prefers the first ones."""
SENTENCEPIECE = ("sentencepiece", "protobuf")
TIKTOKEN = ("tiktoken",)
"""Packages that transformers needs to convert a format."""
SAMPLES = (
    "Hello world", "  two  spaces, a\ttab\nand a line\n", "naïve 日本語 🙂 Ünïcode",
    "def f(x):\n    return 123 + x", " a",
)  # fmt: skip
"""Texts that a converted tokenizer must encode like transformers."""

_COPY = f"copy the model's {names.TOKENIZER_FILE} next to its config.json"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*")


def vocabulary_file(folder: Path) -> Path | None:
    """Return the file that holds a folder's tokenizer, or None if it has none."""
    return next((path for pattern in VOCABULARIES for path in sorted(folder.glob(pattern)) if path.is_file()), None)


def load_tokenizer(folder: Path, settings: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Load a checkpoint's tokenizer like `AutoTokenizer.from_pretrained(folder)`.

    settings: values of `tokenizer_config.json`.
    Raises CheckpointError if a file or a Python package is missing or a file is damaged, and UnsupportedModelError if
    transformers has no converter for the format.
    """
    source = vocabulary_file(folder)
    if source is None:
        raise CheckpointError(f"{folder} has no {names.TOKENIZER_FILE} and no other file with a vocabulary", _COPY)
    _check_source(source)
    with _quiet():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            found = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True, mistral_format=False
            )
        except Exception as error:
            raise _refusal(source, settings, error) from error
    if not isinstance(found, PreTrainedTokenizerFast):
        raise UnsupportedModelError(f"{type(found).__name__} of transformers has no fast version", _COPY)
    return found


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, path: Path, source: Path | None = None) -> None:
    """Write a tokenizer's `tokenizer.json` to `path`, without truncation and padding, and check that it encodes alike.

    source: the file that holds the tokenizer, for errors.
    Raises CheckpointError if the tokenizer has no words, and UnsupportedModelError if transformers encodes text in a
    way that `tokenizer.json` cannot express.
    """
    from tokenizers import Tokenizer

    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(path))
    written = Tokenizer.from_file(str(path))
    special, used = set(tokenizer.all_special_ids), set()
    for text in (*SAMPLES, _with_tokens(tokenizer)):
        for added in (True, False):
            expected, found = _encode(tokenizer, written, text, added, source)
            if expected != found:
                raise UnsupportedModelError(
                    f"{type(tokenizer).__name__} of transformers encodes text in a way that {names.TOKENIZER_FILE} "
                    f"cannot express (for example {text[:40]!r})",
                    "remove settings like split_special_tokens from tokenizer_config.json",
                )
            used |= set(expected)
    if used <= special:
        raise CheckpointError(f"transformers finds no tokens in {source or 'the tokenizer'}", _COPY)


def _encode(
    tokenizer: PreTrainedTokenizerFast, written: Tokenizer, text: str, added: bool, source: Path | None
) -> tuple[list[int], list[int]]:
    """Return ids of a text, by transformers and by the written tokenizer."""
    try:
        expected = tokenizer(text, add_special_tokens=added)["input_ids"]
        return list(expected), written.encode(text, add_special_tokens=added).ids
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{source or 'the tokenizer'} cannot encode {text!r} ({_line(error)})", _COPY) from error


def _with_tokens(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a text with each of the special tokens, next to words and next to spaces."""
    return "".join(f"a{token}b {token} c" for token in tokenizer.all_special_tokens)


def _check_source(source: Path) -> None:
    """Raise if transformers cannot convert a file of this format, or needs a package that is missing."""
    if source.stat().st_size == 0:
        raise CheckpointError(f"{source} is empty", DOWNLOAD_AGAIN)
    if source.suffix == ".tiktoken" or source.name.startswith("tokenizer.model."):
        raise UnsupportedModelError(f"transformers cannot convert {source.name}", _COPY)
    if source.suffix != ".model":
        return
    with source.open("rb") as stream:
        tiktoken = _TIKTOKEN_LINE.fullmatch(stream.readline(4096)) is not None
    missing = [name for name in (TIKTOKEN if tiktoken else SENTENCEPIECE) if package_version(name) is None]
    if missing:
        packages = " ".join(missing)
        raise CheckpointError(f"{source} needs a Python package that is missing: {packages}", f"pip install {packages}")


def _refusal(source: Path, settings: Mapping[str, Any], error: Exception) -> RedraftError:
    """Return the error for a tokenizer that transformers does not load."""
    if settings.get("auto_map"):
        return UnsupportedModelError(
            "the tokenizer needs code from its own repository, which redraft does not run",
            f"remove auto_map from tokenizer_config.json if {names.TOKENIZER_FILE} is complete without it",
        )
    if source.name == names.TOKENIZER_FILE:
        return CheckpointError(f"{source} cannot be read as a tokenizer ({_line(error)})", DOWNLOAD_AGAIN)
    if source.suffix == ".model":
        return CheckpointError(
            f"{source} is neither a sentencepiece model nor a tiktoken vocabulary ({_line(error)})", DOWNLOAD_AGAIN
        )
    return CheckpointError(
        f"transformers cannot convert {source} ({_line(error)})",
        f"{_COPY}, or name the right tokenizer_class in tokenizer_config.json",
    )


def _line(error: Exception) -> str:
    """Return an error's type and the beginning of its message, in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:120]}{'…' if len(message) > 120 else ''}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, and keep tiktoken from caching a vocabulary by its path."""
    no_cache = mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR="")
    with no_cache, quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
