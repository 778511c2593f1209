"""The engine cache: any part that an engine depends on changes its key; cached engines come back unchanged."""

from __future__ import annotations

import filecmp
import os
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from redraft.engines.gpu import Gpu
from redraft.engines.tensorrt import engine_cache
from redraft.engines.tensorrt.builder import EngineBuild, Settings
from redraft.engines.tensorrt.engine_cache import engine_key, fetch, keep, timing_cache
from redraft.engines.tensorrt.target import RTX, Target
from redraft.engines.tensorrt_records import Profile, Range
from redraft.files import link_or_copy

GPU = Gpu("NVIDIA H200", (9, 0), 1, 2)
TARGET = Target("10.13.3", GPU)
PROFILES = (Profile("tree", {"x": Range((1,), (2,), (3,))}),)
BUILD = EngineBuild(Path("a.onnx"), PROFILES, Path("times"), TARGET, (), (), Path("p.so"))
PARTS = (b"graph", ("digest",), TARGET, "plugin", BUILD)


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (0, b"other"),
        (1, ("other",)),
        (2, Target("10.14.0", GPU)),
        (2, Target("10.13.3", GPU, RTX)),
        (2, Target("10.13.3", replace(GPU, name="NVIDIA H100"))),
        (2, Target("10.13.3", replace(GPU, compute_capability=(8, 9)))),
        (3, "other"),
        (4, replace(BUILD, profiles=(Profile("tree", {"x": Range((1,), (2,), (4,))}),))),
        (4, replace(BUILD, embed_plugin=True)),
        (4, replace(BUILD, workspace_bytes=1)),
    ],
)
def test_every_part_changes_the_key(place: int, other: object) -> None:
    changed = [*PARTS]
    changed[place] = other
    assert engine_key(*changed) != engine_key(*PARTS)  # type: ignore[arg-type]


def test_free_memory_and_paths_do_not_change_the_key() -> None:
    elsewhere = replace(BUILD, graph=Path("/b/a.onnx"), timing_cache=Path("/c"), plugin=Path("/d.so"))
    busy = Target("10.13.3", replace(GPU, free_bytes=0))
    assert engine_key(b"graph", ("digest",), busy, "plugin", elsewhere) == engine_key(*PARTS)


def test_tools_and_settings_of_a_build_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key has every setting of the builder, also constant ones."""
    before = engine_key(*PARTS)
    for field in fields(Settings):
        changed = replace(BUILD.settings, **{field.name: not getattr(BUILD.settings, field.name)})
        with monkeypatch.context() as patch:
            patch.setattr(EngineBuild, "settings", changed)
            assert engine_key(*PARTS) != before, field.name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(engine_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of at most 250 bytes."""
    monkeypatch.setattr(engine_cache, "MOST_BYTES", 250)


def kept(key: str, folder: Path, used: int, size: int = 100, linked: bool = False) -> None:
    """Put an engine with this time of last use into the cache; unless `linked`, its bundle is gone."""
    engine = folder / key
    engine.write_bytes(bytes(size))
    keep(key, engine)
    if not linked:
        engine.unlink()
    os.utime(folder / "cache" / f"{key}.engine", (used, 0))


def names_in(cache: Path) -> list[str]:
    return sorted(path.stem for path in cache.iterdir())


def test_the_engines_used_least_recently_are_evicted(tmp_path: Path, small: None, cache: Path) -> None:
    for used, key in enumerate(("a", "b", "c"), 1):
        kept(key, tmp_path, used)
    assert names_in(cache) == ["a", "b", "c"]  # the last one had a bundle when it was added
    assert fetch("a", tmp_path / "again")
    stat = (tmp_path / "again").stat()
    assert (stat.st_size, stat.st_mtime) == (100, 0)  # a bundle's digests need the time of writing
    assert stat.st_atime > 1
    (tmp_path / "again").unlink()
    kept("d", tmp_path, 4)
    assert names_in(cache) == ["a", "c", "d"]
    assert engine_cache.own_bytes(cache) == 300
    for used, key in enumerate("wxyz", 5):
        kept(key, tmp_path, used, linked=True)
    assert {"w", "x", "y", "z"} <= set(names_in(cache))  # engines of bundles take no space


def test_on_another_disk_engines_are_evicted_before_one_is_copied(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    monkeypatch.setattr(engine_cache, "same_disk", lambda one, other: False)
    kept("a", tmp_path, 1)
    kept("b", tmp_path, 2)
    kept("c", tmp_path, 3)
    assert names_in(cache) == ["b", "c"]
    engine = tmp_path / "large"
    engine.write_bytes(bytes(251))
    keep("large", engine)
    assert names_in(cache) == ["b", "c"]
    assert "large is not cached: 0.0 GB are too many for" in caplog.text


def test_an_engine_that_vanishes_before_it_is_fetched_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may evict it at any time."""

    def vanished(cached: Path, out: Path) -> None:
        cached.unlink()
        link_or_copy(cached, out)

    kept("a", tmp_path, 1)
    monkeypatch.setattr(engine_cache, "link_or_copy", vanished)
    assert not fetch("a", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("vanishing", ["a", "b", "c"])
def test_engines_that_vanish_during_an_eviction_do_not_stop_it(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, vanishing: str, cache: Path
) -> None:
    for used, key in enumerate("abc", 1):
        kept(key, tmp_path, used)
    glob = Path.glob

    def vanish_when_listed(folder: Path, pattern: str) -> list[Path]:
        found = sorted(glob(folder, pattern))
        (folder / f"{vanishing}.engine").unlink(missing_ok=True)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", vanish_when_listed)
        kept("d", tmp_path, 4)
    assert names_in(cache) == sorted({*"abcd"} - {vanishing})


@pytest.mark.parametrize(("hours", "left"), [(23, ["a", "b", "b.engine"]), (25, ["a", "b"])])
def test_temporary_files_of_other_processes_are_deleted_after_a_day(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, hours: int, left: list[str], cache: Path
) -> None:
    """Another process renames its file at the end, and has no engine in the cache if the file is gone."""
    now = time.time_ns()
    kept("a", tmp_path, 1)
    (cache / "b.engine.1").write_bytes(bytes(300))
    monkeypatch.setattr(engine_cache.time, "time_ns", lambda: now + hours * 3600 * 10**9)
    kept("b", tmp_path, 2)
    assert names_in(cache) == left
    assert engine_cache.own_bytes(cache) == 200


def test_timing_caches_are_kept_apart_by_version_and_gpu(tmp_path: Path, cache: Path) -> None:
    other = Target("11.0.0", GPU)
    assert timing_cache(TARGET).name == "timing-10.13.3-NVIDIA-H200-9.0.cache"
    assert timing_cache(TARGET) != timing_cache(other)


def test_without_hard_links_the_system_copies_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is as large as the weights, and does not pass through memory."""
    engine = tmp_path / "verifier.engine"
    engine.write_bytes(b"engine")

    def refused(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refused)
    monkeypatch.setattr(Path, "read_bytes", refused)
    keep("key", engine)
    assert fetch("key", tmp_path / "again")
    assert filecmp.cmp(engine, tmp_path / "again", shallow=False)
