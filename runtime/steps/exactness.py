"""A check that logits depend only on a sequence's own tokens, to the bit, with this machine's kernels.

It verifies the same text all at once, token by token, in chunks, as the branch of a tree, in every slot and in batches.
Texts are exact only if none of this changes a bit of the text's logits. With 8-bit activations, the last bit of a
float can become a third of a logit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from redraft.runtime.steps.interface import ChunkRows
from redraft.runtime.steps.measurements import Identity, figures_file, read_figures, write_figures
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.tree import chain, exact_part
from redraft.types import DraftTree, FloatArray, IntArray

_TOKENS, _VARIED = 300, 16
"""Length of the text, longer than a block of most kernels' sums, and its last tokens, which are computed."""
_APART = 4
"""Tokens from one single row or tree to the next, since each call of a large model takes long."""
_ROW_COUNTS = (2, 3, 5, 8, 13)
_STRIDE = 5
"""Difference, modulo the nodes of a tree, between the sizes of chains in adjacent slots of a batch."""
_BRANCHED = np.array([-1, 0, 0, 1, 2, 4, 4, 3, 6], dtype=np.int64)
"""A tree with the text on its path 0, 2, 4, 6, 8. Only the root has the row that it has in a chain."""
_PATH = [0, 2, 4, 6, 8]
_SEED = 20


@dataclass(frozen=True)
class Exactness:
    """Number of compared logits, and the largest difference by the kind of call.

    The keys of `differences` are shown to users; it is empty if every bit agrees.
    """

    compared: int
    differences: dict[str, float]

    @property
    def holds(self) -> bool:
        """True if every bit agrees."""
        return not self.differences


SINGLE_ROW = "one row in a call"


def settle_exactness(verifier: Verifier, identity: Identity) -> Exactness:
    """Return the remaining differences. If a single row differs from several, every call then computes at least two.

    The result is measured once for this `identity` on this machine and saved. It overwrites KV rows, so no request
    may be running.
    """
    path = figures_file({**identity, "exactness": verifier.branches})
    saved = read_figures(path)
    found = _parsed(saved) if saved else None
    if saved and found:
        verifier.steps.fewest_rows = saved["fewest_rows"]
        return found
    found = measure_exactness(verifier)
    if SINGLE_ROW in found.differences:
        verifier.steps.fewest_rows = 2
        found = measure_exactness(verifier)
    write_figures(path, {"fewest_rows": verifier.steps.fewest_rows, **asdict(found)})
    return found


def _parsed(saved: dict[str, Any]) -> Exactness | None:
    """Return the result in a file's JSON; None for any other content."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        if saved["fewest_rows"] in (1, 2):
            return Exactness(int(saved["compared"]), {str(k): float(v) for k, v in saved["differences"].items()})
    return None


def measure_exactness(verifier: Verifier) -> Exactness:
    """Compare the logits of one text, computed in many ways. It overwrites KV rows, so no request may be running.

    It computes a hundred tokens of each sequence after random KV rows. It compares nothing if the buffers are too short
    for a text and a tree.
    """
    compared = 0
    differences: dict[str, float] = {}
    if verifier.max_model_len >= _VARIED + 2 * len(_BRANCHED):
        for name, found, expected in _comparisons(verifier):
            compared += found.size
            if found.tobytes() != expected.tobytes():
                differences[name] = max(differences.get(name, 0.0), float(np.abs(found - expected).max()))
        verifier.steps.forget()
    return Exactness(compared, differences)


def _comparisons(verifier: Verifier) -> Iterator[tuple[str, FloatArray, FloatArray]]:  # noqa: C901 - one loop for each way to compute a row
    """Yield the kind of a call, its logits, and those of the end of the text, computed at once."""
    count = min(_TOKENS, verifier.max_model_len - len(_BRANCHED))
    base = count - _VARIED
    generator = np.random.default_rng(_SEED)
    text, other = generator.integers(0, verifier.vocabulary, (2, count))
    caches = [rows[0] for rows in verifier.steps.host_kv()]  # [H_kv, C, D]
    for rows in caches:  # small keys, so that every row has a share in the attentions' sums
        rows[:, :base] = 0.1 * generator.standard_normal(rows[:, :base].shape, np.float32)
    (last,) = verifier.logits([chain(text[base:])], [base])
    text_rows = [rows[:, base:count].copy() for rows in caches]

    def restore() -> None:
        for rows, saved in zip(caches, text_rows, strict=True):
            rows[:, base:count] = saved

    def logits(tree: DraftTree, start: int) -> FloatArray:
        """Return the logits of a tree over the rows of the text."""
        restore()
        (found,) = verifier.logits([tree], [start])
        return found

    for start in range(base, count, _APART):
        yield SINGLE_ROW, logits(chain(text[start : start + 1]), start), last[start - base :][:1]
    for few in _ROW_COUNTS:
        yield "a few rows in a call", logits(chain(text[count - few :]), count - few), last[-few:]
    yield "the end of a prompt", verifier.chunk_logits(text[base:], base, _VARIED), last[-1:]
    for start in range(base, count - len(_PATH), _APART):
        tree = _tree(text[start:], other)
        if exact_part(tree, start, verifier.branches, verifier.block_rows) is tree:
            yield "a tree's branch", logits(tree, start)[_PATH], last[start - base :][: len(_PATH)]
    if verifier.steps.takes_chunks and verifier.slots > 1:
        restore()
        yield "rows of a prompt beside a tree", _beside_a_tree(verifier, text, base), last[-1:]
    restore()
    for slot in range(1, verifier.max_num_seqs):
        verifier.move(0, slot, count)
    most = min(verifier.max_num_seqs, verifier.most_rows // len(_BRANCHED))
    for max_num_seqs in sorted({2, most} if verifier.max_num_seqs > 1 else ()):  # each size checks a slot of its own
        yield from _in_batches(verifier, max_num_seqs, text, other, last)


def _beside_a_tree(verifier: Verifier, text: IntArray, base: int) -> FloatArray:
    """Return the logits of the text's end, after rows that the last slot got beside a tree in the first."""
    steps, slot, end = verifier.steps, verifier.slots - 1, len(text) - 1
    verifier.move(0, slot, base)
    tree, none = chain(text[:3]), [None] * len(steps.readers)
    step = steps.tree([tree], [base], [ChunkRows(slot, base, text[base:end], none)])
    step.fill([base], [tree], none)
    step.run(False)
    verifier.device.wait()
    verifier.move(slot, 0, end)
    return verifier.logits([chain(text[end:])], [end])[0]


def _in_batches(
    verifier: Verifier, max_num_seqs: int, text: IntArray, other: IntArray, last: FloatArray
) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """Compare the end of the text in the last slot, in one call with slots that hold less of it.

    Their chains have other sizes, so that the call is padded in different ways.
    """
    start, shorter = len(text) - _VARIED, len(text) // 3
    others = max_num_seqs - 1
    for name, tree, rows in (
        ("one token in a batch", chain(text[start : start + 1]), [0]),
        ("several tokens in a batch", chain(text[start : start + len(_PATH)]), range(len(_PATH))),
        ("a tree's branch in a batch", _tree(text[start:], other), _PATH),
    ):
        if exact_part(tree, start, verifier.branches, verifier.block_rows) is tree:
            sizes = [(len(tree) + _STRIDE * slot) % len(_BRANCHED) + 1 for slot in range(others)]
            rest = [chain(text[shorter : shorter + size]) for size in sizes]
            found = verifier.logits([*rest, tree], [shorter] * others + [start])[-1]
            yield name, found[list(rows)], last[: len(rows)]


def _tree(text: IntArray, other: IntArray) -> DraftTree:
    """Return `_BRANCHED` with the first tokens of the text on its path and others elsewhere."""
    tokens = other[: len(_BRANCHED)].copy()
    tokens[_PATH] = text[: len(_PATH)]
    return DraftTree(tokens, _BRANCHED, np.zeros(len(tokens), np.float32))
