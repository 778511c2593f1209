"""How good a bundle is: perplexity, divergence and equal next tokens on held-out texts, next to the model in fp32.

The reference is transformers' own model, which runs once over all texts, one layer at a time. The same pass measures
what rounding does to each product (`redraft.export.quantization.calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from redraft.assembly.scoring import CHUNK_TOKENS, Scorer
from redraft.config import Precision
from redraft.engines import Bundle
from redraft.engines.manifest import Quality
from redraft.errors import UsageError
from redraft.types import FloatArray, IntArray

if TYPE_CHECKING:
    from redraft.export.quantization.calibrate import Calibration
    from redraft.export.quantization.product_forms import ProductPlan
    from redraft.export.verifier import TracedVerifier

DEFAULT_TOKENS, FULL_TOKENS = 1000, 6000
"""Tokens of all kinds together by default, and with `--quality full`."""
FEWEST = 32
"""Tokens of a kind, if the context holds so many: figures of fewer say nothing, and choices follow from them."""
_SPARE = 1e-30


@dataclass(frozen=True)
class Texts:
    """Token ids to measure on, by kind and all of one length, and those to calibrate with, of the same length."""

    measured: Mapping[str, list[int]]
    calibration: list[int]

    @classmethod
    def of(cls, encoded: Mapping[str, list[int]], tokens: int, longest: int) -> Texts | None:
        """Return the first tokens of each kind, `tokens` in all, and the ones after them for calibration.

        encoded: token ids by kind, as the tokenizer makes them for a prompt.   longest: largest length of a sequence.
        All kinds are as long as the shortest one. Raises UsageError for one of under FEWEST tokens, and returns None
        without any kind.
        """
        if not encoded:
            return None
        texts, wanted = encoded, min(-(-tokens // len(encoded)), longest)
        kind, shortest = min(texts.items(), key=lambda item: len(item[1]))
        if len(shortest) < min(FEWEST, wanted):
            raise UsageError(
                f"the text of kind {kind} has {len(shortest)} tokens, too few to measure",
                f"give one of {FEWEST} tokens or more, or --eval-text none",
            )
        length = min(wanted, len(shortest))
        share = -(-length // len(texts))
        rest = [ids[length:][:share] or ids[:share] for ids in texts.values()]
        # A text's first token comes first here too: models often give it their largest activations.
        mixed = [next(iter(texts.values()))[0], *(token for part in rest for token in part)]
        while len(mixed) < length:
            mixed += mixed
        return cls({kind: ids[:length] for kind, ids in texts.items()}, mixed[:length])


@dataclass(frozen=True)
class Reference:
    """The texts' logits in fp32, in a file, [kinds, T, V], and what was measured of each product by precision."""

    texts: Texts
    logits: Path
    vocabulary: int
    calibrations: Mapping[Precision, Calibration]

    def chunks(self, kind: str) -> Iterator[FloatArray]:
        """Yield the logits of one kind, a chunk [T, V] at a time."""
        length = len(self.texts.measured[kind])
        first = list(self.texts.measured).index(kind) * length
        for start in range(0, length, CHUNK_TOKENS):
            rows = min(CHUNK_TOKENS, length - start)
            offset = (first + start) * self.vocabulary * 4
            read = np.fromfile(self.logits, np.float32, rows * self.vocabulary, offset=offset)
            yield read.reshape(rows, self.vocabulary)


def run_reference(
    traced: TracedVerifier, texts: Texts, plans: Sequence[ProductPlan], scratch: Path,
    progress: Callable[[int, int], None],
) -> Reference:  # fmt: skip
    """Run transformers' model over the texts. Memory holds one layer's weights and the logits of one batch.

    plans: of the precisions whose products are measured. Raises UnsupportedModelError if transformers
    cannot run the model.
    """
    from redraft.export.quantization.calibrate import Calibrator
    from redraft.export.reference import run_texts

    measured = list(texts.measured.values())
    calibrator = None
    if plans:
        calibrator = Calibrator(traced.products, traced.source, plans, slice(len(measured), None))
    file = scratch / "reference.logits"
    vocabulary = run_texts(traced, [*measured, texts.calibration], len(measured), file, calibrator, progress)
    return Reference(texts, file, vocabulary, calibrator.found if calibrator else {})


def measure_quality(bundle: Bundle, reference: Reference, progress: Callable[[int, int], None]) -> Quality:
    """Run the bundle's verifier over the texts, and compare it with the reference."""
    scorer = Scorer(bundle)
    kinds = reference.texts.measured
    found: dict[str, _Compared] = {}
    length = len(next(iter(kinds.values())))
    for number, (kind, tokens) in enumerate(kinds.items()):
        compared = _Compared.empty()
        for start, logits, expected in zip(
            range(0, length, CHUNK_TOKENS), scorer.logits(tokens), reference.chunks(kind), strict=True
        ):
            compared.add(logits, expected, np.asarray(tokens[start + 1 :][:CHUNK_TOKENS], np.int64))
            progress(number * length + start, length * len(kinds))
        found[kind] = compared
    return Quality(
        {kind: one.perplexity for kind, one in found.items()},
        {kind: one.perplexity_fp32 for kind, one in found.items()},
        {kind: float(np.mean(one.divergences)) for kind, one in found.items()},
        {kind: float(np.mean(one.same)) for kind, one in found.items()},
        {kind: one.error for kind, one in found.items()},
        length,
    )


@dataclass
class _Compared:
    """Figures of one kind, token by token."""

    losses: list[float]
    losses_fp32: list[float]
    divergences: list[float]
    same: list[bool]

    @classmethod
    def empty(cls) -> _Compared:
        return cls([], [], [], [])

    def add(self, logits: FloatArray, expected: FloatArray, targets: IntArray) -> None:
        """Add a chunk of logits [T, V]. targets: the next tokens, one fewer at the end of a text."""
        own, exact = _log_softmax(logits), _log_softmax(expected)
        rows = np.arange(len(targets))
        self.losses += (-own[rows, targets]).tolist()
        self.losses_fp32 += (-exact[rows, targets]).tolist()
        self.same += (logits.argmax(-1) == expected.argmax(-1)).tolist()
        np.subtract(exact, own, out=own)
        np.exp(exact, out=exact)
        self.divergences += np.einsum("tv,tv->t", exact, own).tolist()

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.mean(self.losses)))

    @property
    def perplexity_fp32(self) -> float:
        return float(np.exp(np.mean(self.losses_fp32)))

    @property
    def error(self) -> float:
        apart = np.subtract(self.losses, self.losses_fp32)
        return float(np.std(apart) / np.sqrt(max(1, len(apart))))


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted: FloatArray = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True) + _SPARE)
    return shifted
