"""Draft graphs without the runtime: calls in each form, compared with drafts computed from each text alone.

A family's test says what its drafter computes: `chained` for one that reads its own drafts, `of_heads` for heads that
do not. The trees around it are grown here, node by node.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from redraft import names
from redraft.engines.calls import Calls
from redraft.engines.lowering import lower_any, lower_chain
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.export.drafters import ExportedDrafter, find_exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.exporter import Exporter
from redraft.export.drafters.writing import Target
from redraft.methods import Method, find_method
from redraft.methods.chains import DRAWN_LOG_PROB
from redraft.methods.static_tree import Node, best_tree
from redraft.noise_spec import DRAWN
from tests.engines.sessions import session_of
from tests.noise import keys_of, noise_rows

from .tiny import Verifier, save

NAME = "m"
"""The drafter's id in its bundle."""
CAPACITY, GARBAGE = 64, 99.0
POSITION = 21
"""Of the noise of the first drafted token."""
CERTAIN = -(2.0**-20)
"""Largest log probability of a candidate."""
ROWS = ((5, 1, 3), (2, 4, 2), (1, 3, 5))
"""Rows of each text in each call: a prompt's, then one and all accepted ones. All calls are padded."""
Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
"""Inputs of a draft graph but its KV buffers, which it has -> its outputs."""


@dataclass(frozen=True)
class Sampling:
    """How one sequence samples: its logit scale and temperature, its seed, and whether candidates are drawn."""

    scale: float
    temperature: float = 0.0
    seed: int = 0
    drawn: bool = False

    @property
    def stream(self) -> int:
        return DRAWN if self.drawn else 0

    def scaled(self, logits: np.ndarray, depth: int, vocabulary: np.ndarray) -> torch.Tensor:
        """Logits [H] of a node's candidates, whose depth counts from 0, with noise and scale."""
        (noise,) = noise_rows(self.seed, POSITION + depth, 1, vocabulary, self.stream)
        return torch.from_numpy((logits + np.float32(self.temperature) * noise) * np.float32(self.scale))


GREEDY, SCALED, NOISY = Sampling(1.3), Sampling(0.7), Sampling(0.7, 1.4, seed=1)
DRAWS = Sampling(1 / 0.8, 0.8, seed=5, drawn=True)
in_each_form = pytest.mark.parametrize(
    ("form", "samplings"),
    [
        ("portable", (GREEDY,)),
        ("portable", (GREEDY, NOISY, DRAWS)),
        ("batch", (SCALED, DRAWS, NOISY)),
        ("single", (GREEDY,)),
        ("single", (DRAWS,)),
    ],
    ids=["portable", "portable of several", "batch", "single", "single of draws"],
)


class Draft(NamedTuple):
    """One sequence's draft: tokens, parents and log probabilities with the root, and the logits of its chain [N, H]."""

    tokens: list[int]
    parents: list[int]
    log_probs: list[float]
    chain: np.ndarray


Expected = Callable[[torch.Tensor, list[int], Sampling], Draft]
"""Features [T, n] and the T + 1 tokens of a text -> its draft."""


@dataclass(frozen=True)
class Exported:
    """A drafter's draft graph in its folder.   tables: by name."""

    folder: Path
    method: Method[Any]
    drafter: ExportedDrafter
    tables: Arrays = field(default_factory=dict)
    name: str = NAME

    @property
    def shape(self) -> Any:
        return self.drafter.shape

    @property
    def vocabulary(self) -> np.ndarray:
        """The token of each column of the logits."""
        return self.tables.get(names.DRAFT_VOCABULARY, np.arange(self.shape.vocabulary))

    @classmethod
    def of(cls, folder: Path, method: Method[Any], drafter: ExportedDrafter) -> Exported:
        """A drafter without tables but the draft vocabulary."""
        assert {(ref.initializer, ref.file, ref.dtype) for ref in drafter.tables} <= {
            (names.DRAFT_VOCABULARY, f"weights/{NAME}.tables.safetensors", "I64")
        }
        tables = {
            ref.initializer: np.fromfile(folder / ref.file, np.int64, ref.shape[0], offset=ref.offset)
            for ref in drafter.tables
        }
        return cls(folder, method, drafter, tables)


def trained(
    opened: DrafterCheckpoint, verifier: Verifier, out: Path, options: Any, exporter: Exporter[Any] | None = None
) -> ExportedDrafter:
    """Export a drafter, by default with the exporter of its method."""
    target = Target(NAME, verifier.export, out, options)
    return (exporter or find_exporter(opened.method)).trained(target, opened, Identity.of(verifier.checkpoint))


def export(
    folder: Path, verifier: Verifier, method: str, module: nn.Module, config: Any, options: Any,
    exporter: Exporter[Any] | None = None,
) -> Exported:  # fmt: skip
    """Write a drafter, and its graph in a copy of the verifier's folder."""
    opened = save(folder / "drafter", verifier.checkpoint, method, module, config)
    out = Path(shutil.copytree(verifier.folder, folder / "graphs"))
    return Exported.of(out, find_method(method), trained(opened, verifier, out, options, exporter))


def record_of(exported: Exported) -> GraphRecord:
    """The portable graph's record."""
    return GraphRecord(graph_file(exported.name, names.DRAFT), *exported.method.signatures(exported.shape)[names.DRAFT])


def empty_cache(shape: Any, batch: int) -> np.ndarray:
    """A KV buffer of rows that no draft may read."""
    return np.full((batch, shape.kv_heads, CAPACITY, shape.head_dim), GARBAGE, shape.dtype)


def program(exported: Exported, form: str, batch: int) -> Run:
    """Return the exported graph in one of its forms, over so many slots."""
    record: GraphRecord | None = record_of(exported)
    assert record is not None
    if form != "portable":
        lower = lower_any if form == "batch" else lower_chain
        record = lower(exported.folder, record, f"{exported.name}.draft.{form}")
    assert record is not None
    session = session_of(exported.folder / record.file)
    if form == "portable":  # TensorRT's forms find sizes by these symbols
        sizes = {one.name: tuple(one.shape) for one in session.get_inputs()}
        assert sizes == {spec.name: spec.shape for spec in record.inputs}
    calls = Calls(OnnxRuntimeProgram(session, record))
    for cache in {spec.in_place_of for spec in record.outputs if spec.in_place_of}:
        calls.bind(cache, empty_cache(exported.shape, batch))
    for name, table in exported.tables.items():
        calls.bind(name, table)

    def run(inputs: Arrays) -> Arrays:
        rows = {} if names.PENDING_FEATURES in inputs else {"M": inputs[names.TOKENS].shape[1]}
        call = calls.prepare(**({} if form == "single" else {"B": batch}), **rows)
        for name, values in inputs.items():
            call.inputs[name][...] = values
        call.run()
        return {name: values.copy() for name, values in call.outputs.items()}

    return run


@torch.no_grad()
def check_drafts(
    exported: Exported, run: Run, samplings: Sequence[Sampling], expected: Expected, tolerance: float = 1e-4
) -> list[Draft]:
    """Compare three drafts of each text, with tokens in between that were accepted. Returns the drafts.

    Each text has its own number of rows, scale and noise. Calls overwrite the rows of earlier drafts.
    """
    generator, shape, counts = torch.Generator().manual_seed(4), exported.shape, ROWS[: len(samplings)]
    states = len(exported.method.states_of(shape))
    texts = [torch.randint(0, shape.vocabulary, (sum(rows) + 1,), generator=generator).tolist() for rows in counts]
    features = [torch.randn(len(text) - 1, states * shape.hidden, generator=generator) for text in texts]
    starts, drafts = [0] * len(texts), list[Draft]()
    for rows in zip(*counts, strict=True):
        found = run(inputs_of(exported, features, texts, starts, rows, samplings))
        starts = [start + count for start, count in zip(starts, rows, strict=True)]
        for slot, (end, sampling) in enumerate(zip(starts, samplings, strict=True)):
            draft = expected(features[slot][:end], texts[slot][: end + 1], sampling)
            assert float(draft.chain.std()) > 0.1
            np.testing.assert_allclose(found[names.CHAIN_LOGITS][slot], draft.chain, atol=tolerance)
            assert found[names.TREE_TOKENS][slot].tolist() == draft.tokens
            assert found[names.TREE_PARENTS][slot].tolist() == draft.parents
            np.testing.assert_allclose(found[names.TREE_LOG_PROBS][slot], draft.log_probs, atol=tolerance)
            drafts.append(draft._replace(log_probs=found[names.TREE_LOG_PROBS][slot].tolist()))
    return drafts


def inputs_of(
    exported: Exported, features: list[torch.Tensor], texts: list[list[int]], starts: list[int],
    rows: tuple[int, ...], samplings: Sequence[Sampling],
) -> Arrays:  # fmt: skip
    """The inputs for the next rows of each text. Padded rows have values that would be seen."""
    shape, batch, alone = exported.shape, len(texts), not hasattr(exported.shape, "kv_heads")
    width = names.MAX_PENDING_FEATURES if alone else max(rows) + 1
    read = np.full((batch, width, features[0].shape[1]), GARBAGE, np.float32)
    tokens = np.full((batch, width), shape.vocabulary - 1, np.int64)
    for slot, (start, count) in enumerate(zip(starts, rows, strict=True)):
        read[slot, :count] = features[slot][start : start + count]
        tokens[slot, :count] = texts[slot][start + 1 : start + count + 1]
    common = {names.NUM_PENDING: np.array(rows), **sampling_inputs(samplings, shape.steps)}
    if alone:
        return {names.PENDING_FEATURES: read, names.TOKENS: tokens[range(batch), np.array(rows) - 1], **common}
    states = np.split(read, read.shape[2] // shape.hidden, axis=2)
    return {
        **{names.of_state(names.FEATURE_ROWS, place): state for place, state in enumerate(states)},
        names.TOKENS: tokens, names.POSITIONS: np.arange(width) + np.array(starts)[:, None],
        names.CACHE_LEN: np.array(starts), names.KV_LEN: np.array([max(starts) + width]), **common,
    }  # fmt: skip


def sampling_inputs(samplings: Sequence[Sampling], steps: int) -> Arrays:
    """The inputs of `methods.chains.sampling_inputs` for the positions from POSITION on."""
    return {
        names.DRAFT_LOGIT_SCALE: np.array([one.scale for one in samplings], np.float32),
        names.NOISE_SCALE: np.array([one.temperature for one in samplings], np.float32),
        names.NOISE_KEYS: np.concatenate([keys_of([one.seed], POSITION, steps, one.stream) for one in samplings]),
        names.DRAWN: np.array([int(one.drawn) for one in samplings]),
    }


Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Rows and embeddings of the next tokens, [T, n] each -> the state that the head reads, and the next row, [T, n]."""


def chained(exported: Exported, step: Step, embedding: torch.Tensor, head: torch.Tensor) -> Expected:
    """Drafts of a drafter that reads its own drafts. Each node's path is computed again from its text alone.

    head: rows for all tokens, or for those of the draft vocabulary.
    """
    head = head if len(head) == len(exported.vocabulary) else head[torch.from_numpy(exported.vocabulary)]

    def expected(features: torch.Tensor, tokens: list[int], sampling: Sampling) -> Draft:
        def logits_after(path: tuple[int, ...]) -> np.ndarray:
            rows, read = features, [*tokens[1:], *path]
            for last in range(len(features), len(read) + 1):
                state, following = step(rows, embedding[read[:last]])
                rows = torch.cat([rows, following[-1:]])
            return (head @ state[-1]).numpy()  # type: ignore[no-any-return]

        return grown(exported, logits_after, tokens[-1], sampling)

    return expected


@dataclass(frozen=True)
class _Candidate:
    """A drafted node. order: place among all candidates, level by level.   score: what it is kept for."""

    order: int
    path: tuple[int, ...]
    parent: int
    log_prob: float
    score: float


def grown(
    exported: Exported, logits_after: Callable[[tuple[int, ...]], np.ndarray], root: int, sampling: Sampling,
    chance_after: Callable[[tuple[int, ...]], float] | None = None,
) -> Draft:  # fmt: skip
    """A tree grown level by level: candidates of the best nodes of each level, and of all candidates the best.

    chance_after: of the best candidate after a path; others are as much less likely as the drafter says.
    """
    shape, vocabulary = exported.shape, exported.vocabulary
    width, static = getattr(shape, "width", 1), getattr(shape, "static", False)
    level, every, chain = [_Candidate(-1, (), -1, 0.0, 0.0)], list[_Candidate](), list[np.ndarray]()
    for depth in range(shape.steps):
        added = list[_Candidate]()
        for node in level:
            logits = logits_after(node.path)
            if node is level[0]:
                chain.append(logits)
            log_probs, ranked = sampling.scaled(logits, depth, vocabulary).log_softmax(-1).sort(descending=True)
            if chance_after is not None:
                log_probs = log_probs - log_probs[0] + np.log(chance_after(node.path))
            for rank, column in enumerate(ranked[:width].tolist()):
                log_prob = score = min(float(log_probs[rank]), CERTAIN)
                if sampling.drawn:
                    log_prob = score = DRAWN_LOG_PROB if rank == 0 else -1e4
                elif static:
                    score = DRAWN_LOG_PROB * (rank + 1)
                path, order = (*node.path, int(vocabulary[column])), len(every) + len(added)
                added.append(_Candidate(order, path, node.order, node.log_prob + log_prob, node.score + score))
        every += added
        level = _best(added, width, lambda node: node.score)
    kept = _best(_best(every, shape.nodes - 1, lambda node: node.score), shape.nodes - 1, lambda node: node.log_prob)
    places = {-1: 0, **{node.order: place for place, node in enumerate(kept, 1)}}
    return Draft(
        [root, *(node.path[-1] for node in kept)],
        [-1, *(places[node.parent] for node in kept)],
        [0.0, *(node.log_prob for node in kept)],
        np.stack(chain),
    )


def _best(nodes: list[_Candidate], count: int, by: Callable[[_Candidate], float]) -> list[_Candidate]:
    """The nodes with the largest numbers, in their order. Of equal nodes, the first."""
    return sorted(nodes, key=lambda node: (-by(node), node.order))[:count]


def of_heads(
    exported: Exported, head_logits: Callable[[int, torch.Tensor], torch.Tensor],
    accuracies: Sequence[Sequence[float]],
) -> Expected:  # fmt: skip
    """Drafts of heads: the candidates of a static tree, node by node.

    head_logits: the logits [H] of a head, from 0, after features [T, n].   accuracies: of the heads' candidates, which
    order the tree if candidates are drawn. What was drawn then decides about no node.
    """
    shape, vocabulary = exported.shape, exported.vocabulary
    products = best_tree([shares[: shape.width] for shares in accuracies[: shape.steps]], len(shape.tree))

    def expected(features: torch.Tensor, tokens: list[int], sampling: Sampling) -> Draft:
        logits = torch.stack([head_logits(head, features) for head in range(shape.steps)]).numpy()
        z = torch.stack([sampling.scaled(row, depth, vocabulary) for depth, row in enumerate(logits)])
        log_probs, ranked = z.log_softmax(-1).sort(descending=True)
        joint: dict[Node, float] = {(): 0.0}
        for path in shape.tree:
            joint[path] = joint[path[:-1]] + min(float(log_probs[len(path) - 1, path[-1]]), CERTAIN)
        if sampling.drawn:
            joint = {(): 0.0, **{path: float(np.log(product)) for path, product in products.items()}}
        order = list(joint) if sampling.drawn else sorted(joint, key=lambda path: -joint[path])
        places = {(): -1, **{path: order.index(path[:-1]) for path in order[1:]}}
        nodes = [int(vocabulary[ranked[len(path) - 1, path[-1]]]) for path in order[1:]]
        return Draft([tokens[-1], *nodes], [places[path] for path in order], [joint[path] for path in order], logits)

    return expected


def falls(draft: Draft) -> bool:
    """True if each node's log probability is below that of the node before."""
    return all(first > second for first, second in pairwise(draft.log_probs))
