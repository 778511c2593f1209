"""What tests share is written once in a run, and again after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Once

CALLS: list[str] = []


def write(folder: Path, text: str, fails: bool = False) -> None:
    CALLS.append(text)
    (folder / "text").write_text(text)
    if fails and CALLS.count(text) == 1:
        raise ValueError(text)


def test_equal_arguments_share_a_folder(once: Once) -> None:
    first, again, other = once(write, "a"), once(write, "a"), once(write, "b")
    assert first == again != other
    assert [(folder / "text").read_text() for folder in (first, other)] == ["a", "b"] == CALLS


def test_a_failed_write_is_repeated(once: Once) -> None:
    with pytest.raises(ValueError, match="c"):
        once(write, "c", fails=True)
    assert (once(write, "c", fails=True) / "text").read_text() == "c"
    assert CALLS.count("c") == 2
