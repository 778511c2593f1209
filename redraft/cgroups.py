"""The control groups that limit this process: its own group and all groups above it, of versions 1 and 2."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def group_folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield folders of the groups that limit a controller, such as `cpu`: the process's own group first.

    A folder has the files of version 1 or 2. A controller is in one of the two, so the other's files are missing.
    `root` is the folder of `proc` and `sys`. Nothing is yielded where the system has no control groups.
    """
    groups = dict(_groups(root))
    for mounted, top, controllers in _mounts(root):
        if controllers and controller not in controllers:
            continue
        group = PurePosixPath(groups.get(controller if controllers else "", "/"))
        inner = group.relative_to(top).parts if group.is_relative_to(top) else ()
        for count in range(len(inner), -1, -1):
            yield (root / mounted.lstrip("/")).joinpath(*inner[:count])


def read_text(path: Path) -> str:
    """Return the stripped text of a small file, empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield controllers and their group. Version 2 has the controller ""."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, group


def _mounts(root: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield where each hierarchy is mounted, its group there, and controllers of version 1; version 2 has none."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        top, mounted = (_ESCAPED.sub(lambda code: chr(int(code[1], 8)), field) for field in fields[3:5])
        yield mounted, top, () if kind[0] == "cgroup2" else tuple(kind[2].split(","))
