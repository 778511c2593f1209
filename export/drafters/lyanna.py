"""Lyanna's drafter: a chain of predicted hidden states, and token information added to their logits.

Chen et al., "Make Every Draft Count: Hidden State based Speculative Decoding". With f the verifier's hidden state after
its final norm, E its embedding and M its head:

    h_1 = Layer(h_0 ⊕ E(t_1)),  h_{i+1} = Layer(h_i)              §4.1, h_0 = f; rows of real features are the keys
    l_i = M h_i                                                     §4.2, one product for the whole chain
    l'_i = l_i + RMSNorm(E'(t_i)),  E'(t) = W2 W1 E(t)              §4.1 and §5.1

Logits are over the H tokens of the draft vocabulary, which may be all V: M and W2 have their rows only.

The paper does not define ⊕. Here it is a projection of both inputs, each normalized: P [RMSNorm(h_0) ;
RMSNorm(E(t_1))]. The chain normalizes its states before and after each step, so that h_i has the scale of f.
With `chain_projection`, h_i passes a second projection before the layer, which thus gets inputs of the same kind.

The draft graph catches up on the rows since the last draft, unrolls the chain, multiplies its states by the head in one
product, and builds the tree of their logits. The resample graph builds a tree of the logits that a verification left
unused; its only weights are the table of token information.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from redraft import names
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import NewTensor
from redraft.export.drafters import ExportedDrafter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, TokenData, fill
from redraft.export.drafters.draft_graph import ChainAttention, DraftGraph, Pending, Sampling
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.exporter import DraftExporter
from redraft.export.drafters.layer import Attend, DrafterLayer, Keep, LayerConfig, all_rows, with_sizes
from redraft.export.drafters.lyanna_token_info import TokenInfo, make_tables
from redraft.export.drafters.lyanna_token_tree import TRANSLATIONS, token_tree
from redraft.export.drafters.writing import Target, stem, trace_draft
from redraft.export.graph import passes, tracing
from redraft.export.graph.decoder import finish
from redraft.methods.base import resampled_nodes
from redraft.methods.chains import whole_tree
from redraft.methods.lyanna import FREQUENT_TOKENS, LARGE_VOCABULARY, LyannaBuild, LyannaShape


@dataclass(frozen=True)
class LyannaConfig(LayerConfig):
    """Configuration of a drafter: the layer's shape, and these fields.

    rank:         d of W1 [n, d] and W2 [d, H].   steps: hidden states of a chain, N.
    first_token, token_info: False for the ablations of Table 1.
    chain_projection: project a chain's own states before the layer.
    hot_tokens:   number of the most frequent tokens of the draft vocabulary that have token information, and that it
                  has numbers for; 0 means all (§6.1).
    """

    rank: int = 64
    steps: int = 4
    first_token: bool = True
    token_info: bool = True
    chain_projection: bool = False
    hot_tokens: int = 0

    @property
    def token_info_columns(self) -> int:
        """Columns of W2."""
        return self.hot_tokens or self.draft_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.hot_tokens <= self.draft_size:
            raise CheckpointError(f"hot_tokens must be from 0 to {self.draft_size}, not {self.hot_tokens}")
        if min(self.rank, self.steps) < 1:
            raise CheckpointError(f"a drafter's rank and steps must be positive, not {self.rank} and {self.steps}")


def configuration_of(verifier: Any, vocab_size: int, **own: Any) -> LyannaConfig:
    """Return a drafter's configuration: see `with_sizes`."""
    return with_sizes(LyannaConfig, verifier, vocab_size, **own)


class LyannaDrafter(nn.Module):
    """The trained parameters. Embedding and head belong to the verifier."""

    def __init__(self, config: LyannaConfig) -> None:
        super().__init__()
        n = config.hidden_size
        self.config = config
        self.hidden_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.embedding_norm = nn.RMSNorm(n, eps=config.rms_norm_eps) if config.first_token else None
        self.projection = nn.Linear(2 * n if config.first_token else n, n, bias=False)
        self.chain_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.chain_projection = nn.Linear(n, n, bias=False) if config.chain_projection else None
        self.layer = DrafterLayer(config)
        self.norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        sizes = n, config.rank, config.token_info_columns, config.rms_norm_eps
        self.token_info = TokenInfo(*sizes) if config.token_info else None

    def first(
        self, features: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend,
        keep: Keep = all_rows,
    ) -> torch.Tensor:  # fmt: skip
        """Return h_1 of rows that `keep` selects: features [B, T, n] at `positions`, embeddings of the next tokens."""
        fused = self.projection(self.joined(features, embeddings))
        out: torch.Tensor = self.norm(self.layer(fused, positions, attend, keep))
        return out

    def joined(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the first projection's inputs, [..., 2n], or [..., n] without the first token."""
        parts = [self.hidden_norm(features)]
        if self.embedding_norm is not None:
            parts.append(self.embedding_norm(embeddings))
        return torch.cat(parts, dim=-1)

    def following(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return h_{i+1} from h_i [B, T, n]. `positions` are those of the features that h_i predicts."""
        rows = self.chain_norm(hidden)
        if self.chain_projection is not None:
            rows = self.chain_projection(rows)
        out: torch.Tensor = self.norm(self.layer(rows, positions, attend))
        return out


class LyannaExporter(DraftExporter[LyannaConfig]):
    """The exporter of Lyanna's drafters. They have a table of token information, and a graph that resamples."""

    config, module = LyannaConfig, LyannaDrafter
    logits = names.CHAIN_LOGITS
    translations = TRANSLATIONS

    def configure(self, drafter: DrafterCheckpoint, options: LyannaBuild) -> LyannaConfig:
        """Return the drafter's configuration. Raises like `lyanna_shape` for options that do not fit."""
        config = super().configure(drafter, options)
        lyanna_shape(config, options)
        return config

    def random_config(self, target: Target, verifier: Any) -> LyannaConfig:
        """Return the configuration of a random drafter."""
        steps = {"steps": target.options.steps} if target.options.steps else {}
        return configuration_of(verifier, target.vocabulary, **steps)

    def empty(self, config: LyannaConfig, target: Target) -> nn.Module:
        """Return the module with uninitialized weights; its token information is in fp32."""
        module: Any = super().empty(config, target)
        if module.token_info is not None:
            module.token_info.to(torch.float32)
        drafter: nn.Module = module
        return drafter

    def shape(self, target: Target, config: LyannaConfig) -> LyannaShape:
        """Return the sizes of the graphs."""
        return replace(lyanna_shape(config, target.options), dtype=target.dtype)

    def tables(
        self, target: Target, module: Any, source: AnySource, vocabulary: DraftVocabulary, shape: LyannaShape
    ) -> tuple[NewTensor, ...]:
        """Return token information and the draft vocabulary. The module's token information becomes None."""
        if module.token_info is not None:
            for parameter, tensor in module.token_info.state_dict().items():
                fill(tensor, source, f"{stem(target.name)}token_info.{parameter}")
        target.progress("token information", 0, 1)
        info, module.token_info = module.token_info, None
        embedding = target.verifier.source.slabs(target.verifier.embedding)
        made = make_tables(info, embedding, vocabulary, shape)
        return (*made, *vocabulary.tables())

    def graph(self, target: Target, module: LyannaDrafter, shape: LyannaShape) -> nn.Module:
        """Return the draft graph's computation."""
        return _Draft(module, module.config, shape, target.verifier.shape.max_positions)

    def write(
        self, target: Target, config: LyannaConfig, module: nn.Module, source: AnySource, tokens: TokenData
    ) -> ExportedDrafter:
        """Write both graphs, the weights and the tables."""
        written = super().write(target, config, module, source, tokens)
        if written.shape.steps > 1:
            graph = _Resample(written.shape)
            model = trace_draft(graph, written.shape, self.method, self.translations, names.RESAMPLE)
            passes.simplify(model)
            finish(model)
            ir.save(model, target.out / graph_file(target.name, names.RESAMPLE))
        return written


EXPORTER = LyannaExporter


def lyanna_shape(config: LyannaConfig, options: LyannaBuild) -> LyannaShape:
    """Return the sizes of the graphs.

    Raises CheckpointError for more steps than the drafter was trained for, and UsageError for a node with more children
    than tokens.
    """
    steps = options.steps or config.steps
    if steps > config.steps:
        raise CheckpointError(
            f"the drafter was trained for {config.steps} steps, not {steps}",
            f"build it with at most steps={config.steps}",
        )
    nodes = min(options.nodes + 1, whole_tree(steps, options.width))
    resampled = options.resample_nodes or resampled_nodes(nodes - 1)
    large = not config.draft_vocab_size and config.vocab_size > LARGE_VOCABULARY
    drafted = config.limited(options.draft_vocabulary or (FREQUENT_TOKENS if large else None))
    if options.width > drafted:
        raise UsageError(
            f"a node cannot have {options.width} children of {drafted} tokens", "lower width, or raise draft_vocabulary"
        )
    return LyannaShape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        steps=steps,
        width=options.width,
        nodes=nodes,
        resample_nodes=min(resampled + 1, nodes, whole_tree(steps - 1, options.width)),
        token_info=options.token_info,
        draft_vocabulary=drafted,
        rank=config.rank,
        draft_logit_scale=config.draft_logit_scale,
        head_rank=options.head_rank or 0,
    )


def _tree(
    shape: LyannaShape, logits: torch.Tensor, sampling: Sampling, roots: torch.Tensor, tables: list[torch.Tensor],
    nodes: int, used: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return tokens, parents and log probabilities of trees rooted at the tokens `roots` [B].

    used: how many of the last steps to leave out, [B]; None for none.   tables: those of `methods.lyanna.tables`.
    """
    pruned, left_out = shape.draft_vocabulary < shape.vocabulary, roots if used is None else used
    info, rows = (tables[:-2], tracing.take(tables[-2], roots)) if pruned else (tables, roots)
    noisy = sampling.noisy(logits, tables[-1:] if pruned else ())
    columns, parents, log_probs = token_tree(
        noisy, sampling.scale, sampling.drawn, left_out, rows, info, shape.width, nodes, used is None
    )
    if not pruned:
        return columns, parents, log_probs
    return torch.cat([roots[:, None], tracing.take(tables[-1], columns[:, 1:])], dim=1), parents, log_probs


class _Draft(DraftGraph[LyannaDrafter]):
    """The draft graph's computation."""

    def draft(
        self, pending: Pending, rows: ChainAttention, sampling: Sampling, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Unroll the chain, and build the tree of its logits."""
        read = pending.features, self.embed(pending.tokens), pending.positions
        chain = [self.drafter.first(*read, rows.catch_up(), rows.last)]  # [B, 1, n] each
        for _ in range(1, self.shape.steps):
            chain.append(self.drafter.following(chain[-1], *rows.next_step()))
        logits = self.logits(torch.cat(chain, dim=1))  # [B, N, H], in one product
        roots = rows.last_token(pending.tokens)[:, 0]
        return (*_tree(self.shape, logits, sampling, roots, tables, self.shape.nodes), logits)


class _Resample(nn.Module):
    """The resample graph's computation, with inputs in the order of `resample_inputs`."""

    def __init__(self, shape: LyannaShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self, chain_logits: torch.Tensor, first_step: torch.Tensor, tokens: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        steps, nodes = self.shape.steps, self.shape.resample_nodes
        wanted = first_step[:, None] + torch.arange(steps - 1)
        wanted = torch.minimum(wanted, torch.tensor(steps - 1))  # TensorRT's Clip takes floats only
        left = tracing.gather_rows(chain_logits, wanted)  # [B, N - 1, H]
        tree = _tree(self.shape, left, sampling, tokens, tables, nodes, first_step - 1)
        sizes = [min(whole_tree(remaining, self.shape.width), nodes) for remaining in range(steps)]
        return (*tree, torch.index_select(torch.tensor(sizes), 0, steps - first_step))
