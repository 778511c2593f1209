"""A toy verifier as a program of the host, and a byte tokenizer.

The fake writes token and position into the KV rows of every layer. It answers from the rows that it may read, so a
wrong mask, position, cache_len, compaction or slot raises an error or changes the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from redraft import names, signatures
from redraft.engines.device import Buffer, Run, check_bindings
from redraft.engines.drafters import single_sequence
from redraft.engines.host_device import array_of
from redraft.runtime import Runtime, SamplingParams, api
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.loop import speculation
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.text.chat import DEFAULT, ChatTemplates
from redraft.runtime.text.tokenizer import Tokenizer
from redraft.signatures import VerifierShape
from redraft.types import Costs

Rule = Callable[[list[int]], int]
BOS, EOS, VOCABULARY = 256, 257, 258
CURVE = CostCurve.from_points({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5, 32: 4.5})
"""Milliseconds of a verification, by nodes."""
SHAPE = VerifierShape(layers=2, kv_heads=2, head_dim=2, hidden=3, vocabulary=VOCABULARY, max_positions=512)


def know_costs(patch: pytest.MonkeyPatch) -> None:
    """Measure no costs: verifications cost CURVE at first, and drafts nothing."""
    patch.setattr(api, "load_costs", lambda verifier, identity: VerifyCosts({1: CURVE}))
    patch.setattr(speculation, "cached_costs", lambda *given: Costs())


def fix_costs(patch: pytest.MonkeyPatch) -> None:
    """Make calls cost the same on every machine. The clock stands, so nothing corrects that."""
    know_costs(patch)
    patch.setattr(time, "perf_counter", lambda: 0.0)


def mixing_rule(tokens: list[int]) -> int:
    """Depends on the last two tokens and, through a parity, on all tokens. N-grams are correct in part."""
    mixed = (tokens[-1] * 7 + tokens[-2 if len(tokens) > 1 else -1] * 3 + 1) * 2654435761 % (1 << 32)
    return (mixed >> 13) % 5 + (1 if sum(tokens) % 11 == 0 else 0) + 97


def script(text: bytes | list[int], prompt_length: int) -> Rule:
    """Return a model that continues any prompt of that length with `text`, and then `.` for ever."""
    said = list(text)
    return lambda tokens: said[i] if (i := len(tokens) - prompt_length) < len(said) else ord(".")


class FakeEngine:
    """The toy verifier as a `redraft.engines.device.Program`, with the signature of the graph for batches.

    single: with that of the graph for one sequence, which fixes B at 1.   padded: with that of the portable graph.
    sparse: sequences of a call may have no rows, as with redraft's own attention.
    sizes, rows: B and T, and the rows that products compute, of each call.
    """

    def __init__(
        self, rule: Rule = mixing_rule, hidden_states: tuple[str, ...] = (), single: bool = False, padded: bool = False,
        sparse: bool = False,
    ) -> None:  # fmt: skip
        inputs, outputs = signatures.verifier_inputs(SHAPE), signatures.verifier_outputs(SHAPE, hidden_states)
        self.packed = not (single or padded)
        self.sparse = sparse
        if self.packed:
            inputs, outputs = signatures.packed_inputs(inputs), signatures.packed_outputs(outputs)
        elif single:
            inputs, outputs = single_sequence(inputs), single_sequence(outputs)
        self.inputs, self.outputs = inputs, outputs
        self.rule = rule
        self.sizes: list[tuple[int, int]] = []
        self.rows: list[int] = []

    def fail(self) -> None:
        """Raise an error if this call should fail."""

    def bind(self, buffers: Mapping[str, Buffer]) -> Run:
        """Bind the fake to arrays."""
        check_bindings((*self.inputs, *self.outputs), buffers)
        return FakeCall(self, {name: array_of(buffer) for name, buffer in buffers.items()}).run


class FakeHost:
    """A host whose only program is a fake of the verifier."""

    name = "host"
    asynchronous = step_graphs = False
    block_rows = None
    host_threads = 1

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.own_attention = engine.sparse

    def program(self, graph: str, short: bool = False) -> FakeEngine:
        return self.engine

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


def fake_verifier(
    engine: FakeEngine, max_model_len: int, max_num_seqs: int = 1, hidden_states: tuple[str, ...] = (), slots: int = 0
) -> Verifier:
    """Return a verifier over a fake."""
    return Verifier(FakeHost(engine), SHAPE, max_model_len, max_num_seqs, hidden_states, slots=slots)


def engine_of(verifier: Verifier) -> FakeEngine:
    """Return the fake of a verifier."""
    engine: FakeEngine = verifier.device.engine
    return engine


class FakeCall:
    """The fake over arrays of one set of sizes."""

    def __init__(self, engine: FakeEngine, arrays: Mapping[str, np.ndarray]) -> None:
        self.engine = engine
        self.inputs = {spec.name: arrays[spec.name] for spec in engine.inputs if not spec.name.startswith("kv.")}
        self.caches = [arrays[spec.name] for spec in engine.inputs if spec.name.startswith("kv.")]
        self.outputs = {spec.name: arrays[spec.name] for spec in engine.outputs if spec.in_place_of is None}

    def run(self) -> None:
        """Raise AssertionError for inputs that a graph's contract forbids, then compute every output row."""
        inputs = self.inputs
        batch, width, _ = inputs[names.TREE_MASK].shape
        places, ids = self._places(batch, width), inputs[names.TOKEN_IDS].reshape(-1)
        self.engine.sizes.append((batch, width))
        self.engine.rows.append(len(places))
        past = inputs[names.CACHE_LEN]
        assert inputs[names.KV_LEN][0] == past.max() + width
        padded_ids = np.full(batch * width, ids[0])
        positions = (past[:, None] + np.arange(width)).reshape(-1)
        padded_ids[places], positions[places] = ids, inputs[names.POSITIONS].reshape(-1)
        new = np.stack([padded_ids, positions], axis=1).reshape(batch, width, 2)
        counts = np.bincount(places // width, minlength=batch) if self.engine.sparse else np.full(batch, width)
        rows = [self._write(b, int(past[b]), new[b, : counts[b]]) for b in range(batch)]
        self.engine.fail()
        wanted = inputs[names.OUTPUT_ROWS]
        starts = 0 if self.engine.packed else width * np.arange(batch)[:, None]
        logits = self.outputs[names.LOGITS].reshape(-1, VOCABULARY)
        for row, place in enumerate(places[(wanted + starts).reshape(-1)].tolist()):
            b, node = divmod(place, width)
            answer = self._answer(rows[b], b, int(past[b]), node)
            logits[row] = 0 if answer != NO_NUMBERS else np.nan
            logits[row, answer] += 2.0
        for name, features in self.outputs.items():
            if name.startswith("hidden_states."):
                features.reshape(len(ids), -1)[:] = ids[:, None]

    def _places(self, batch: int, width: int) -> np.ndarray:
        """Return the place of each row in the padded form. Every sequence has its first nodes there, in order."""
        if not self.engine.packed:
            return np.arange(batch * width)
        places = self.inputs[names.PACKED_ROWS]
        counts = np.bincount(places // width, minlength=batch)
        assert len(counts) == batch
        assert self.engine.sparse or counts.min() >= 1, "a sequence has no row"
        expected = np.concatenate([b * width + np.arange(count) for b, count in enumerate(counts)])
        assert (places == expected).all(), "rows are not packed in order"
        return places

    def _write(self, b: int, past: int, new: np.ndarray) -> np.ndarray:
        """Write this call's rows [T, 2] to every layer. Returns all valid rows as (token, position)."""
        kv_len = past + len(new)
        views = []
        for number, buffer in enumerate(self.caches):
            assert kv_len <= buffer.shape[2], "rows past the capacity"
            of_layer = np.array([1000 * number, 0])
            buffer[b, :, past:kv_len] = new + of_layer
            views.append(buffer[b, :, :kv_len] - of_layer)
        assert (np.stack(views) == views[0][0]).all(), "layers or heads disagree"
        return views[0][0].astype(int)

    def _answer(self, rows: np.ndarray, b: int, past: int, node: int) -> int:
        visible = self.inputs[names.TREE_MASK][b][node][: len(rows) - past]
        assert visible[node], "a node must attend to itself"
        if visible.sum() == 1 and node > 0:
            return 0  # padding
        seen = np.concatenate([rows[:past], rows[past:][visible]])
        seen = seen[np.argsort(seen[:, 1], kind="stable")]
        assert (seen[:, 1] == np.arange(len(seen))).all(), "positions are not those of one path"
        return self.engine.rule(seen[:, 0].tolist())


NO_NUMBERS = -1
"""A rule's answer where all logits are NaN."""


def plain(rule: Rule, prompt: list[int], count: int) -> list[int]:
    """Return the toy model's tokens without speculation."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(rule(tokens))
    return tokens[len(prompt) :]


def byte_text(bos: int | None = BOS, template: str | None = None) -> Tokenizer:
    """A tokenizer whose first 256 ids are bytes, then BOS and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {_byte(letter): letter for letter in alphabet}
    tokenizer = tokenizers.Tokenizer(models.BPE({letters[value]: value for value in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    templates = {} if template is None else {DEFAULT: template}
    return Tokenizer(tokenizer, ChatTemplates(templates, {"bos_token": "<s>", "eos_token": "</s>"}), bos)


def _byte(letter: str) -> int:
    """Return the byte of a letter in the byte-level alphabet. Printable bytes represent themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    code = ord(letter)
    return code if code < 256 else [value for value in range(256) if value not in printable][code - 256]


def make_runtime(
    rule: Rule = mixing_rule, max_model_len: int = 200, max_num_seqs: int = 1, curve: CostCurve = CURVE,
    options: Mapping[str, Mapping[str, object]] | None = None, **text: object,
) -> Runtime:  # fmt: skip
    """Return a runtime over the fake. With one slot, it uses the fake whose B is fixed."""
    engine = FakeEngine(rule, single=max_num_seqs == 1)
    verifier = fake_verifier(engine, max_model_len, max_num_seqs)
    return Runtime(verifier, byte_text(**text), VerifyCosts({max_num_seqs: curve}), max_model_len, (EOS,), options)


def greedy(max_tokens: int = 40, **values: object) -> SamplingParams:
    """Return parameters of a request."""
    return SamplingParams(max_tokens=max_tokens, **values)
