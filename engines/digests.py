"""SHA-256 of files, several at once, with a cache that lets a second build skip files which have not changed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from redraft.cpus import default_threads
from redraft.user_cache import read_object, user_cache, write_object

_CACHE_ENTRIES = 4096


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """SHA-256 of several files, one thread a core (hashlib releases the interpreter lock)."""
    listed = list(paths)
    with ThreadPoolExecutor(default_threads().count) as pool:
        return dict(zip(listed, pool.map(file_digest, listed), strict=True))


def text_digest(*parts: str) -> str:
    """SHA-256 of several strings, each preceded by its length so that no two lists collide."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def build_key(checkpoint: Mapping[str, str], config: object, tools: Mapping[str, str], code: Mapping[str, str]) -> str:
    """Digest of a build's inputs.

    checkpoint: digest by file name of every checkpoint file that the build reads.
    config:     the build's configuration, a dataclass whose repr names every field.
    tools:      versions of the libraries that write the graphs.
    code:       digest by file name of the code that writes them (`code_digests`).
    """
    return text_digest(repr(config), *(repr(sorted(group.items())) for group in (checkpoint, tools, code)))


class DigestCache:
    """Digests of files by device, inode, size and modification time: hard links of one file share an entry.

    It decides if a build is needed. Opening a bundle never trusts it. It is in the user's cache folder. If it cannot be
    read or written, that costs time, not correctness.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or user_cache() / "digests.json"
        self._entries = read_object(self._path) or {}

    def digests(self, paths: Iterable[Path]) -> dict[Path, str]:
        """SHA-256 of every path, hashing only new or changed files. Raises OSError."""
        keys = {path: _identity(path) for path in paths}
        fresh = file_digests(path for path, key in keys.items() if key not in self._entries)
        for path, digest in fresh.items():
            self._entries[keys[path]] = digest
        if fresh:
            self._write()
        return {path: self._entries[key] for path, key in keys.items()}

    def _write(self) -> None:
        recent = dict(list(self._entries.items())[-_CACHE_ENTRIES:])
        with contextlib.suppress(OSError):
            write_object(self._path, recent)


def code_digests(*folders: Path) -> dict[str, str]:
    """Digest of every Python file below the folders, by folder name and relative path."""
    files = {
        f"{folder.name}/{path.relative_to(folder).as_posix()}": path
        for folder in folders
        for path in folder.rglob("*.py")
    }
    digests = DigestCache().digests(files.values())
    return {name: digests[path] for name, path in files.items()}


def _identity(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
