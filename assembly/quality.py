"""Quality of a bundle: perplexity, divergence and equal next tokens on held-out texts, next to the model in fp32.

The reference is transformers' own model, which runs once over all texts, one layer at a time. The same pass measures
what rounding does to each product (`redraft.export.quantization.calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from redraft import names
from redraft.config import Precision
from redraft.engines import Bundle, open_calls
from redraft.engines.calls import Call, Calls
from redraft.engines.device import numpy_type
from redraft.engines.manifest import Quality
from redraft.errors import UsageError
from redraft.signatures import VerifierShape
from redraft.types import FloatArray, IntArray

if TYPE_CHECKING:
    from redraft.export.quantization.calibrate import Calibration
    from redraft.export.quantization.product_forms import ProductPlan
    from redraft.export.verifier import TracedVerifier

FEWEST = 32
"""Tokens of a kind, if the context holds so many: figures of fewer say nothing, and choices follow from them."""
CHUNK_TOKENS = 64
"""Tokens of one call."""
_SPARE = 1e-30


@dataclass(frozen=True)
class Texts:
    """Token ids to measure on, by kind and all of one length, and those to calibrate with, of the same length."""

    measured: Mapping[str, list[int]]
    calibration: list[int]

    @classmethod
    def of(cls, encoded: Mapping[str, list[int]], tokens: int, longest: int) -> Texts:
        """Return the first tokens of each kind, `tokens` in all, and the ones after them for calibration.

        encoded: token ids by kind, as the tokenizer makes them for a prompt.   longest: largest length of a sequence.
        All kinds are as long as the shortest one. Raises UsageError for one of under FEWEST tokens.
        """
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
    scorer, texts = Scorer(bundle), reference.texts.measured
    compared: dict[str, Compared] = {}
    for number, (kind, tokens) in enumerate(texts.items()):
        chunks: list[Compared] = []
        for logits, expected in zip(scorer.logits(tokens), reference.chunks(kind), strict=True):
            start = CHUNK_TOKENS * len(chunks)
            chunks.append(Compared.of(logits, expected, tokens[start + 1 :][:CHUNK_TOKENS]))
            progress(number * len(tokens) + start, len(texts) * len(tokens))
        compared[kind] = Compared.joined(chunks)
    return Quality(
        {kind: float(np.exp(one.losses.mean())) for kind, one in compared.items()},
        {kind: float(np.exp(one.losses_fp32.mean())) for kind, one in compared.items()},
        {kind: float(one.divergences.mean()) for kind, one in compared.items()},
        {kind: float(one.same.mean()) for kind, one in compared.items()},
        {kind: one.error for kind, one in compared.items()},
        len(tokens),
    )


@dataclass(frozen=True)
class Compared:
    """Figures of a text, token by token: losses of the next tokens, divergence, and equal likeliest tokens."""

    losses: NDArray[np.float64]
    losses_fp32: NDArray[np.float64]
    divergences: NDArray[np.float64]
    same: NDArray[np.bool_]

    @classmethod
    def of(cls, logits: FloatArray, expected: FloatArray, targets: Sequence[int]) -> Compared:
        """Compare logits [T, V]. targets: the next tokens, one fewer at the end of a text."""
        own, exact = _log_softmax(logits), _log_softmax(expected)
        rows, same = np.arange(len(targets)), logits.argmax(-1) == expected.argmax(-1)
        losses, losses_fp32 = (-one[rows, targets].astype(np.float64) for one in (own, exact))
        np.subtract(exact, own, out=own)
        np.exp(exact, out=exact)
        return cls(losses, losses_fp32, np.einsum("tv,tv->t", exact, own).astype(np.float64), same)

    @classmethod
    def joined(cls, chunks: Sequence[Compared]) -> Compared:
        """Join the parts of a text."""
        parts = zip(*((one.losses, one.losses_fp32, one.divergences, one.same) for one in chunks), strict=True)
        return cls(*map(np.concatenate, parts))

    @property
    def error(self) -> float:
        """The standard error of the mean difference of losses."""
        return float(np.std(self.losses - self.losses_fp32) / np.sqrt(max(1, len(self.losses))))


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted: FloatArray = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True) + _SPARE)
    return shifted


class Scorer:
    """Runs the verifier over one sequence at a time, as a chain, in chunks of CHUNK_TOKENS."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.max_model_len = bundle.manifest.max_model_len
        self._engine = open_calls(bundle, names.VERIFIER, threads)
        bind_caches(self._engine, bundle.manifest.shape, self.max_model_len)

    def logits(self, token_ids: Sequence[int]) -> Iterator[FloatArray]:
        """Yield logits after every token, a chunk [T, V] at a time. Each chunk overwrites the one before.

        Raises ValueError if the sequence is longer than `max_model_len`.
        """
        if len(token_ids) > self.max_model_len:
            raise ValueError(f"{len(token_ids)} tokens do not fit max_model_len {self.max_model_len}")
        tokens = np.asarray(token_ids, np.int64)
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
            call = self._engine.prepare(B=1, T=len(chunk), R=len(chunk))
            fill_chain(call, chunk, start)
            call.run()
            yield call.outputs[names.LOGITS][0]


def bind_caches(calls: Calls, shape: VerifierShape, rows: int) -> None:
    """Bind empty KV buffers of one sequence."""
    for layer in range(shape.layers):
        for cache in (names.key_cache(layer), names.value_cache(layer)):
            calls.bind(cache, np.zeros((1, shape.kv_heads, rows, shape.head_dim), numpy_type(shape.kv_dtype)))


def fill_chain(call: Call, tokens: IntArray, start: int) -> None:
    """Set the inputs of one sequence: a chain of `tokens` from position `start`, with logits for every row."""
    count = len(tokens)
    call.inputs[names.TOKEN_IDS][0] = tokens
    call.inputs[names.POSITIONS][0] = np.arange(start, start + count)
    if names.TREE_MASK in call.inputs:  # a graph for chains has no tree mask
        call.inputs[names.TREE_MASK][0] = np.tri(count, dtype=bool)
    call.inputs[names.CACHE_LEN][0] = start
    call.inputs[names.KV_LEN][0] = start + count
    call.inputs[names.OUTPUT_ROWS][0] = np.arange(count)
    if names.PACKED_ROWS in call.inputs:
        call.inputs[names.PACKED_ROWS][:] = np.arange(count)
