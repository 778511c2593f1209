"""Models that peers made of a checkpoint, kept in a folder for the next run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redraft.bench.peers.base import Decoder, Model, Peer, PeerError, Source
from redraft.config import Precision
from redraft.packages import package_version

RECORD = "made_from.json"
_OF_A_MODEL = ("*.safetensors", "*.gguf", "*.json")


def open_peer(peer: Peer, source: Source, precision: Precision, keep: Path, threads: int, context: int) -> Decoder:
    """Open a peer's model, converted now if `keep` lacks it. Raises PeerError and the errors of the library."""
    draft = None
    if source.draft is not None and peer.pairs:
        draft = kept_model(peer, replace(source, checkpoint=source.draft), precision, keep / "draft")
    return peer.open(Model(kept_model(peer, source, precision, keep), precision, threads, context, draft))


def kept_model(peer: Peer, source: Source, precision: Precision, keep: Path) -> Path:
    """Return the folder of a peer's model, converted now unless `keep` has it from the same files and version.

    Raises PeerError.
    """
    folder = keep / peer.name / precision
    wanted = _origin(peer, source, precision)
    if _record(folder) == wanted:
        return folder
    part = folder.with_name(f"{precision}.part")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(parents=True)
    peer.convert(source, precision, part)
    (part / RECORD).write_text(json.dumps(wanted, indent=2))
    return part.rename(folder)


def run_tool(command: Sequence[str | Path]) -> None:
    """Run a converter. Raises PeerError with the last line that it wrote."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        raise PeerError(f"`{' '.join(map(str, command[:4]))} …` failed: {lines[-1].strip()}")


def _origin(peer: Peer, source: Source, precision: Precision) -> dict[str, Any]:
    """Return all that a model is made from: the checkpoint's files with sizes and times, format and version."""
    files = sorted(path for pattern in _OF_A_MODEL for path in source.checkpoint.glob(pattern))
    return {
        "checkpoint": str(source.checkpoint.resolve()),
        "files": {path.name: [(found := path.stat()).st_size, found.st_mtime_ns] for path in files},
        "format": peer.formats[precision],
        "version": package_version(peer.package),
    }


def _record(folder: Path) -> Any:
    try:
        return json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
