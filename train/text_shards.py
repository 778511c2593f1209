"""Texts that a verifier wrote, as shards of arrays: tokens, and the states that were kept of them.

    tokens                          uint32 [T], the texts one after the other
    lengths, prompts                int64 [R], tokens of every text, and of its prompt
    kinds, temperatures             by text
    hidden8.NAME                    int8 [T, ...], codes and scales of hidden states; missing if not kept
    top_ids, top_logits, log_sum    of every token, as of `states.States`; missing if no state was kept

text.json has the recipe, the number of texts, and digests of verifier and data.

A folder has a shard for every batch that was written, as .npy files that are memory-mapped. A shard is written under
another name and then renamed, so every shard is whole. A packed file (.npz) has all tokens as one shard. It has no
states, which are computed again if needed, and less than a thousandth of the size.
"""

from __future__ import annotations

import json
import lzma
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from redraft.errors import DataError, UsageError
from redraft.export.drafters.checkpoint import Identity
from redraft.files import whole_file, write_json
from redraft.records import to_plain

FACTS = "text.json"
SHARDS = "shards"
PACKED = "texts.npz"
HIDDEN = "hidden8."
TOP = ("top_ids", "top_logits", "log_sum")
FORM = {"states": "blocks of 32 in 8 bits"}
"""In the facts of folders that keep states, so that those of another form are refused."""
_OF_TEXTS = ("lengths", "prompts", "kinds", "temperatures")
_SPARE_BYTES = 4 << 30
"""Space that is left free on the disk."""

Arrays = Mapping[str, NDArray[Any]]


class Shard:
    """One shard: a folder of .npy files, or a packed file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __contains__(self, name: str) -> bool:
        return name in _packed(self.path) if self.path.suffix == ".npz" else (self.path / f"{name}.npy").exists()

    def array(self, name: str) -> NDArray[Any]:
        """Return an array; a large one of a folder is memory-mapped."""
        if self.path.suffix == ".npz":
            return _packed(self.path)[name]
        return (_loaded if name in _OF_TEXTS else _mapped)(self.path / f"{name}.npy")


class Shards:
    """The shards of a folder of texts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards = folder / SHARDS

    def __contains__(self, index: int) -> bool:
        return self._path(index).is_dir()

    def __iter__(self) -> Iterator[Shard]:
        """Yield the shards with states, or the packed file if there are none."""
        written = sorted(path for path in self._shards.glob("*") if path.suffix != ".tmp")
        packed = self._folder / PACKED
        yield from map(Shard, written or ([packed] if packed.exists() else []))

    def packed(self) -> Shard:
        """Return the packed file. Raises UsageError if the folder has none."""
        path = self._folder / PACKED
        if not path.is_file():
            raise UsageError(f"{self._folder} has no {PACKED}", "give a folder that `redraft train pack` wrote")
        return Shard(path)

    def check_complete(self) -> None:
        """Raise DataError if texts are missing that text.json counts."""
        if not (self._folder / FACTS).exists():
            return
        expected = load_facts(self._folder).get("texts")
        found = sum(len(shard.array("lengths")) for shard in self)
        if expected is not None and found != expected:
            raise DataError(
                f"{self._folder} has {found} of {expected} texts", "give the command that wrote it again: it continues"
            )

    def _path(self, index: int) -> Path:
        return self._shards / f"{index:04d}"

    def fits(self, bytes_needed: int) -> bool:
        """Return True if the disk has space for arrays of this size."""
        self._shards.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self._shards).free > bytes_needed + _SPARE_BYTES

    def __getitem__(self, index: int) -> Shard:
        return Shard(self._path(index))

    def add(self, index: int, arrays: Arrays) -> None:
        """Write a shard."""
        target = self._path(index)
        unfinished = target.with_suffix(".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array)
        unfinished.rename(target)


def pack(texts: Path, out: Path) -> None:
    """Write the tokens of a folder of texts as a packed file in the folder `out`. Raises UsageError without texts."""
    shards = list(Shards(texts))
    if not shards:
        raise UsageError(f"{texts} has no texts", "give a folder that `redraft train text` wrote")
    Shards(texts).check_complete()
    arrays = {name: np.concatenate([shard.array(name) for shard in shards]) for name in ("tokens", *_OF_TEXTS)}
    small = arrays["tokens"].max() < 1 << 16
    arrays["tokens"] = arrays["tokens"].astype(np.uint16 if small else np.uint32)
    save_packed(out / PACKED, arrays)
    save_facts(out, load_facts(texts))


def save_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the record of texts: their recipe, and digests of their verifier and data."""
    write_json(folder / FACTS, facts)


def load_facts(folder: Path) -> dict[str, Any]:
    """Read the record of texts. Raises DataError if it is missing or damaged."""
    try:
        found = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{folder / FACTS} is missing or damaged", "give a folder that `redraft train text` wrote")
    return found


def save_packed(path: Path, arrays: Arrays) -> None:
    """Write arrays as a whole .npz file, compressed by LZMA: half the size that NumPy's own reaches."""
    with whole_file(path) as whole, zipfile.ZipFile(whole, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))  # the same bytes at any time
            entry.compress_type = zipfile.ZIP_LZMA
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def load_packed(path: Path) -> dict[str, NDArray[Any]]:
    """Read an .npz file. Raises DataError if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return dict(found)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} is damaged ({error})", "write or copy it again") from None


def split(lengths: NDArray[np.int64], flat: NDArray[Any]) -> Sequence[NDArray[Any]]:
    """Split an array of texts that lie one after the other."""
    return np.split(flat, np.cumsum(lengths)[:-1])


def check_written_by(folder: Path, verifier: Identity) -> None:
    """Raise UsageError if another verifier wrote the texts of a folder."""
    if load_facts(folder).get("verifier") != to_plain(verifier):
        raise UsageError(
            f"another verifier wrote the texts in {folder}",
            "give their verifier, or write texts with `redraft train text`",
        )


def _array(path: Path, mmap_mode: Literal["r"] | None) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(path, mmap_mode=mmap_mode)
    except (FileNotFoundError, ValueError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error})", f"remove {path.parent}; it is written again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return found


_packed = lru_cache(maxsize=2)(load_packed)
_loaded = lru_cache(maxsize=8192)(partial(_array, mmap_mode=None))
_mapped = lru_cache(maxsize=512)(partial(_array, mmap_mode="r"))  # each has an open file
