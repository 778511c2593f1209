"""Whether logits depend on a sequence's own tokens only, to the bit, on this machine's kernels.

The same text is verified all at once, token by token, in chunks, as the branch of a tree, in every slot and beside
others. Lossless in every precision means that nothing of that changes a bit of its logits: 8-bit activations turn the
last bit of a float into a difference of a third of a logit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from redraft.runtime.host_verifier import HostVerifier
from redraft.runtime.kept import Identity, kept_file, read_kept, write_kept
from redraft.runtime.tree import is_chain
from redraft.types import DraftTree, FloatArray, IntArray

_TOKENS = 48
_ROW_COUNTS = (2, 3, 5, 8, 13, 16)
_BRANCHED = np.array([-1, 0, 0, 1, 2, 4, 4, 3, 6], dtype=np.int64)
"""A tree whose path 0, 2, 4, 6, 8 carries the text: none of its nodes but the root has a chain's row."""
_PATH = [0, 2, 4, 6, 8]
_SEED = 20


@dataclass(frozen=True)
class Exactness:
    """What was compared, and how much of it differed: the largest difference of a logit by what it was.

    The keys of `differences` are words for users; it is empty where every bit agrees.
    """

    compared: int
    differences: dict[str, float]

    @property
    def holds(self) -> bool:
        """Whether every bit agrees."""
        return not self.differences

    @property
    def only_single_rows(self) -> bool:
        """Whether a call of a single row is all that differs."""
        return set(self.differences) == {SINGLE_ROW}


SINGLE_ROW = "one row in a call"


def settle_exactness(verifier: HostVerifier, identity: Identity) -> Exactness:
    """Have the verifier compute two rows at least if a single one is all that differs; what differs then still.

    Measured once under this `identity` on this machine and kept. Overwrites KV rows: only while no request runs.
    """
    path = kept_file({**identity, "exactness": verifier.branches})
    kept = read_kept(path)
    found = _parsed(kept) if kept else None
    if kept and found:
        verifier.fewest_rows = kept["fewest_rows"]
        return found
    found = measure_exactness(verifier)
    if found.only_single_rows:
        verifier.fewest_rows = 2
        found = measure_exactness(verifier)
        verifier.fewest_rows = 2 if found.holds else 1
    write_kept(path, {"fewest_rows": verifier.fewest_rows, **asdict(found)})
    return found


def _parsed(kept: dict[str, Any]) -> Exactness | None:
    """What a file says; None for anything else."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        if kept["fewest_rows"] in (1, 2):
            return Exactness(int(kept["compared"]), {str(k): float(v) for k, v in kept["differences"].items()})
    return None


def measure_exactness(verifier: HostVerifier) -> Exactness:
    """Compare the logits of one text, computed in many ways. Overwrites KV rows: only while no request runs."""
    compared = 0
    differences: dict[str, float] = {}
    for name, found, expected in _comparisons(verifier):
        compared += found.size
        if found.tobytes() != expected.tobytes():
            differences[name] = max(differences.get(name, 0.0), float(np.abs(found - expected).max()))
    return Exactness(compared, differences)


def _comparisons(verifier: HostVerifier) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """What was done otherwise, the logits that came of it, and those of the text verified all at once."""
    count = min(_TOKENS, verifier.capacity - len(_BRANCHED))
    generator = np.random.default_rng(_SEED)
    text, other = generator.integers(0, verifier.vocabulary, (2, count))
    (whole,) = verifier.logits([_chain(text)], [0])
    for start in range(count // 2, count):
        (alone,) = verifier.logits([_chain(text[start : start + 1])], [start])
        yield SINGLE_ROW, alone, whole[start : start + 1]
    for rows in _ROW_COUNTS:
        start = count - rows
        if start > 0:
            verifier.logits([_chain(text)], [0])
            (some,) = verifier.logits([_chain(text[start:])], [start])
            yield "a few rows in a call", some, whole[start:]
    for start in range(max(0, count - 3 * len(_PATH)), count - len(_PATH) if verifier.branches else 0):
        verifier.logits([_chain(text)], [0])
        (tree,) = verifier.logits([_tree(text[start:], other)], [start])
        yield "a tree's branch", tree[_PATH], whole[start : start + len(_PATH)]
    for slots in range(2, verifier.slots + 1):
        yield from _in_batches(verifier, slots, text, other, whole)


def _in_batches(
    verifier: HostVerifier, slots: int, text: IntArray, other: IntArray, whole: FloatArray
) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """The text in the last slot, in one call with others of another length."""
    start = len(text) - len(_PATH)
    shorter = start // 2
    verifier.logits([_chain(other[:start])] * (slots - 1) + [_chain(text[:start])], [0] * slots)
    pasts = [shorter] * (slots - 1) + [start]
    for name, tree, rows in (
        ("one token in a batch", _chain(text[start : start + 1]), [0]),
        ("several tokens in a batch", _chain(text[start:]), range(len(_PATH))),
        ("a tree's branch in a batch", _tree(text[start:], other), _PATH),
    ):
        if not (verifier.branches or is_chain(tree)):
            continue
        beside = _chain(other[shorter : shorter + len(tree) % 4 + 1])
        found = verifier.logits([beside] * (slots - 1) + [tree], pasts)[-1]
        yield name, found[list(rows)], whole[start : start + len(rows)]


def _chain(tokens: IntArray) -> DraftTree:
    return DraftTree(tokens, np.arange(-1, len(tokens) - 1), np.zeros(len(tokens), np.float32))


def _tree(text: IntArray, other: IntArray) -> DraftTree:
    """`_BRANCHED` with the first tokens of the text on its path and others elsewhere."""
    tokens = other[: len(_BRANCHED)].copy()
    tokens[_PATH] = text[: len(_PATH)]
    return DraftTree(tokens, _BRANCHED, np.zeros(len(tokens), np.float32))
