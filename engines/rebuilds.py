"""Two builds of one bundle: the drafters that differ, if nothing else does."""

from __future__ import annotations

from redraft.engines.bundle import Bundle
from redraft.engines.manifest import DrafterRecord, FileRecord, Manifest
from redraft.errors import BundleError


def changed_drafters(opened: Bundle, found: Bundle) -> tuple[str, ...]:
    """Return the ids of the drafters that are new, gone or different in `found`, another build of the open bundle.

    Raises BundleError if the two differ in more than drafters: the open verifier would not be that of the new drafters.
    """
    before, after = opened.manifest, found.manifest
    verifiers = [_others(manifest) for manifest in (before, after)]
    if verifiers[0] != verifiers[1]:
        names = {name for files in verifiers for name in files}
        different = min(name for name in names if verifiers[0].get(name) != verifiers[1].get(name))
        raise BundleError(
            f"{found.path} differs from the open bundle in more than drafters: {different}",
            "open the bundle again to use it",
        )
    ids = dict.fromkeys((*before.drafters, *after.drafters))
    return tuple(name for name in ids if _drafter(before, name) != _drafter(after, name))


def _others(manifest: Manifest) -> dict[str, FileRecord]:
    """Return all files but those that only drafters use."""
    used = {record.file for record in manifest.graphs.values()} | {ref.file for ref in manifest.weights}
    own = {file for record in manifest.drafters.values() for file in _files(record)} - used
    return {name: record for name, record in manifest.files.items() if name not in own}


def _drafter(manifest: Manifest, name: str) -> tuple[DrafterRecord, dict[str, FileRecord]] | None:
    """Return a drafter with its files; None if the bundle has none of this id."""
    record = manifest.drafters.get(name)
    return None if record is None else (record, {file: manifest.files[file] for file in _files(record)})


def _files(record: DrafterRecord) -> set[str]:
    refs = (*record.weights, *record.tables)
    return {graph.file for graph in record.graphs.values()} | {ref.file for ref in refs}
