"""Finding the plugin's library: for the right major version of TensorRT, or one line that names the found files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from redraft.engines.tensorrt.plugin import VARIABLE, find_plugin
from redraft.errors import BackendError


def library(folder: Path, major: int) -> Path:
    path = folder / f"libredraft_tensorrt_{major}.so"
    path.write_bytes(b"code")
    return path


def test_the_library_of_the_major_version_is_found_with_its_digest(tmp_path: Path) -> None:
    library(tmp_path, 11)
    expected = library(tmp_path, 10)
    found = find_plugin(10, tmp_path, {})
    assert (found.path, found.digest) == (expected, hashlib.sha256(b"code").hexdigest())


def test_a_missing_library_names_found_files_and_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"libredraft_tensorrt_10\.so, found none; build it with `make plugins"):
        find_plugin(10, tmp_path, {})
    library(tmp_path, 11)
    with pytest.raises(BackendError, match=r"found libredraft_tensorrt_11\.so; .* --attention native"):
        find_plugin(10, tmp_path, {})


def test_the_variable_names_another_library_but_none_of_another_major(tmp_path: Path) -> None:
    other = tmp_path / "mine.so"
    other.write_bytes(b"code")
    assert find_plugin(10, tmp_path, {VARIABLE: str(other)}).path == other
    with pytest.raises(BackendError, match="was built for TensorRT 11, expected 10; build it"):
        find_plugin(10, tmp_path, {VARIABLE: str(library(tmp_path, 11))})
