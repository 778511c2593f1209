"""The draft graph of drafters that predict features: one call catches up on rows and grows a tree, level by level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import Progress, no_progress
from redraft.export.drafters import ExportedDrafter, Exporter
from redraft.export.drafters.candidate_tree import below, ordered_tree
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_graph import (
    DraftGraph,
    LevelAttention,
    Sampling,
    check_fit,
    drafter_precision,
    empty_module,
    likeliest,
    parameter_shapes,
    random_source,
    stem,
    write_draft,
    write_tables,
)
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter
from redraft.export.drafters.layer import with_sizes
from redraft.export.graph import tracing
from redraft.export.verifier import VerifierExport
from redraft.methods.base import Method
from redraft.methods.chains import DRAWN_LOG_PROB
from redraft.methods.feature_tree import (
    FeatureTreeBuild,
    FeatureTreeShape,
    draft_inputs,
    draft_outputs,
)

_NOT_FIRST = -1e4
"""Log probability of drawn candidates after the first, of which no tree has any."""


def exporter_of(method: Method[FeatureTreeShape], form: Mapping[str, Any], static: bool = False) -> Exporter:
    """Return the exporter of a method.

    form: fields of the configuration that make the method's drafters.   static: True for trees of one form.
    """

    def configure(drafter: DrafterCheckpoint, options: FeatureTreeBuild) -> FeatureConfig:
        """Return the drafter's configuration. Raises CheckpointError for a drafter of another form."""
        if "fusion" not in drafter.config:
            raise CheckpointError(
                f"{drafter.path} is a drafter of {drafter.method}, which {method.id} cannot use",
                f"leave out method={method.id}",
            )
        settings = drafter.configure(FeatureConfig)
        expected = _kind(replace(settings, **form))
        if drafter.method != method.id and (found := _kind(settings)) != expected:
            raise CheckpointError(
                f"{drafter.path} is no drafter of {method.id}: it has {found}, expected {expected}",
                f"leave out method=, its own is {drafter.method}",
            )
        return settings

    def trained(
        name: str, drafter: DrafterCheckpoint, verifier: VerifierExport, identity: Identity, out: Path,
        options: FeatureTreeBuild, progress: Progress = no_progress,
    ) -> ExportedDrafter:  # fmt: skip
        """Write the graph of `drafter`. Raises CheckpointError if it does not fit the verifier or does not load."""
        settings = configure(drafter, options)
        check_fit(drafter, settings, verifier, identity)
        module = empty_module(lambda: FeatureDrafter(settings), verifier.shape.dtype)
        source, tokens = drafter.open_weights(parameter_shapes(module), stem(name))
        return _export(name, method, static, module, source, tokens, verifier, out, options, progress)

    def random(
        name: str, configuration: Any, verifier: VerifierExport, out: Path, options: FeatureTreeBuild,
        progress: Progress = no_progress,
    ) -> ExportedDrafter:  # fmt: skip
        """Write the graph of a drafter with random weights for a verifier of this transformers configuration."""
        vocabulary, states = verifier.shape.vocabulary, method.hidden_states
        settings = with_sizes(FeatureConfig, configuration, vocabulary, hidden_states=states, **form)
        module = empty_module(lambda: FeatureDrafter(settings), verifier.shape.dtype)
        source = random_source(name, module, drafter_precision(options.precision, verifier), out)
        tokens = TokenData(torch.ones(verifier.shape.vocabulary, dtype=torch.long))
        return _export(name, method, static, module, source, tokens, verifier, out, options, progress)

    return Exporter(configure, trained, random)


def _kind(config: FeatureConfig) -> str:
    """Return what tells drafters of one method from those of another."""
    return f"a fusion {config.fusion!r} and {'two outputs' if config.outputs == 'two' else 'one output'}"


def _export(
    name: str, method: Method[FeatureTreeShape], static: bool, module: FeatureDrafter, source: AnySource,
    tokens: TokenData, verifier: VerifierExport, out: Path, options: FeatureTreeBuild, progress: Progress,
) -> ExportedDrafter:  # fmt: skip
    precision, config = drafter_precision(options.precision, verifier), module.config
    width = min(options.width, config.limited(options.draft_vocabulary))
    shape = FeatureTreeShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        steps=options.steps,
        width=width,
        nodes=options.tree_nodes(width),
        draft_vocabulary=config.limited(options.draft_vocabulary),
        static=static,
        hidden_states=config.hidden_states,
        draft_logit_scale=config.draft_logit_scale,
        dtype=verifier.shape.dtype,
    )
    if config.own_head and shape.draft_vocabulary != config.draft_size:
        raise UsageError(
            f"drafter {name} has a head of its own for {config.draft_size} tokens", "leave out draft_vocabulary"
        )
    vocabulary = DraftVocabulary.of(tokens, shape.draft_vocabulary)
    progress("trace drafter", 0, 1)
    graph = _Draft(module, config, shape, verifier.shape.max_positions)
    weights = write_draft(
        name, graph, source, vocabulary, verifier, shape, out, precision, progress,
        (draft_inputs(shape), draft_outputs(shape)), method.tables(shape), states=len(shape.hidden_states),
        own_head=config.own_head,
    )  # fmt: skip
    return ExportedDrafter(shape, precision, weights, write_tables(name, vocabulary.tables(), out))


class _Draft(DraftGraph[FeatureDrafter]):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`."""

    def forward(
        self, features: torch.Tensor | list[torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor,
        pending: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        sampling: Sampling, tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        shape, drafter = self.shape, self.drafter
        attention = LevelAttention(drafter.config, positions, pending, cache_len, kv_len, key, value)
        rows = drafter.inputs(torch.cat(features, dim=-1) if isinstance(features, list) else features)
        predicted = drafter(rows, self.embed(tokens), positions, attention.catch_up(), attention.last)
        tree = _LevelTree(shape, sampling, tables, attention.last_token(tokens))
        chain = [self.logits(predicted.token)]
        tree.grow(chain[0])
        for _ in range(1, shape.steps):
            parents, best = tree.best()
            level = attention.next_step() if shape.width == 1 else attention.next_level(shape.width, parents)
            predicted = drafter(tracing.gather_rows(predicted.feature, parents), self.embed(best), *level)
            logits = self.logits(predicted.token)  # [B, W, H]
            chain.append(logits[:, :1])
            tree.grow(logits)
        return (*tree.whole(), torch.cat(chain, 1), *attention.caches)


class _LevelTree:
    """A tree in progress. Candidate c of a level of R rows is the candidate c % W of row c // W.

    Scores order nodes: joint log probabilities, or sums of ranks if the tree is static.
    """

    def __init__(
        self, shape: FeatureTreeShape, sampling: Sampling, tables: list[torch.Tensor], root: torch.Tensor
    ) -> None:
        self._shape, self._sampling, self._tables = shape, sampling, tables
        self._root = root  # [B, 1]
        self._tokens: list[torch.Tensor] = []  # of every level's candidates, [B, R * W] each
        self._parents: list[torch.Tensor] = []  # places of their parents among all candidates, from 1; the root's is 0
        self._joint: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        nothing = torch.zeros_like(root, dtype=torch.float32)
        self._ends = torch.zeros_like(root), nothing, nothing  # places, joint and scores of the rows

    def grow(self, logits: torch.Tensor) -> None:
        """Add the candidates of the latest rows from their logits [B, R, H]."""
        shape, sampling, level = self._shape, self._sampling, len(self._tokens)
        keys = sampling.keys[:, level : level + 1].expand(-1, logits.shape[1], -1)
        z = sampling._replace(keys=keys).noisy(logits, self._tables) * sampling.scale[:, None, None]
        log_probs, columns = likeliest(z, shape.width)  # [B, R, W]
        ranks = torch.arange(1, shape.width + 1) * DRAWN_LOG_PROB
        drawn = torch.cat([ranks[:1], torch.full((shape.width - 1,), _NOT_FIRST)])
        log_probs = torch.where(sampling.drawn[:, None, None] > 0, drawn, log_probs)
        places, joint, scores = self._ends
        added = torch.where(sampling.drawn[:, None, None] > 0, drawn, ranks) if shape.static else log_probs
        self._tokens.append((tracing.take(self._tables[-1], columns) if self._tables else columns).flatten(1))
        self._parents.append(places[:, :, None].expand(-1, -1, shape.width).flatten(1))
        self._joint.append(below(joint[:, :, None], log_probs).flatten(1))
        self._scores.append(below(scores[:, :, None], added).flatten(1))

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the W best candidates of the latest level. Returns the rows of their parents and their tokens, [B, W].

        They are the rows of the next level.
        """
        width = self._shape.width
        scores, best = self._scores[-1].topk(width, -1)
        before = 1 + sum(tokens.shape[1] for tokens in self._tokens[:-1])
        self._ends = best + before, self._joint[-1].gather(1, best), scores
        return best // width, self._tokens[-1].gather(1, best)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, parents and joint log probabilities of the best nodes, [B, K], likeliest first after the root.

        No candidate is better than its parent, so every parent is there too.
        """
        tokens, parents, joint, scores = (
            torch.cat(levels, dim=1) for levels in (self._tokens, self._parents, self._joint, self._scores)
        )
        kept = self._shape.nodes - 1
        order = scores.topk(kept, -1).indices
        if self._shape.static:
            order = order.gather(1, joint.gather(1, order).topk(kept, -1).indices)
        return ordered_tree(self._root, tokens, parents, joint, order)
