"""Skip a build if its bundle is there already: a key covers everything that the build depends on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from redraft.engines.digests import DigestCache, text_digest
from redraft.engines.manifest import load_manifest
from redraft.errors import BundleError


def build_key(checkpoint: Mapping[str, str], config: object, tools: Mapping[str, str], code: Mapping[str, str]) -> str:
    """Digest of a build's inputs.

    checkpoint: digest by file name of every checkpoint file that the build reads.
    config:     the build's configuration, a dataclass whose repr names every field.
    tools:      versions of the libraries that write the graphs.
    code:       digest by file name of the code that writes them (`code_digests`).
    """
    parts = [repr(config)]
    for group in (checkpoint, tools, code):
        parts.append(repr(sorted(group.items())))
    return text_digest(*parts)


def code_digests(*folders: Path) -> dict[str, str]:
    """Digest of every Python file below the folders, by folder name and relative path."""
    files = {f"{folder.name}/{path.relative_to(folder).as_posix()}": path for folder in folders
             for path in folder.rglob("*.py")}  # fmt: skip
    digests = DigestCache().digests(files.values())
    return {name: digests[path] for name, path in files.items()}


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
