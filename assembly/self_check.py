"""Compares the new engines with transformers' own model on a few tokens, plain and by trees: a build's last step."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redraft.assembly.verifier import SharedWork, write_verifier
from redraft.config import BuildConfig, Precision
from redraft.engines import Bundle
from redraft.engines.host_device import HostDevice
from redraft.engines.host_memory import available_bytes
from redraft.errors import BackendError, UnsupportedModelError
from redraft.garbage import return_memory
from redraft.plugins.operators import find_operators
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Sampler, accept
from redraft.runtime.steps.verifier import open_verifier
from redraft.runtime.trees.offers import Speculation
from redraft.runtime.trees.tree import layout, make_tree, root_only
from redraft.types import Budget, FloatArray, Outcome, Tree

if TYPE_CHECKING:
    from redraft.assembly.progress import BuildProgress
    from redraft.assembly.resolve import ResolvedBuild
    from redraft.export.verifier import TracedVerifier

GIB = 1 << 30
CHECKED_NUMBERS = 1_000_000_000
"""Weights of the largest model that is checked whole. Only the first layers of larger models are checked."""
COPIES = 2
"""Copies of the fp32 weights in memory while a whole model is checked: the engine's, and its packed ones."""
TEXT_TOKENS, NEW_TOKENS = 152, 24
"""Number of tokens of a compared text, and number of those after its prompt."""
DISAGREEING = 0.5
"""Largest median difference of two graphs' logits, in standard deviations. Rounded products may differ by 0.4."""
TREES = Budget(nodes=5, depth=2, width=3)
EXACT = 5e-3
"""Largest rounding difference of a logit in fp32, in standard deviations of its row."""
ROUNDED: dict[Precision, float] = {"fp16": 0.1}
"""Largest median difference of a row of logits in a short type (root mean square, in standard deviations)."""


def check_engines(
    build: ResolvedBuild, staged: Bundle, traced: TracedVerifier, work: SharedWork, progress: BuildProgress
) -> None:
    """Compare the staged engines with their reference. Raises UnsupportedModelError if they differ.

    Engines that round their products are compared with products over the same rounded weights and inputs, and what is
    between the products with transformers' own modules. In fp32, logits must agree with transformers'. Of other
    precisions, and if memory cannot hold the fp32 engines, an fp32 export of the first layers must. Raises BackendError
    if memory is too small, since only the user may skip the comparison.
    """
    from redraft.assembly.product_check import check_products
    from redraft.export.reference import reference_logits

    manifest, checkpoint = staged.manifest, build.checkpoint
    precision = manifest.rounding
    texts = known_texts(manifest.shape.vocabulary, checkpoint.config, manifest.max_model_len)
    if build.config.rounds_products:
        products, between = check_products(staged, traced, texts[0])
        also = " and everything between them" if between else ""
        progress.say(f"checked: {products} products{also} equal their rounded reference")
        check_graphs_agree(staged, texts)
        if between:
            return
    numbers = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
    whole = numbers <= CHECKED_NUMBERS and COPIES * 4 * numbers <= (available_bytes() or 0)
    if whole and precision in ("fp32", "fp16") and manifest.backend == "onnxruntime":
        logits = reference_logits(checkpoint, texts)
        progress.say(f"checked: {check_bundle(staged, texts, logits, precision)}")
        if precision == "fp32":
            return
    _check_first_layers(build, staged, texts, work, progress)


def _check_first_layers(
    build: ResolvedBuild, staged: Bundle, texts: Sequence[Sequence[int]], work: SharedWork, progress: BuildProgress
) -> None:
    """Compare an fp32 export of enough layers with transformers. Raises like `check_engines`."""
    from redraft.export.reference import count_numbers, enough_layers, reference_logits

    checkpoint = build.checkpoint
    layers = enough_layers(checkpoint)
    needed, available = COPIES * 4 * count_numbers(checkpoint, layers), available_bytes()
    if available is not None and needed > available:
        raise BackendError(
            f"checking {layers} layers in fp32 takes {needed / GIB:.1f} GiB of memory; {available / GIB:.1f} are free",
            "free memory, or build with --skip-check",
        )
    out = build.out.absolute()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.building-check-", dir=out.parent) as folder:
        config = BuildConfig(max_model_len=staged.manifest.max_model_len)
        traced = work.trace(checkpoint, config, progress, layers)
        exported, graphs = write_verifier(config, traced, Path(folder))
        manifest = replace(
            staged.manifest, precision="fp32", backend=config.backend, shape=exported.shape, hidden_states=(),
            graphs=graphs, weights=exported.weights, drafters={},
        )  # fmt: skip
        logits = reference_logits(checkpoint, texts, layers)
        compared = check_bundle(Bundle(Path(folder), manifest), texts, logits, "fp32")
    progress.say(f"checked (the first {layers} layers in fp32): {compared}")


@dataclass
class KnownText(Sampler):
    """A sampler that accepts the tokens of a known text, and stores the logits at each of its positions."""

    tokens: Sequence[int]
    rows: dict[int, FloatArray] = field(default_factory=dict)
    accepted: int = 0

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Accept the text's own token at the depth of each node, and store the logits."""
        depths = layout(tree.parents).depths.tolist()
        outcome = accept(tree, [self.tokens[min(len(tokens) + depth, len(self.tokens) - 1)] for depth in depths])
        for depth, node in enumerate((0, *outcome.path)):
            self.rows[len(tokens) - 1 + depth] = logits[node].copy()
        self.accepted += len(outcome.path)
        return outcome


class KnownDrafter(TreeMaker):
    """Drafts the next two tokens of a known text after wrong siblings, every second step."""

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        """Return a tree for every second step."""
        return [
            _tree(seq) if budget.depth >= TREES.depth and len(seq.tokens) % 2 else root_only(seq.tokens[-1])
            for seq, budget in zip(batch, budgets, strict=True)
        ]


def _tree(seq: Request) -> Tree:
    """Return the root, a wrong child with one child, the right child, and its wrong and right children."""
    assert isinstance(seq.sampler, KnownText)
    known, at = seq.sampler.tokens, len(seq.tokens)
    first, second = known[at], known[at + 1]
    wrong = next((token for token in known if token not in (first, second)), (first + 1) % (max(known) + 1))
    return make_tree(
        [seq.tokens[-1], wrong, first, first, wrong, second], [-1, 0, 0, 1, 2, 2], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    )


def known_texts(vocabulary: int, config: Any, max_model_len: int) -> list[list[int]]:
    """Return two texts of random tokens, without tokens that the configuration gives a meaning."""
    special = set(named_tokens(config))
    ordinary = [token for token in range(vocabulary) if token not in special] or list(range(vocabulary))
    length = min(TEXT_TOKENS, max_model_len)
    generator = np.random.default_rng(0)
    return [generator.choice(ordinary, size).tolist() for size in (length, max(2, length - 3))]


def _prompt_length(text: Sequence[int]) -> int:
    return max(len(text) // 2, len(text) - NEW_TOKENS)


def named_tokens(values: Any) -> Iterator[int]:
    """Return token ids among the values of a nested configuration."""
    if not isinstance(values, dict):
        return
    for name, value in values.items():
        if isinstance(value, dict):
            yield from named_tokens(value)
        elif name.endswith(("token_id", "token_index", "token_ids")):
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))


def check_bundle(
    bundle: Bundle, texts: Sequence[Sequence[int]], expected: Sequence[FloatArray], precision: Precision
) -> str:
    """Run the texts through every graph of the verifier, one alone and two together, and compare their logits.

    expected: logits [T, V] of each text.   precision: sets the largest allowed difference.
    Returns what was compared. Raises UnsupportedModelError naming the first token that differs.
    """
    tokens = accepted = 0
    for graph, batch in _host_graphs(bundle).items():
        for sampler, logits in zip(_run(bundle, graph, texts[:batch]), expected[:batch], strict=True):
            _compare(graph, sampler, logits, precision)
            tokens += len(sampler.rows)
            accepted += sampler.accepted
    return f"logits of {tokens} tokens, {accepted} of them in draft trees, equal transformers'"


def check_graphs_agree(bundle: Bundle, texts: Sequence[Sequence[int]]) -> None:
    """Run the texts through every graph, alone and together. Raises UnsupportedModelError if a logit differs much.

    On most processors they are equal to the bit, which the first opening of a bundle checks. A graph that is wrong
    differs by more than a rounded product does.
    """
    graphs = _host_graphs(bundle)
    runs = [(graph, count) for graph in graphs for count in (1, 2)] if len(graphs) == 1 else list(graphs.items())
    first, *others = [_run(bundle, graph, texts[:count])[0] for graph, count in runs]
    for (graph, _), other in zip(runs[1:], others, strict=True):
        rows = [(row, other.rows[position]) for position, row in first.rows.items() if position in other.rows]
        apart = float(np.median([np.sqrt(np.mean(np.square(row - found))) / _spread(found) for row, found in rows]))
        if not apart <= DISAGREEING:
            raise UnsupportedModelError(
                f"logits of {runs[0][0]} for one sequence and of {graph} for {runs[1][1]} differ by {apart:.2g} "
                "standard deviations",
                "report this model",
            )


def _host_graphs(bundle: Bundle) -> dict[str, int]:
    """Return the graphs that the CPU may run, and the number of texts to run at once."""
    graphs = {bundle.host_graph(count == 1): count for count in (1, 2)}
    if find_operators() is not None:
        graphs[bundle.host_graph(False, operators=True)] = 2
    return graphs


def _run(bundle: Bundle, graph: str, texts: Sequence[Sequence[int]]) -> list[KnownText]:
    """Run each text through the runtime's own decode loop, with this graph."""
    return_memory()
    manifest = bundle.manifest
    samplers = [KnownText(text) for text in texts]
    requests = [
        Request(list(text[: _prompt_length(text)]), _prompt_length(text), len(text) - 1, frozenset(), sampler)
        for text, sampler in zip(texts, samplers, strict=True)
    ]
    rows = min(manifest.max_model_len, TEXT_TOKENS + TREES.nodes + 1)
    device = HostDevice(bundle, step_graphs=False, max_num_seqs=len(texts), verifier_graph=graph)
    verifier = open_verifier(bundle, device, len(texts), rows)
    verifier.take_branches()
    DecodeLoop(verifier, Speculation(KnownDrafter(verifier), FixedBudget(TREES))).run(requests)
    verifier.close()
    return samplers


def _compare(graph: str, sampler: KnownText, expected: FloatArray, precision: Precision) -> None:
    """Raise UnsupportedModelError if the difference of logits, in standard deviations, is too large."""
    rows = sorted(sampler.rows.items())
    apart = {position: (row - expected[position]) / _spread(expected[position]) for position, row in rows}
    if precision == "fp32":
        for position, difference in apart.items():
            if not (largest := float(np.abs(difference).max())) <= EXACT:
                raise _different(graph, f"after token {position + 1}", largest, EXACT)
    else:
        typical = float(np.median([np.sqrt(np.mean(np.square(difference))) for difference in apart.values()]))
        if not typical <= ROUNDED[precision]:
            raise _different(graph, f"in {precision}, typically", typical, ROUNDED[precision])


def _spread(logits: FloatArray) -> float:
    """Return the standard deviation of a row from its median deviation, which a few masked entries do not increase."""
    deviations = np.abs(logits - np.median(logits))
    return max(1.4826 * float(np.median(deviations)), 1e-12)


def _different(graph: str, where: str, found: float, allowed: float) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the exported model differs from the checkpoint: {where}, logits of graph {graph} differ from transformers' "
        f"by {found:.2g} standard deviations, expected at most {allowed:g}",
        "report this model",
    )
