"""Small files in the user's cache: whole or absent, and tests have a cache of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.user_cache import read_object, user_cache, write_object


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for value, expected in (("/elsewhere", "/elsewhere/redraft"), ("", "/home/someone/.cache/redraft")):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache() == Path(expected)


def test_without_a_home_folder_nothing_is_read_or_kept(no_home: None) -> None:
    file = user_cache() / "object.json"
    assert read_object(file) is None
    with pytest.raises(NotADirectoryError):
        write_object(file, {})


def test_tests_have_a_cache_of_their_own(cache_of_tests: Path) -> None:
    assert user_cache() == cache_of_tests / "redraft"
    assert Path.home() not in cache_of_tests.parents


def test_an_object_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "object.json"
    write_object(file, {"a": [1, "ä"]})
    assert read_object(file) == {"a": [1, "ä"]}


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "[" * 100_000])
def test_another_content_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    assert read_object(tmp_path / "file") is None
    assert read_object(tmp_path / "none") is None
    assert read_object(tmp_path) is None


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    file = tmp_path / "object.json"
    write_object(file, {"old": 1})
    with pytest.raises(TypeError):
        write_object(file, {"new": object()})
    assert read_object(file) == {"old": 1}
    assert list(tmp_path.iterdir()) == [file]
