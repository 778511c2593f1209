"""Corpora: documents of a kind, the split into training and held-out ones, their tokens, and a run's record of them.

A hash of their names selects whole documents to hold out. The split needs no list and stays the same when files are
added. A source is `stdlib` (the running Python's own library), a `.jsonl` file of word problems
(`question`, `answer`), or a UTF-8 text file whose documents are separated by lines of `<|endoftext|>`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from redraft.errors import DataError, UsageError
from redraft.train.config import Recipe

DATA = "data.json"
"""A run folder's record of its data."""
SEPARATOR = "<|endoftext|>"
# Test suites (most of the library's bytes, repetitive), tables that are data rather than code, and files that a
# distribution adds or generates.
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "_bundled",
}  # fmt: skip
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations
_BLOCK_CHARS = 65536
MIN_CHARS = 2000


@dataclass(frozen=True)
class Document:
    """One document: its kind, a name that is stable between machines, its text."""

    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind, split."""

    kind: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    def digest(self) -> str:
        """SHA-256 over names and texts of both sides. A resumed run must have the same digest."""
        sha = hashlib.sha256()
        for document in (*self.train, *self.held_out):
            sha.update(f"{document.name}\0{document.text}\0".encode())
        return sha.hexdigest()


def is_held_out(kind: str, name: str, every: int) -> bool:
    """Return True if the document is held out: one in `every`, by a hash of kind and name."""
    head = hashlib.sha256(f"{kind}/{name}".encode()).digest()[:8]
    return int.from_bytes(head, "big") % every == 0


def parse_sources(options: Iterable[str]) -> dict[str, str]:
    """Return `KIND=SOURCE` options as a mapping. Raises DataError for another form or a repeated kind."""
    sources: dict[str, str] = {}
    for option in options:
        kind, equals, source = option.partition("=")
        if not equals or not kind or not source:
            raise DataError(f"--data {option!r} is not KIND=SOURCE", "for example --data code=stdlib")
        if kind in sources:
            raise DataError(f"--data names the kind {kind!r} twice")
        sources[kind] = source
    return sources


def load_corpus(kind: str, source: str, every: int) -> Corpus:
    """Read and split a source. Raises DataError naming the file if it is unreadable, empty or too short."""
    documents = _read(kind, source)
    if sum(len(d.text) for d in documents) < MIN_CHARS:
        raise DataError(f"{source}: fewer than {MIN_CHARS} characters of {kind}", "give a longer corpus")
    train = tuple(d for d in documents if not is_held_out(kind, d.name, every))
    held_out = tuple(d for d in documents if is_held_out(kind, d.name, every))
    if not train or not held_out:
        raise DataError(
            f"{source}: {len(documents)} documents of {kind} leave {len(train)} to train on and "
            f"{len(held_out)} held out",
            "give more documents or another held_out_every",
        )
    return Corpus(kind, train, held_out)


def load_corpora(sources: Mapping[str, str], recipe: Recipe) -> dict[str, Corpus]:
    """Return every kind's corpus. Raises UsageError if the kinds differ from the recipe's weights."""
    if set(sources) != set(recipe.weights):
        raise UsageError(
            f"--data gives {sorted(sources)}, the recipe has weights for {sorted(recipe.weights)}",
            "give one --data KIND=SOURCE for each",
        )
    return {kind: load_corpus(kind, sources[kind], recipe.held_out_every) for kind in sorted(sources)}


def data_digest(corpora: Mapping[str, Corpus]) -> str:
    """Return the SHA-256 over every kind's corpus."""
    return hashlib.sha256("".join(f"{k}:{c.digest()}" for k, c in corpora.items()).encode()).hexdigest()


def facts_of(corpus: Corpus, tokens: int) -> dict[str, Any]:
    """Return a run folder's record of a kind: the size of its training side, and the held-out documents."""
    return {
        "documents": len(corpus.train),
        "characters": sum(len(d.text) for d in corpus.train),
        "tokens": tokens,
        "held_out": [d.name for d in corpus.held_out],
    }


def token_stream(
    tokenizer: Tokenizer, documents: Sequence[Document], seed: int, eos: int | None, dtype: type[np.integer[Any]]
) -> NDArray[Any]:
    """Return the tokens of all documents, one after the other, in a random order by `seed`.

    Each document is tokenized from BOS (if the tokenizer adds one) through EOS (if there is one).
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(documents))
    encodings: list[Any] = tokenizer.encode_batch_fast([documents[i].text for i in order])
    end = [] if eos is None else [eos]
    return np.concatenate([np.array([*encoding.ids, *end], dtype) for encoding in encodings])


def _read(kind: str, source: str) -> list[Document]:
    if source == "stdlib":
        return _read_stdlib(kind)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"no corpus file {path}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start})", "convert it to UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return _read_word_problems(kind, path, text) if path.suffix == ".jsonl" else _split_text(kind, text)


def _read_stdlib(kind: str) -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED_FOLDERS & set(parts[:-1]) or any(p.startswith(_SKIPPED_PREFIXES) for p in parts):
            continue
        try:
            text = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:  # a few files declare another encoding
            continue
        if text:
            documents.append(Document(kind, "/".join(parts), text + "\n"))
    return documents


def format_word_problem(question: str, answer: str = "") -> str:
    """Return the text of a word problem. Without an answer it is a prompt."""
    return f"Question: {question.strip()}\nAnswer:" + (f" {answer.strip()}" if answer else "")


def _read_word_problems(kind: str, path: Path, text: str) -> list[Document]:
    documents = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            question, answer = str(item["question"]), str(item["answer"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise DataError(f"{path}:{number}: not a JSON object with question and answer") from None
        name = hashlib.sha256(question.encode()).hexdigest()[:16]
        documents.append(Document(kind, name, format_word_problem(question, _ANNOTATION.sub("", answer))))
    return documents


def _split_text(kind: str, text: str) -> list[Document]:
    if SEPARATOR in text:
        parts = [part.strip() for part in text.split(SEPARATOR)]
        return [Document(kind, _book_name(part), part) for part in parts if part]
    blocks = [text[i : i + _BLOCK_CHARS].strip() for i in range(0, len(text), _BLOCK_CHARS)]
    return [Document(kind, f"block-{i}", block) for i, block in enumerate(blocks) if block]


def _book_name(text: str) -> str:
    """Return title and author if the text begins with them as Markdown headings, else a hash of its beginning."""
    title = re.match(r"# Title: (.+)", text)
    author = re.search(r"^## Author: (.+)", text[:500], re.MULTILINE)
    if title:
        return title.group(1).strip() + (f", {author.group(1).strip()}" if author else "")
    return hashlib.sha256(text[:1000].encode()).hexdigest()[:16]
