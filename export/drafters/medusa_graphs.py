"""Medusa's draft graph: one product for all heads, one with the verifier's head, and the static tree of candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import nn

from redraft import names
from redraft.errors import CheckpointError, UsageError
from redraft.export import tracing
from redraft.export.drafters import ExportedDrafter, Exporter
from redraft.export.drafters.candidate_tree import below, ordered_tree
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_graph import (
    Sampling,
    check_fit,
    drafter_precision,
    empty_module,
    examples,
    parameter_shapes,
    random_source,
    stem,
    write_tables,
    write_traced,
)
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads, configuration_of
from redraft.export.sources import AnySource
from redraft.export.verifier import VerifierExport
from redraft.export.weight_files import Progress, no_progress
from redraft.methods.medusa import METHOD, MedusaBuild, MedusaShape, Node, best_tree, draft_inputs, draft_outputs

_RANDOM_RANKS = 10
_LEAST = 1e-9
"""Least product of accuracies, for a finite logarithm."""


def configure(drafter: DrafterCheckpoint, options: MedusaBuild) -> MedusaConfig:
    """Return the drafter's configuration. Raises like `tree_of` if its heads do not cover the options."""
    settings = drafter.configure(MedusaConfig)
    tree_of(settings, options, settings.limited(options.draft_vocabulary))
    return settings


def export_medusa(
    name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path,
    options: MedusaBuild, progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of `drafter`, by the id `name`, into `out`, next to the graph of its verifier.

    Raises CheckpointError if the drafter was trained for another verifier or does not load, and like `configure`.
    """
    settings = configure(drafter, options)
    check_fit(drafter, settings, verifier, identity)
    module = empty_module(lambda: MedusaHeads(settings), verifier.shape.dtype)
    source, tokens = drafter.open_weights(parameter_shapes(module), stem(name))
    return _export(name, module, source, tokens, verifier, out, options, progress)


def export_random(
    name: str, configuration: Any, verifier: VerifierExport, out: Path, options: MedusaBuild,
    progress: Progress = no_progress,
) -> ExportedDrafter:  # fmt: skip
    """Write the graph of random heads for a verifier of this transformers configuration.

    Each rank is assumed to be right half as often as the one before.
    """
    heads = {"heads": options.steps} if options.steps else {}
    settings = configuration_of(configuration, verifier.shape.vocabulary, **heads)
    ranks = min(max(_RANDOM_RANKS, options.width or 0), settings.vocab_size)
    assumed = tuple(0.5 ** (rank + 1) for rank in range(ranks))
    settings = MedusaConfig(**{**vars(settings), "rank_accuracies": (assumed,) * settings.heads})
    module = empty_module(lambda: MedusaHeads(settings), verifier.shape.dtype)
    source = random_source(name, module, drafter_precision(options.precision, verifier), out)
    tokens = TokenData(torch.ones(verifier.shape.vocabulary, dtype=torch.long))
    return _export(name, module, source, tokens, verifier, out, options, progress)


EXPORTER = Exporter(configure, export_medusa, export_random)


def _export(
    name: str, module: MedusaHeads, source: AnySource, tokens: TokenData, verifier: VerifierExport, out: Path,
    options: MedusaBuild, progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision, config = drafter_precision(options.precision, verifier), module.config
    drafted = config.limited(options.draft_vocabulary)
    tree = tree_of(config, options, drafted)
    shape = MedusaShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        tree=tuple(tree),
        draft_vocabulary=drafted,
        draft_logit_scale=config.draft_logit_scale,
        dtype=verifier.shape.dtype,
    )
    vocabulary = DraftVocabulary.of(tokens, drafted)
    progress("trace drafter", 0, 1)
    model = _trace(_Draft(module, shape, tree), shape)
    weights = write_traced(name, model, source, vocabulary, verifier, out, precision, progress, names.CHAIN_LOGITS)
    return ExportedDrafter(shape, precision, weights, write_tables(name, vocabulary.tables(), out))


def tree_of(config: MedusaConfig, options: MedusaBuild, drafted: int) -> dict[Node, float]:
    """Return the best tree within the options, for heads that can draft so many tokens.

    Raises CheckpointError for more levels than heads, more candidates than have accuracies, or no accuracies at all,
    and UsageError for a node with more children than tokens.
    """
    measured, ranks = config.rank_accuracies, min(map(len, config.rank_accuracies), default=0)
    if len(measured) != config.heads or not ranks:
        raise CheckpointError(
            f"the drafter has accuracies of {len(measured)} heads, expected those of {config.heads}",
            "write it again with `redraft train publish`",
        )
    steps, width = options.steps or config.heads, options.width or min(ranks, drafted)
    if steps > config.heads:
        raise CheckpointError(
            f"the drafter has {config.heads} heads, which draft no tree of {steps} levels",
            f"build it with at most steps={config.heads}",
        )
    if width > ranks:
        raise CheckpointError(
            f"the drafter has accuracies of {ranks} candidates of a head, not of {width}",
            f"build it with at most width={ranks}",
        )
    if width > drafted:
        raise UsageError(
            f"a node cannot have {width} children of {drafted} tokens", "lower width, or raise draft_vocabulary"
        )
    return best_tree([shares[:width] for shares in measured[:steps]], options.nodes)


class _Draft(nn.Module):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`.

    Inside, the K - 1 nodes are in order of their levels.

    parents:    places of their parents among them from 1 on, [1, K - 1]; 0 is the root.
    candidates: their places among the candidates of all heads, [K - 1].
    scores:     their log probabilities if candidates are drawn, [1, K - 1].
    """

    parents: torch.Tensor
    candidates: torch.Tensor
    scores: torch.Tensor

    def __init__(self, heads: MedusaHeads, shape: MedusaShape, tree: Mapping[Node, float]) -> None:
        super().__init__()
        self.drafter, self.shape = heads, shape
        dtype = tracing.TORCH[shape.dtype]
        self.head = nn.Parameter(torch.empty(shape.draft_vocabulary, shape.hidden, dtype=dtype), requires_grad=False)
        self._scale = heads.config.logit_scale
        nodes, scores = sorted(tree, key=len), _falling(tree)
        parents = [0 if len(path) == 1 else 1 + nodes.index(path[:-1]) for path in nodes]
        self.register_buffer("parents", torch.tensor([parents]))
        self.register_buffer("candidates", torch.tensor([(len(path) - 1) * shape.width + path[-1] for path in nodes]))
        self.register_buffer("scores", torch.tensor([[scores[path] for path in nodes]]))
        self._above = list[list[int]]()  # by level, the places of parents in the level before
        before: list[Node] = [()]
        for depth in range(1, shape.steps + 1):
            level = [path for path in nodes if len(path) == depth]
            self._above.append([before.index(path[:-1]) for path in level])
            before = level

    def forward(
        self, pending_features: torch.Tensor, num_pending: torch.Tensor, tokens: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        shape, drawn = self.shape, sampling.drawn[:, None] > 0
        hidden = tracing.gather_rows(pending_features, (num_pending - 1)[:, None])  # [B, 1, n]
        states = self.drafter(hidden)[:, 0, : shape.steps]  # [B, N, n]
        logits = F.linear(states if self._scale == 1.0 else states * self._scale, self.head).float()
        z = sampling.noisy(logits, tables) * sampling.scale[:, None, None]
        best, columns = z.topk(shape.width, -1)  # [B, N, R]
        log_probs = (best - torch.logsumexp(z, -1, keepdim=True)).flatten(1).index_select(1, self.candidates)
        columns = columns.flatten(1).index_select(1, self.candidates)  # [B, K - 1]
        joint = torch.where(drawn, self.scores, self._joint(log_probs))
        tree = ordered_tree(
            tokens[:, None], tracing.take(tables[-1], columns) if tables else columns,
            self.parents.expand(columns.shape[0], -1), joint, joint.topk(shape.nodes - 1, -1).indices,
        )  # fmt: skip
        return (*tree, logits)

    def _joint(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Return joint log probabilities of nodes from their own, [B, K - 1] each."""
        above, levels, begin = torch.zeros_like(log_probs[:, :1]), [], 0
        for places in self._above:
            end = begin + len(places)
            above = below(above.index_select(1, torch.tensor(places)), log_probs[:, begin:end])
            levels.append(above)
            begin = end
        return torch.cat(levels, dim=1)


def _falling(tree: Mapping[Node, float]) -> dict[Node, float]:
    """Return log probabilities of the nodes if candidates are drawn: of their accuracies, each below the one before.

    They order the tree as it is, whatever is drawn.
    """
    found, before = {}, torch.zeros(())
    for path, product in tree.items():
        before = below(before, torch.tensor(math.log(max(product, _LEAST))) - before)
        found[path] = before.item()
    return found


def _trace(graph: _Draft, shape: MedusaShape) -> ir.Model:
    b = torch.export.Dim("B", min=1)
    tables = METHOD.tables(shape)
    args = (
        torch.zeros(2, names.MAX_PENDING_FEATURES, shape.hidden, dtype=tracing.TORCH[shape.dtype]),
        torch.ones(2, dtype=torch.long), torch.zeros(2, dtype=torch.long), Sampling.example(shape.steps),
        examples(tables),
    )  # fmt: skip
    fixed: list[dict[int, Any]] = [{} for _ in tables]
    dynamic = ({0: b}, {0: b}, {0: b}, Sampling.dims(b), fixed)
    return tracing.trace_graph(graph, args, dynamic, draft_inputs(shape), draft_outputs(shape))
