"""Writes an engine bundle: stages it in a sibling folder, computes digests, flushes, then renames it into place.

One process at a time builds a bundle. A termination signal lets `finally` blocks run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from redraft.engines.digests import DigestCache
from redraft.engines.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    bundle_name,
    dump_manifest,
    has_random_weights,
    rebuild_command,
)
from redraft.errors import BundleError


@contextmanager
def build_lock(path: Path, target: Path) -> Iterator[None]:
    """Hold the lock file `path` during the build of `target`, and remove the file afterwards.

    The operating system drops the lock of a killed process. Raises BundleError at once if another process, which it
    names, holds the lock, or if the file cannot be created.
    """
    descriptor = _acquire(path, target)
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} ({' '.join(sys.argv)[:200]})".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, target: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise unwritable(target, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise BundleError(f"{target} is being built by {holder}", "wait for it, or stop it") from None
        if _still_named(descriptor, path):
            return descriptor
        os.close(descriptor)  # its holder removed the file between open and lock


def unwritable(path: Path, error: OSError) -> BundleError:
    """Return the error for a bundle or folder that cannot be created."""
    return BundleError(f"cannot write {path}: {error.strerror}", "give a writable -o")


def _still_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that a terminated build cleans up. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class BundleWriter:
    """Builds the bundle `out` in `staging`. Only `commit` changes `out`.

    Holds the bundle's lock from entry to exit, and deletes files of killed builds. Never replaces a directory that is
    not a bundle. Without `force`, does not replace a bundle of another name or with an unreadable manifest, or a model
    by `random_weights`. Raises BundleError for these, for a second build at the same time, and if the disk is full.
    """

    def __init__(self, out: Path, name: str, force: bool = False, random_weights: bool = False) -> None:
        self.out = out.absolute()
        self._random = random_weights
        self.staging = self._sibling("building")
        self._name = name
        self._force = force
        self._needed_bytes: int | None = None
        self._held = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._make_folder(self.out.parent)
            stack.enter_context(terminate_as_exit())
            stack.enter_context(build_lock(self.out.parent / f".{self.out.name}.lock", self.out))
            self._clear_leftovers()
            self._check_target()
            self._make_folder(self.staging)
            stack.callback(shutil.rmtree, self.staging, ignore_errors=True)
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        written = _tree_bytes(self.staging)
        self._held.close()
        if error is not None and _is_out_of_space(error):
            raise self._out_of_space(written) from error

    def reserve(self, size_bytes: int) -> None:
        """Check before writing that the disk has space for the bundle. Raises BundleError if it does not."""
        self._needed_bytes = size_bytes
        if shutil.disk_usage(self.staging).free < size_bytes:
            raise self._out_of_space(0)

    def commit(self, manifest: Manifest) -> Manifest:
        """Digest and flush every staged file, write the manifest last, and exchange the bundle for the old one.

        Returns the manifest as written, with its `files`.
        """
        digests = DigestCache().digests(sorted(path for path in self.staging.rglob("*") if path.is_file()))
        files = {
            path.relative_to(self.staging).as_posix(): FileRecord(path.stat().st_size, digest)
            for path, digest in digests.items()
        }
        complete = replace(manifest, files=files)
        (self.staging / MANIFEST).write_text(dump_manifest(complete), encoding="utf-8")
        _flush_tree(self.staging)
        self._exchange()
        return complete

    def _exchange(self) -> None:
        old = self._sibling("old")
        if self.out.exists():
            self.out.rename(old)
        try:
            self.staging.rename(self.out)
        except BaseException:
            if old.exists():
                old.rename(self.out)
            raise
        _flush(self.out.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _clear_leftovers(self) -> None:
        """Remove staging folders of killed builds, and restore a bundle whose exchange was interrupted."""
        for old in self.out.parent.glob(f".{self.out.name}.old-*"):
            if self.out.exists():
                shutil.rmtree(old)
            else:
                old.rename(self.out)
        for staging in self.out.parent.glob(f".{self.out.name}.building-*"):
            shutil.rmtree(staging)

    def _check_target(self) -> None:
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return
        if not (self.out / MANIFEST).is_file():
            raise BundleError(f"{self.out} exists and is not an engine bundle", "give another -o, or remove it")
        if self._force:
            return
        found = bundle_name(self.out)
        if found != self._name:
            raise BundleError(
                f"{self.out} holds the bundle {found!r}, not {self._name!r}",
                f"give another -o, or {rebuild_command(self.out)}",
            )
        if self._random and not has_random_weights(self.out):
            raise BundleError(
                f"{self.out} holds engines of a model, which random weights would replace",
                "give another -o, or --force",
            )

    def _out_of_space(self, written: int) -> BundleError:
        free = shutil.disk_usage(self.out.parent).free
        needed = f"{_megabytes(self._needed_bytes)} needed" if self._needed_bytes else f"{_megabytes(written)} written"
        return BundleError(
            f"no space for {self.out}: {needed}, {_megabytes(free)} free", "free space, or give an -o on another disk"
        )

    def _sibling(self, role: str) -> Path:
        return self.out.parent / f".{self.out.name}.{role}-{os.getpid()}"

    def _make_folder(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error


def _is_out_of_space(error: BaseException) -> bool:
    """Return True if the error or its cause is a full disk, also if only a library's message says so."""
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, OSError) and chain.errno in _NO_SPACE:
            return True
        if "No space left on device" in str(chain):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _flush_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
