"""Built engines by content: graph, weights, GPU, versions, plugin and settings. A machine builds an engine once.

The cache is bounded: it evicts engines that no bundle has any more, the least recently used first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from redraft.engines.digests import text_digest
from redraft.engines.tensorrt.builder import EngineBuild
from redraft.engines.tensorrt.target import Target
from redraft.files import link_or_copy, same_disk
from redraft.user_cache import user_cache

MOST_BYTES = 64 << 30
DISK_SHARE = 4
"""The cache takes at most one such part of its disk."""
_LEFTOVER_NS = 24 * 3600 * 10**9
"""Age of a temporary file, since its last change, at which the process that wrote it is gone."""
_LOG = logging.getLogger("redraft.tensorrt")


def cache_folder() -> Path:
    """Return the folder of engines and timing caches: redraft/tensorrt in the user's cache folder."""
    return user_cache() / "tensorrt"


def timing_cache(target: Target) -> Path:
    """Return the file of measured kernel times of this TensorRT and GPU."""
    gpu = "".join(letter if letter.isalnum() else "-" for letter in target.gpu.name)
    return cache_folder() / f"timing-{target.version}-{gpu}-{target.compute_capability}.cache"


def engine_key(graph: bytes, weights: Iterable[str], target: Target, plugin: str, build: EngineBuild) -> str:
    """Return the digest of all that an engine depends on.

    graph:    the prepared graph without its weights.     weights: digests of the files that it names.
    plugin:   digest of the plugin's library, empty for none.
    """
    settings = repr((build.profiles, build.settings))
    return text_digest(
        graph.hex(), *sorted(weights), target.product.title, target.version, target.gpu.name, target.compute_capability,
        plugin, settings,
    )  # fmt: skip


def has(key: str) -> bool:
    """Return True if the cache has the engine of this key."""
    return _path(key).is_file()


def fetch(key: str, out: Path) -> bool:
    """Put the cached engine of this key at `out`. Returns False if the cache has none."""
    cached = _path(key)
    try:
        link_or_copy(cached, out)
    except (FileNotFoundError, NotADirectoryError):  # another process may evict it at any time
        return False
    with contextlib.suppress(OSError):  # marks the last use; digests need the old modification time
        os.utime(cached, ns=(time.time_ns(), cached.stat().st_mtime_ns))
    return True


def keep(key: str, engine: Path) -> None:
    """Add a built engine, and evict others. If the cache cannot take it, the next build takes longer.

    Nothing is evicted for an engine that is above the limit alone. A cached engine is written whole or not at all.
    """
    cached = _path(key)
    folder = cached.parent
    added = 0 if same_disk(engine.parent, folder) else engine.stat().st_size
    temporary = folder / f"{cached.name}.{os.getpid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        fits = added <= limit_bytes(folder)
        if fits:
            evict(folder, added)
        if not fits or added > shutil.disk_usage(folder).free:
            _LOG.warning("%s is not cached: %.1f GB are too many for %s", engine.name, added / 1e9, folder)
            return
        try:
            link_or_copy(engine, temporary)
            temporary.replace(cached)
        finally:
            temporary.unlink(missing_ok=True)


def evict(folder: Path, added: int = 0) -> None:
    """Delete the least recently used engines until the others and `added` bytes are within the limit.

    Also deletes what killed processes left. Other processes may evict at the same time.
    """
    oldest_ns = time.time_ns() - _LEFTOVER_NS
    for path, stat in _states(folder, "*.engine.*"):
        if stat.st_ctime_ns < oldest_ns:
            path.unlink(missing_ok=True)
    own = sorted(_own(folder), key=lambda one: one[1].st_atime_ns)
    excess = sum(stat.st_size for _, stat in own) + added - limit_bytes(folder)
    for path, stat in own:
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= stat.st_size


def engine_count(folder: Path) -> int:
    """Return the number of engines in a cache folder."""
    return len(list(folder.glob("*.engine")))


def own_bytes(folder: Path) -> int:
    """Return bytes of the engines that only the cache holds. Hard links of a bundle's engines take no space."""
    return sum(stat.st_size for _, stat in _own(folder))


def limit_bytes(folder: Path) -> int:
    """Return the largest `own_bytes` of the cache in this existing folder: a share of the disk, and MOST_BYTES."""
    return min(MOST_BYTES, shutil.disk_usage(folder).total // DISK_SHARE)


def _own(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Return the engines that only the cache holds."""
    return [(path, stat) for path, stat in _states(folder, "*.engine") if stat.st_nlink == 1]


def _states(folder: Path, pattern: str) -> list[tuple[Path, os.stat_result]]:
    """Return files with their metadata, without those that another process deletes meanwhile."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return found


def _path(key: str) -> Path:
    return cache_folder() / f"{key}.engine"
