"""Questions for a chat verifier to answer, by kind. Its answers are the text that drafters learn from.

chat    questions that the verifier asks itself: it continues the template's user turn (Xu et al., "Magpie", 2024)
math    the questions of a `.jsonl` file of word problems
code    functions of the Python standard library: to complete, write, explain, document and test
edit    the same functions with a small change to make, so that most of an answer repeats its question
prose   passages of books: to summarize, translate, rewrite, continue and discuss
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from redraft.errors import CheckpointError, DataError
from redraft.train.data import Document

_MARK = "\u241fquestion\u241f"
_SHORTEST, _LONGEST = 40, 1200  # characters of a function
_PASSAGE_WORDS = (40, 110)
_EDITS = (
    "Add type hints to this function.",
    "Give this function a parameter `verbose=False`, and print what it does if it is true.",
    "Check the arguments of this function, and raise ValueError with a clear message for wrong ones.",
    "Shorten the docstring of this function to one line.",
    "Add a comment to each step of this function.",
    "Log the arguments and the result of this function with `logging.debug`.",
    "Turn this function into an asynchronous one.",
)
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Portuguese")
_PROSE = (
    "Summarize the following passage in two or three sentences.\n\n{}",
    "Translate this passage into {language}:\n\n{}",
    "Rewrite this passage in simple, modern English.\n\n{}",
    "Continue this story:\n\n{}",
    "{}\n\nWho or what is this passage about, and what happens in it?",
    "Rewrite the text below as a short, formal email.\n\n{}",
    "List the main points of this text:\n\n{}",
)


@dataclass(frozen=True)
class ChatTurns:
    """A verifier's chat template as token ids around a user's message.

    before: tokens up to the message.   after: tokens from the end of the turn to the answer.
    ends:   tokens that end an answer: the end of a turn if it is a special token, and the model's end-of-text tokens.
    """

    tokenizer: Any
    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, checkpoint: str, ends: frozenset[int]) -> ChatTurns:
        """Read the template of a checkpoint folder whose model ends texts with tokens of `ends`.

        Raises CheckpointError if there is no template that shows a message.
        """
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        if not tokenizer.chat_template:
            raise CheckpointError(
                f"{checkpoint} has no chat template", "give a chat model, or recipes without questions"
            )
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        before, mark, after = str(text).partition(_MARK)
        if not mark:
            raise CheckpointError(f"the chat template of {checkpoint} does not show the user's message")
        ids = [tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after)]
        turn = {token for token in ids[1][:1] if token in tokenizer.all_special_ids}
        return cls(tokenizer, ids[0], ids[1], ends | turn)

    def ask(self, question: str) -> tuple[int, ...]:
        """Return the tokens up to the answer of a question."""
        return self.around(self.tokenizer.encode(question, add_special_tokens=False))

    def around(self, question: Iterable[int]) -> tuple[int, ...]:
        """Return the tokens up to the answer of a question's tokens."""
        return (*self.before, *question, *self.after)


def questions_of(kind: str, documents: Sequence[Document], count: int, rng: np.random.Generator) -> list[str]:
    """Return questions of a kind about documents, `count` of them if they are of prose."""
    if kind == "math":
        return word_problems(documents)
    if kind == "prose":
        return prose_questions(documents, count, rng)
    return (code_questions if kind == "code" else edit_questions)(documents, rng)


def word_problems(documents: Sequence[Document]) -> list[str]:
    """Return the questions of word problems, without the form that `data` gives them."""
    return [d.text.removeprefix("Question: ").partition("\nAnswer:")[0] for d in documents]


def code_questions(documents: Sequence[Document], rng: np.random.Generator) -> list[str]:
    """Return questions about every function of Python files that has a docstring and a fitting length."""
    questions: list[str] = []
    for document in documents:
        for source, function in _functions(document.text):
            questions += _about(source, function, rng)
    return questions


def _functions(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            text = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
            if _SHORTEST < len(text) < _LONGEST:
                yield text, node


def _about(source: str, function: ast.FunctionDef, rng: np.random.Generator) -> list[str]:
    """Return one question to complete the function, and two of other forms."""
    lines = source.splitlines()
    head = max(1, (function.body[0].end_lineno or function.lineno) - function.lineno + 1)  # through the docstring
    begun = "\n".join(lines[:head]) + "\n"
    described = (ast.get_docstring(function) or "").split("\n\n")[0].replace("\n", " ")
    name = function.name.strip("_")
    others = [
        f"Write a Python function `{name}`. {described}",
        f"Complete this Python function:\n\n```python\n{begun}```",
        f"What does this code do?\n\n```python\n{source}\n```",
        f"Write unit tests for this function:\n\n```python\n{source}\n```",
        f"Find possible bugs in this function and write a better version.\n\n```python\n{source}\n```",
        f"Explain step by step how to implement this in Python: {described}",
    ]
    return [begun, *(others[i] for i in rng.choice(len(others), 2, replace=False))]


def edit_questions(documents: Sequence[Document], rng: np.random.Generator) -> list[str]:
    """Return a question for an edit of every function that `code_questions` asks about."""
    questions: list[str] = []
    for document in documents:
        for source, function in _functions(document.text):
            names = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
            renamed = [f"Rename the parameter `{name}` of this function to `{name}_value`." for name in names]
            edits = (*_EDITS, *renamed[:1])
            edit = edits[rng.integers(len(edits))]
            questions.append(f"{edit} Change nothing else, and write the whole function.\n\n```python\n{source}\n```")
    return questions


def prose_questions(documents: Sequence[Document], count: int, rng: np.random.Generator) -> list[str]:
    """Return `count` questions about passages from random places. Raises DataError if no text is long enough."""
    texts = [words for d in documents if len(words := d.text.split(" ")) > 2 * _PASSAGE_WORDS[1]]
    if not texts:
        raise DataError(f"no document of prose has {2 * _PASSAGE_WORDS[1]} words", "give longer documents")
    sizes = np.array([len(words) for words in texts], dtype=float)
    questions = []
    for index in rng.choice(len(texts), count, p=sizes / sizes.sum()):
        words, length = texts[index], int(rng.integers(*_PASSAGE_WORDS))
        start = int(rng.integers(0, len(words) - length))
        form = _PROSE[rng.integers(len(_PROSE))]
        passage = " ".join(words[start : start + length]).strip()
        questions.append(form.format(passage, language=_LANGUAGES[rng.integers(len(_LANGUAGES))]))
    return questions
