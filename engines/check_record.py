"""Checks that a bundle has not changed, without hashing all of its files again.

`is_current` skips a build if its bundle is there already. `CheckRecord` is the record of a bundle's last full check.
`docs/bundles.md` says what a record does not protect from.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from redraft.engines.digests import DigestCache
from redraft.engines.manifest import MANIFEST, Manifest, load_manifest
from redraft.errors import BundleError, UsageError
from redraft.records import from_plain, to_plain
from redraft.user_cache import read_object, user_cache, write_object

_LOG = logging.getLogger("redraft.bundles")
_CLOCK_NS = 2_000_000_000
"""The coarsest clock of a file system (FAT). A second change within one tick leaves the change time as it is."""


@dataclass(frozen=True)
class FileState:
    """A file by its metadata, in bytes and nanoseconds, and the SHA-256 that the manifest expects of it.

    The operating system sets `changed_ns` (ctime) on every change. Programs can only set `modified_ns` (mtime).
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path, sha256: str) -> Self:
        """Return the state of a file now. Raises OSError."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, sha256)


@dataclass(frozen=True)
class CheckRecord:
    """States of a bundle's files at one time.

    bundle: the absolute path without symbolic links.   taken_ns: time before the first state was read, since the epoch.
    files:  by their names in the manifest.
    """

    bundle: str
    taken_ns: int
    files: Mapping[str, FileState]

    @classmethod
    def of(cls, bundle: Path, manifest: Manifest) -> Self:
        """Return the states of a bundle's files now. Raises OSError."""
        taken_ns = time.time_ns()
        files = {name: FileState.of(bundle / name, record.sha256) for name, record in manifest.files.items()}
        return cls(str(bundle.resolve()), taken_ns, files)

    def is_kept(self) -> bool:
        """Return True if the last full check found these files, and none has changed since."""
        last = _read(self._path)
        return last is not None and last._settled and (last.bundle, last.files) == (self.bundle, self.files)

    def keep(self) -> None:
        """Keep the record of a full check, and drop those of bundles that are gone.

        Nothing is kept in a cache that cannot be written: every opening then checks all bytes.
        """
        try:
            write_object(self._path, to_plain(self))
            _drop_gone(self._path.parent)
        except OSError as error:
            _LOG.debug("cannot keep the check of %s: %s; the next opening checks all bytes", self.bundle, error)

    def forget(self) -> None:
        """Drop the bundle's record, since its bytes are not those that were checked."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        place = hashlib.sha256(os.fsencode(self.bundle)).hexdigest()  # a path may have bytes that are not UTF-8
        return user_cache() / "checks" / f"{place[:32]}.json"

    @property
    def _settled(self) -> bool:
        """True if a change after `taken_ns` gets another change time in every file."""
        return all(state.changed_ns + _CLOCK_NS < self.taken_ns for state in self.files.values())


def is_current(out: Path, key: str) -> bool:
    """Return True if `out` is a bundle built from `key` with nothing missing or changed.

    A file is not read again if its size and modification time are those of its last digest.
    """
    try:
        manifest = load_manifest(out)
        if manifest.build_key != key:
            return False
        found = DigestCache().digests(out / name for name in manifest.files)
    except (BundleError, OSError):
        return False
    return all(found[out / name] == record.sha256 for name, record in manifest.files.items())


def _read(path: Path) -> CheckRecord | None:
    """Return a record; None if the file is missing, damaged or of another version."""
    values = read_object(path)
    try:
        return None if values is None else from_plain(CheckRecord, values, "check record")
    except UsageError:
        return None


def _drop_gone(folder: Path) -> None:
    """Drop records that cannot be read or whose bundle is gone. Raises OSError."""
    for path in folder.glob("*.json"):
        record = _read(path)
        if record is None or not os.path.isfile(os.path.join(record.bundle, MANIFEST)):
            path.unlink(missing_ok=True)
