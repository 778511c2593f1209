"""Bundles that are changed as another build would change them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from redraft.engines.manifest import load_manifest, signed


def rewrite(bundle: Path) -> None:
    """Let a bundle's manifest have the digests of its files."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name, record in manifest["files"].items():
        content = (bundle / name).read_bytes()
        record |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (bundle / "manifest.json").write_text(json.dumps(signed(manifest)))


def retrain(bundle: Path, drafter: str = "lyanna") -> None:
    """Give a drafter other weights, in files of their own, as a build does."""
    record, rng = load_manifest(bundle).drafters[drafter], np.random.default_rng(0)
    for name in {ref.file for ref in record.weights}:
        content = bytearray((bundle / name).read_bytes())
        for ref in record.weights:
            if ref.file == name and ref.dtype == "F32":
                values = np.frombuffer(content, np.float32, ref.length // 4, ref.offset)
                content[ref.offset : ref.offset + ref.length] = rng.permutation(values).tobytes()
        (bundle / name).unlink()
        (bundle / name).write_bytes(content)
    rewrite(bundle)
