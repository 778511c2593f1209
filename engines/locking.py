"""One build at a time per bundle, across processes, and a termination signal that lets `finally` blocks run."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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
