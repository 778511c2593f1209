"""Prompts and evaluation text from held-out documents, chosen without any model."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from experiments.tiny.python_text import has_no_error
from redraft.errors import DataError
from redraft.train.data import Corpus, Document

PROMPTS_A_KIND = 48
HELD_OUT_BYTES = 80_000
_MIN_TOKENS, _MAX_TOKENS = 40, 200
_WINDOW_CHARS = 6000
_ATTEMPTS = 200


def write_prompts(corpus: Corpus, tokenizer: Tokenizer, path: Path) -> None:
    """Write one JSON object a line: id, category, turns, the document, and the text that really follows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (document, start, cut, end) in enumerate(_cuts(corpus, tokenizer)):
        prompt = {
            "id": f"{corpus.kind}/{number}",
            "category": corpus.kind,
            "turns": [document.text[start:cut]],
            "source": document.name,
            "reference": document.text[cut:end],
        }
        lines.append(json.dumps(prompt, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cuts(corpus: Corpus, tokenizer: Tokenizer) -> list[tuple[Document, int, int, int]]:
    """Return (document, start, cut, end) of every prompt: documents in order of their hashes, then random places."""
    documents = sorted(corpus.held_out, key=lambda d: hashlib.sha256(d.name.encode()).digest())
    rng = random.Random(0)
    cuts: list[tuple[Document, int, int, int]] = []
    for attempt in range(_ATTEMPTS * PROMPTS_A_KIND):
        if len(cuts) == PROMPTS_A_KIND:
            return cuts
        document = documents[attempt % len(documents)]
        found = _cut(document, tokenizer, rng, first=attempt < len(documents))
        if found and all(document is not d or found[1] <= s or found[0] >= c for d, s, c, _ in cuts):
            cuts.append((document, *found))
    raise DataError(
        f"held-out {corpus.kind} gives {len(cuts)} prompts of {_MIN_TOKENS} to {_MAX_TOKENS} tokens, "
        f"expected {PROMPTS_A_KIND}",
        "give more documents",
    )


def _cut(document: Document, tokenizer: Tokenizer, rng: random.Random, first: bool) -> tuple[int, int, int] | None:
    """Return a part of the document that begins with a prompt of 40 to 200 tokens, cut at a natural place."""
    text = document.text
    marker = text.find("\nAnswer:")
    if text.startswith("Question:") and marker > 0:
        if not first:
            return None
        cut = marker + len("\nAnswer:")
        return (0, cut, len(text)) if len(tokenizer.encode(text[:cut]).ids) <= _MAX_TOKENS else None
    # Code begins at a top-level definition, prose at a paragraph. Both end at a line's end.
    separators = ("\ndef ", "\nclass ", "\n@") if document.name.endswith(".py") else ("\n\n",)
    begin = 0 if first and document.name.endswith(".py") else rng.randrange(len(text))
    if begin:
        places = [p + (1 if s != "\n\n" else 2) for s in separators if (p := text.find(s, begin)) >= 0]
        if not places:
            return None
        begin = min(places)
    window = text[begin : begin + _WINDOW_CHARS]
    wanted = rng.randint(_MIN_TOKENS, _MAX_TOKENS)
    cut = -1
    for place, character in enumerate(window):
        if character != "\n" and not (
            not document.name.endswith(".py") and window[place - 1 : place + 1] in (". ", "! ")
        ):
            continue
        tokens = len(tokenizer.encode(window[: place + 1]).ids)
        if tokens > _MAX_TOKENS:
            break
        cut = place + (1 if character == "\n" else 0)
        if tokens >= wanted:
            break
    if cut <= 0 or len(tokenizer.encode(window[:cut]).ids) < _MIN_TOKENS:
        return None
    if document.name.endswith(".py") and not has_no_error(window[:cut]):  # a definition inside a string
        return None
    return begin, begin + cut, min(len(text), begin + cut + 1500)


def write_held_out(corpus: Corpus, path: Path) -> None:
    """Write about 80 KB of held-out text: the beginnings of documents, separated by `<|endoftext|>`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = sorted(corpus.held_out, key=lambda d: hashlib.sha256(d.name.encode()).digest())
    share = max(2000, HELD_OUT_BYTES // len(documents))
    pieces: list[str] = []
    size = 0
    for document in documents:
        if size >= HELD_OUT_BYTES:
            break
        piece = document.text[:share]
        if len(piece) < len(document.text) and "\n" in piece:
            piece = piece[: piece.rindex("\n") + 1]
        pieces.append(piece.strip("\n"))
        size += len(piece.encode())
    path.write_text("\n<|endoftext|>\n".join(pieces) + "\n", encoding="utf-8")
