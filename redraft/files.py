"""Files: texts of users, and large files that several folders share."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from redraft.errors import DataError, UsageError


def read_text(file: Path) -> str:
    """Return a UTF-8 text file. Raises UsageError if it cannot be opened, DataError if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", "check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 (byte {error.start})", "convert it, for example with iconv") from error


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link of `source` if the file system allows it, else a copy.

    ONNX Runtime reads weights through hard links and refuses symbolic ones.
    """
    with contextlib.suppress(OSError):
        os.link(source.resolve(), target)
        return
    shutil.copyfile(source, target)


def same_disk(one: Path, other: Path) -> bool:
    """Return True if two folders are on one file system, so that files can be linked. A folder may not exist yet."""
    devices = {next(path for path in (f, *f.parents) if path.exists()).stat().st_dev for f in (one, other)}
    return len(devices) == 1
