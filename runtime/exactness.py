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

from redraft.runtime.kept import Identity, kept_file, read_kept, write_kept
from redraft.runtime.tree import chain, exact_part
from redraft.runtime.verifier import PREFILL_CHUNK, Verifier
from redraft.types import DraftTree, FloatArray, IntArray

_TOKENS, _VARIED = 300, 16
"""Length of the text, longer than a block of most kernels' sums, and how many of its last tokens are computed anew."""
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


SINGLE_ROW = "one row in a call"


def settle_exactness(verifier: Verifier, identity: Identity) -> Exactness:
    """Have the verifier compute two rows at least if a single one differs from several; what still differs then.

    Measured once under this `identity` on this machine and kept. Overwrites KV rows: only while no request runs.
    """
    path = kept_file({**identity, "exactness": verifier.branches})
    kept = read_kept(path)
    found = _parsed(kept) if kept else None
    if kept and found:
        verifier.fewest_rows = kept["fewest_rows"]
        return found
    found = measure_exactness(verifier)
    if SINGLE_ROW in found.differences:
        verifier.fewest_rows = 2
        found = measure_exactness(verifier)
    write_kept(path, {"fewest_rows": verifier.fewest_rows, **asdict(found)})
    return found


def _parsed(kept: dict[str, Any]) -> Exactness | None:
    """What a file says; None for anything else."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        if kept["fewest_rows"] in (1, 2):
            return Exactness(int(kept["compared"]), {str(k): float(v) for k, v in kept["differences"].items()})
    return None


def measure_exactness(verifier: Verifier) -> Exactness:
    """Compare the logits of one text, computed in many ways. Overwrites KV rows: only while no request runs.

    Computes some thousand tokens. A buffer too short for a text and a tree is not looked at.
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


def _comparisons(verifier: Verifier) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """What was done otherwise, the logits that came of it, and those of the text verified as prompts are."""
    count = min(_TOKENS, verifier.max_model_len - len(_BRANCHED))
    base = count - _VARIED
    generator = np.random.default_rng(_SEED)
    text, other = generator.integers(0, verifier.vocabulary, (2, count))
    for start in range(0, base, PREFILL_CHUNK):
        verifier.chunk_logits(text[start : min(start + PREFILL_CHUNK, base)], start, min(PREFILL_CHUNK, base - start))

    def anew() -> FloatArray:
        (rows,) = verifier.logits([chain(text[base:])], [base])
        return rows

    last = anew()
    for start in range(base, count):
        (alone,) = verifier.logits([chain(text[start : start + 1])], [start])
        yield SINGLE_ROW, alone, last[start - base :][:1]
    anew()
    for rows in _ROW_COUNTS:
        (some,) = verifier.logits([chain(text[count - rows :])], [count - rows])
        yield "a few rows in a call", some, last[-rows:]
        anew()
    yield "the end of a prompt", verifier.chunk_logits(text[base:], base, _VARIED), last[-1:]
    anew()
    for start in range(base, count - len(_PATH)):
        tree = _tree(text[start:], other)
        if exact_part(tree, start, verifier.branches, verifier.block_rows) is tree:
            (found,) = verifier.logits([tree], [start])
            yield "a tree's branch", found[_PATH], last[start - base :][: len(_PATH)]
            anew()
    for slot in range(1, verifier.max_num_seqs):
        verifier.move(0, slot, count)
    for max_num_seqs in sorted(
        {2, verifier.max_num_seqs} if verifier.max_num_seqs > 1 else ()
    ):  # each looks at a slot of its own
        yield from _in_batches(verifier, max_num_seqs, text, other, last)


def _in_batches(
    verifier: Verifier, max_num_seqs: int, text: IntArray, other: IntArray, last: FloatArray
) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """The end of the text in the last slot, in one call with slots that hold less of it."""
    start, shorter = len(text) - _VARIED, len(text) // 3
    for name, tree, rows in (
        ("one token in a batch", chain(text[start : start + 1]), [0]),
        ("several tokens in a batch", chain(text[start : start + len(_PATH)]), range(len(_PATH))),
        ("a tree's branch in a batch", _tree(text[start:], other), _PATH),
    ):
        if exact_part(tree, start, verifier.branches, verifier.block_rows) is tree:
            rest = chain(text[shorter : shorter + len(tree) % 4 + 1])
            found = verifier.logits([rest] * (max_num_seqs - 1) + [tree], [shorter] * (max_num_seqs - 1) + [start])[-1]
            yield name, found[list(rows)], last[: len(rows)]


def _tree(text: IntArray, other: IntArray) -> DraftTree:
    """`_BRANCHED` with the first tokens of the text on its path and others elsewhere."""
    tokens = other[: len(_BRANCHED)].copy()
    tokens[_PATH] = text[: len(_PATH)]
    return DraftTree(tokens, _BRANCHED, np.zeros(len(tokens), np.float32))
