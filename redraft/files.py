"""Files: texts of users, large files that several folders share, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

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


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that becomes `path` at the end of the block. An interrupted write leaves `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def write_json(path: Path, values: Any) -> None:
    """Write plain values as a whole file of indented JSON."""
    with whole_file(path) as file:
        file.write(f"{json.dumps(values, indent=1)}\n".encode())
