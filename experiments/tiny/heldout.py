"""Prompts and evaluation text from held-out documents, chosen without any model, and checks that text is Python."""

from __future__ import annotations

import ast
import codeop
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from redraft.errors import DataError
from redraft.train.data import SEPARATOR, Corpus, Document

PROMPTS_A_KIND = 48
HELD_OUT_BYTES = 80_000
MIN_TOKENS, MAX_TOKENS = 40, 200
_WINDOW_CHARS, _REFERENCE_CHARS = 6000, 1500
_ATTEMPTS = 200
# CPython's own rule for interactive input: an open bracket, string or block is unfinished, not wrong.
_UNFINISHED: int = (
    codeop.PyCF_ALLOW_INCOMPLETE_INPUT  # type: ignore[attr-defined]
    | codeop.PyCF_DONT_IMPLY_DEDENT  # type: ignore[attr-defined]
    | ast.PyCF_ONLY_AST
)


def has_no_error(text: str) -> bool:
    """Return True if `text`, which may be unfinished Python, has no syntax error."""
    try:
        compile(text, "<text>", "exec", _UNFINISHED)
    except SyntaxError as error:
        return "incomplete input" in str(error)
    except ValueError:  # a null byte
        return False
    return True


def syntax_checks(prompt: str, completion: str) -> tuple[bool, bool]:
    """Apply two definitions of "the completion parses" to prompt and completion, cut at the last line's end.

    First: CPython finds no syntax error, though the text may be unfinished. Second, stricter: `ast.parse` also accepts
    the prompt with at least half of the completion's lines, so the completion began a statement and ended it.
    """

    def parses(text: str) -> bool:
        try:
            ast.parse(text)
        except SyntaxError:
            return False
        return True

    lines = (prompt + completion).splitlines(keepends=True)
    if not lines[-1].endswith("\n"):
        lines.pop()
    if not has_no_error("".join(lines)):
        return False, False
    before = prompt.count("\n")
    least = before + max(1, (len(lines) - before + 1) // 2)
    return True, any(parses("".join(lines[:count])) for count in range(len(lines), least - 1, -1))


def write_held_out(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `prompts/KIND.jsonl`, one JSON object a line, and `heldout/KIND.txt`, about 80 KB of documents' beginnings.

    Raises DataError if the documents give too few prompts.
    """
    documents = sorted(corpus.held_out, key=lambda d: hashlib.sha256(d.name.encode()).digest())
    prompts, text = folder / "prompts" / f"{corpus.kind}.jsonl", folder / "heldout" / f"{corpus.kind}.txt"
    lines = []
    for number, (document, start, cut) in enumerate(_prompts(documents, tokenizer)):
        prompt = {
            "id": f"{corpus.kind}/{number}",
            "category": corpus.kind,
            "turns": [document.text[start:cut]],
            "source": document.name,
            "reference": document.text[cut : cut + _REFERENCE_CHARS],
        }
        lines.append(json.dumps(prompt, ensure_ascii=False) + "\n")
    if len(lines) < PROMPTS_A_KIND:
        raise DataError(f"held-out {corpus.kind} gives {len(lines)} prompts, expected {PROMPTS_A_KIND}",
                        "give more documents")  # fmt: skip
    share = max(2000, HELD_OUT_BYTES // len(documents))
    pieces = [_whole_lines(document.text, share) for document in documents[: -(-HELD_OUT_BYTES // share)]]
    for path, content in ((prompts, "".join(lines)), (text, f"\n{SEPARATOR}\n".join(pieces) + "\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def _whole_lines(text: str, most: int) -> str:
    """Return the beginning of a text, at most so many characters, up to a line's end."""
    piece = text[:most]
    return (piece if len(piece) == len(text) else piece[: piece.rindex("\n")]).strip("\n")


def _prompts(documents: list[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, int, int]]:
    """Yield document, start and cut of every prompt: documents in order, again and again, at random places."""
    rng = random.Random(0)
    taken: list[tuple[Document, int, int]] = []
    for attempt in range(_ATTEMPTS * PROMPTS_A_KIND):
        document = documents[attempt % len(documents)]
        found = _cut(document, tokenizer, rng, first=attempt < len(documents))
        if found and all(document is not d or found[1] <= s or found[0] >= c for d, s, c in taken):
            taken.append((document, *found))
            yield taken[-1]
        if len(taken) == PROMPTS_A_KIND:
            return


def _cut(document: Document, tokenizer: Tokenizer, rng: random.Random, first: bool) -> tuple[int, int] | None:
    """Return the ends of a prompt of MIN_TOKENS to MAX_TOKENS, cut at a natural place; None if there is none.

    A word problem ends after "Answer:". Code begins at a top-level definition, prose at a paragraph; both end at a
    line's end, prose also at a sentence's.
    """
    text, code = document.text, document.name.endswith(".py")

    def tokens(begin: int, end: int) -> int:
        return len(tokenizer.encode(text[begin:end]).ids)

    cut = text.find("\nAnswer:") + len("\nAnswer:")
    if text.startswith("Question:") and cut >= len("\nAnswer:"):
        return (0, cut) if first and tokens(0, cut) <= MAX_TOKENS else None
    begin = 0
    if not (first and code):
        start = rng.randrange(len(text))
        marks = {"\ndef ": 1, "\nclass ": 1, "\n@": 1} if code else {"\n\n": 2}
        begins = [place + skip for mark, skip in marks.items() if (place := text.find(mark, start)) >= 0]
        if not begins:
            return None
        begin = min(begins)
    wanted, cut = rng.randint(MIN_TOKENS, MAX_TOKENS), begin
    for place in range(begin, min(len(text), begin + _WINDOW_CHARS)):
        if text[place] == "\n" or (not code and text[place - 1 : place + 1] in (". ", "! ")):
            if (count := tokens(begin, place + 1)) > MAX_TOKENS:
                break
            cut = place + (text[place] == "\n")
            if count >= wanted:
                break
    if tokens(begin, cut) < MIN_TOKENS or (code and not has_no_error(text[begin:cut])):  # a definition inside a string
        return None
    return begin, cut
