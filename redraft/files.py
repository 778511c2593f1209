"""Large files that several folders share."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link of `source` if the file system allows it, else a copy.

    ONNX Runtime reads weights through hard links and refuses symbolic ones.
    """
    with contextlib.suppress(OSError):
        os.link(source.resolve(), target)
        return
    shutil.copyfile(source, target)
