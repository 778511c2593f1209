"""Checks that text is Python, finished or not."""

from __future__ import annotations

import ast
import codeop

# CPython's own rule for interactive input: an open bracket, string or block is unfinished, not wrong.
_UNFINISHED: int = (
    codeop.PyCF_ALLOW_INCOMPLETE_INPUT  # type: ignore[attr-defined]
    | codeop.PyCF_DONT_IMPLY_DEDENT  # type: ignore[attr-defined]
    | ast.PyCF_ONLY_AST
)


def has_no_error(text: str) -> bool:
    """Return True if `text`, which may be unfinished, has no syntax error."""
    try:
        compile(text, "<text>", "exec", _UNFINISHED)
    except SyntaxError as error:
        return "incomplete input" in str(error)
    except ValueError:  # a null byte
        return False
    return True


def parses(text: str) -> bool:
    """Return True if `ast.parse` accepts the text."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def syntax_checks(prompt: str, completion: str) -> tuple[bool, bool]:
    """Apply two definitions of "the completion parses" to prompt and completion, cut at the last line's end.

    First: CPython finds no syntax error, though the text may be unfinished. Second, stricter: `ast.parse` also accepts
    the prompt with at least half of the completion's lines, so the completion began a statement and ended it.
    """
    lines = (prompt + completion).splitlines(keepends=True)
    if not lines[-1].endswith("\n"):
        lines.pop()
    if not has_no_error("".join(lines)):
        return False, False
    before = prompt.count("\n")
    least = before + max(1, (len(lines) - before + 1) // 2)
    return True, any(parses("".join(lines[:count])) for count in range(len(lines), least - 1, -1))
