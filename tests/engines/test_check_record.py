"""The record of a bundle's last full check: it saves hashing, and no change that the metadata show gets past it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from redraft.engines import bundle as opening
from redraft.engines import check_record
from redraft.engines.bundle import open_bundle
from redraft.engines.check_record import CheckRecord
from redraft.engines.digests import file_digests
from redraft.engines.manifest import MANIFEST, load_manifest, signed
from redraft.errors import BundleError

from .bundles import write_bundle
from .graphs import Decoder

HOUR_NS = 3600 * 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "redraft" / "checks"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every check begin long after the last change of a file."""
    now = time.time_ns
    monkeypatch.setattr(check_record.time, "time_ns", lambda: now() + HOUR_NS)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were hashed, by name."""
    names: list[str] = []

    def counted(paths: Iterable[Path]) -> dict[Path, str]:
        listed = list(paths)
        names.extend(path.name for path in listed)
        return file_digests(listed)

    monkeypatch.setattr(opening, "file_digests", counted)
    return names


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "engines" / "small"
    write_bundle(path)
    wait_for_tick(path / "verifier.onnx")
    return path


@pytest.fixture
def checked(out: Path, later: None, hashed: list[str]) -> Path:
    """A bundle whose last full check is on record."""
    open_bundle(out)
    assert sorted(hashed) == ["tokenizer.json", "verifier.onnx"]
    hashed.clear()
    return out


def wait_for_tick(path: Path) -> None:
    """Return when a change would get another change time than the file has."""
    probe = path.parent.parent / "probe"
    while True:
        probe.write_text("tick")
        if probe.stat().st_ctime_ns > path.stat().st_ctime_ns:
            return


def flip_byte(file: Path) -> None:
    """Change one byte in place; size and modification time stay."""
    before = file.stat()
    with file.open("r+b") as opened:
        first = opened.read(1)[0]
        opened.seek(0)
        opened.write(bytes([first ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def replace_file(file: Path) -> None:
    """Rename another file of the same size and modification time over it."""
    other = file.parent.parent / "other"
    shutil.copy2(file, other)
    flip_byte(other)
    other.replace(file)


def write_through_link(file: Path) -> None:
    """Change a byte by another name of the file, outside of the bundle."""
    link = file.parent.parent / "link"
    os.link(file, link)
    flip_byte(link)
    link.unlink()


def test_an_unchanged_bundle_is_hashed_once(out: Path, later: None, cache: Path, hashed: list[str]) -> None:
    """On the first full check, and on request."""
    open_bundle(out, verify=False)
    assert not cache.exists()
    for verify, count in ((None, 2), (None, 2), (True, 4), (False, 4)):
        open_bundle(out, verify=verify)
        assert len(hashed) == count


def test_a_bundle_whose_path_is_not_utf8_is_hashed_once(tmp_path: Path, later: None, hashed: list[str]) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9") / "small"
    write_bundle(path)
    open_bundle(path)
    assert len(hashed) == 2
    open_bundle(path)
    assert len(hashed) == 2


@pytest.mark.parametrize("damage", [flip_byte, replace_file, write_through_link])
def test_a_changed_byte_is_found_though_size_and_modification_time_are_the_same(
    checked: Path, damage: Callable[[Path], None]
) -> None:
    damage(checked / "verifier.onnx")
    for _ in range(2):
        with pytest.raises(BundleError, match=r"verifier\.onnx: expected SHA-256"):
            open_bundle(checked)


@pytest.mark.parametrize(
    "touch",
    [
        lambda file: file.touch(),
        lambda file: file.chmod(0o600),
        lambda file: os.link(file, file.parent.parent / "link"),
        lambda file: shutil.copy2(file, file.with_suffix(".new")).replace(file),
    ],
    ids=["touch", "chmod", "hard link", "copy"],
)
def test_a_file_with_other_metadata_is_hashed_again_with_all_others(
    checked: Path, hashed: list[str], touch: Callable[[Path], None]
) -> None:
    touch(checked / "verifier.onnx")
    open_bundle(checked)
    assert len(hashed) == 2
    open_bundle(checked)
    assert len(hashed) == 2


def test_only_verify_finds_a_change_that_the_metadata_hide(checked: Path) -> None:
    """Someone who writes the cache hides a change so; so does a failing disk. After it the record is gone."""
    flip_byte(checked / "verifier.onnx")
    CheckRecord.of(checked, load_manifest(checked)).keep()
    open_bundle(checked)
    for verify in (True, None):
        with pytest.raises(BundleError, match=r"verifier\.onnx: expected SHA-256"):
            open_bundle(checked, verify=verify)


def test_a_manifest_that_expects_other_bytes_is_not_covered(checked: Path) -> None:
    values = json.loads((checked / MANIFEST).read_text())
    values["files"]["verifier.onnx"]["sha256"] = "0" * 64
    (checked / MANIFEST).write_text(json.dumps(signed(values)))
    with pytest.raises(BundleError, match=r"verifier\.onnx: expected SHA-256 000000000000"):
        open_bundle(checked)


def test_another_bundle_at_the_same_place_is_hashed(checked: Path, cache: Path, hashed: list[str]) -> None:
    write_bundle(checked, Decoder(seed=1))
    open_bundle(checked)
    assert len(hashed) == 2
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(("age_ns", "hashes"), [(1_900_000_000, 2), (2_100_000_000, 0)])
def test_a_file_that_changed_just_before_the_check_is_not_trusted(
    out: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch, age_ns: int, hashes: int
) -> None:
    """A second change within one tick of a coarse clock would not show."""
    newest = max(path.stat().st_ctime_ns for path in out.iterdir() if path.name != MANIFEST)
    monkeypatch.setattr(check_record.time, "time_ns", lambda: newest + age_ns)
    open_bundle(out)
    hashed.clear()
    open_bundle(out)
    assert len(hashed) == hashes


def test_a_file_that_changes_while_it_is_hashed_is_not_trusted(
    out: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hash_then_change(paths: Iterable[Path]) -> dict[Path, str]:
        found = file_digests(paths)
        flip_byte(out / "verifier.onnx")
        return found

    monkeypatch.setattr(opening, "file_digests", hash_then_change)
    open_bundle(out)
    monkeypatch.setattr(opening, "file_digests", file_digests)
    with pytest.raises(BundleError, match=r"verifier\.onnx: expected SHA-256"):
        open_bundle(out)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"bundle"', '"colour"'),
        lambda text: text.replace("small", "elsewhere"),
        lambda text: text.replace("verifier.onnx", "other.onnx"),
    ],
)
def test_a_broken_or_foreign_record_means_a_full_check(
    checked: Path, cache: Path, hashed: list[str], damage: Callable[[str], str]
) -> None:
    (file,) = cache.iterdir()
    file.write_text(damage(file.read_text()))
    open_bundle(checked)
    assert len(hashed) == 2
    open_bundle(checked)
    assert len(hashed) == 2


@pytest.mark.parametrize("place", ["file", "/proc/nowhere"])
def test_a_cache_that_cannot_be_written_means_a_full_check_each_time(
    out: Path, later: None, hashed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, place: str,
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    caplog.set_level(logging.DEBUG, "redraft")
    for opened in (1, 2):
        open_bundle(out)
        assert len(hashed) == 2 * opened
        assert [record.levelno for record in caplog.records] == [logging.DEBUG] * opened
    flip_byte(out / "verifier.onnx")
    with pytest.raises(BundleError, match="expected SHA-256"):
        open_bundle(out)


def test_records_of_bundles_that_are_gone_are_dropped(checked: Path, cache: Path) -> None:
    """So are records that cannot be read. The others stay."""
    other, gone = checked.parent / "other", checked.parent / "gone"
    for path in (other, gone):
        shutil.copytree(checked, path)
        open_bundle(path)
    shutil.rmtree(gone)
    (cache / "broken.json").write_text("{")
    open_bundle(checked, verify=True)
    found = {json.loads(path.read_text())["bundle"] for path in cache.iterdir()}
    assert found == {str(checked.resolve()), str(other.resolve())}


def test_all_names_of_a_bundle_share_a_record(
    checked: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = checked.parent / "link"
    link.symlink_to(checked)
    open_bundle(link)
    monkeypatch.chdir(checked)
    open_bundle(".")
    assert hashed == []
