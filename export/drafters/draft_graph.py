"""Computation that draft graphs share: sampling, and attention over rows and levels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from redraft import names
from redraft.export.drafters.draft_head import DraftHead
from redraft.export.drafters.layer import Attend, DrafterConfig, LayerConfig
from redraft.export.drafters.level_tree import likeliest, rank_log_probs
from redraft.export.graph import modules, tracing
from redraft.export.graph.noise import add_noise
from redraft.export.graph.tree_attention import tree_attention

M = TypeVar("M", bound=nn.Module)
A = TypeVar("A")
"""The attention of rows."""


class GraphRotary(nn.Module):
    """Rotation as one operator over precomputed tables of `rows` positions."""

    def __init__(self, rotary: Any, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        cos, sin = (table.to(dtype) for table in rotary.tables(torch.arange(rows)))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        turned: torch.Tensor = modules.rotary(x, self.cos, self.sin, positions, heads, 0)
        return turned


class DraftRows:
    """The rows of a draft: those to catch up on, and its own after the last of them. They write to the KV buffers."""

    def __init__(
        self, positions: torch.Tensor, pending: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> None:  # fmt: skip
        self.caches = list(caches)
        self._positions, self._pending, self._cache_len, self._kv_len = positions, pending, cache_len, kv_len
        self._last = (pending - 1)[:, None]
        self._place = positions.gather(1, self._last)

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the last pending row of [B, M, n], as [B, 1, n]."""
        last: torch.Tensor = tracing.gather_rows(rows, self._last)
        return last

    def last_token(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last pending token of [B, M], as [B, 1]."""
        return tokens.gather(1, self._last)


class ChainRows(DraftRows, ABC, Generic[A]):
    """The rows of a chain: all rows to catch up on, then one row a step.

    A subclass says how rows attend, by `_at`.
    """

    def __init__(self, *rows: Any) -> None:
        """`rows` are the arguments of `DraftRows`."""
        super().__init__(*rows)
        self._step_cache_len = self._cache_len + self._pending  # one sum: TensorRT's own attention looks for it
        self._alone = torch.ones_like(self._last, dtype=torch.bool)[:, :, None]

    def catch_up(self) -> A:
        """Attend for all rows. Each row sees the rows before it."""
        batch, rows = self._positions.shape
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()[None].expand(batch, -1, -1)
        return self._at(self._positions, causal, self._cache_len)

    def next_step(self) -> tuple[torch.Tensor, A]:
        """Return the position [B, 1] of the next step's row, and attend for that row, which sees all rows before it."""
        self._place, self._kv_len = self._place + 1, self._kv_len + 1
        attend = self._at(self._place, self._alone, self._step_cache_len)
        self._step_cache_len = self._step_cache_len + 1
        return self._place, attend

    @abstractmethod
    def _at(
        self, places: torch.Tensor, mask: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor | None = None
    ) -> A:
        """Attend for rows at `places` [B, T] after `cache_len` [B] rows. Rows see each other by `mask` [B, T, T]."""


class ChainAttention(ChainRows[Attend]):
    """Attention of a drafter's own layer."""

    def __init__(self, config: LayerConfig, *rows: Any) -> None:
        """`rows` are the arguments of `DraftRows`."""
        super().__init__(*rows)
        self._config = config

    def _at(
        self, places: torch.Tensor, mask: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor | None = None
    ) -> Attend:
        config, kv_len = self._config, self._kv_len if kv_len is None else kv_len

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor
            out, self.caches[0], self.caches[1] = tree_attention(
                q, k, v, *self.caches, mask, places, cache_len, kv_len, None, config.head_dim**-0.5, 0.0, 0, 0,
                config.heads, config.kv_heads,
            )  # fmt: skip
            return out

        return attend


class LevelAttention(ChainAttention):
    """Attention of a draft's tree: all rows to catch up on, then W rows a level, which see their ancestors.

    A level's call has the rows of all levels so far, as the operator's mask covers the rows of one call only. Queries,
    keys and values of earlier levels are kept, so that only their attention is computed again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._levels: list[list[torch.Tensor]] = [[], [], [], []]  # queries, keys, values, positions
        self._mask: torch.Tensor | None = None

    def next_level(self, width: int, parents: torch.Tensor) -> tuple[torch.Tensor, Attend]:
        """Return positions [B, W] of the next level's rows, and attend for those rows.

        parents: [B, W], the rows of the level before that are their parents. The first level's parent is the root.
        """
        rows = torch.arange(width)  # torch.eye becomes a Cast to uint8, which no TensorRT takes
        own = (rows[:, None] == rows)[None].expand(parents.shape[0], -1, -1)
        if self._mask is None:
            self._mask = own
        else:
            above = tracing.gather_rows(self._mask[:, -width:], parents)
            earlier = torch.nn.functional.pad(self._mask, (0, width))
            self._mask = torch.cat([earlier, torch.cat([above, own], dim=2)], dim=1)
        queries, keys, values, positions = self._levels
        self._place = self._place + 1
        positions.append(self._place.expand(-1, width))
        places = torch.cat(positions, dim=1)
        level = self._at(places, self._mask, self._step_cache_len, self._kv_len + places.shape[1])

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for kept, new in ((queries, q), (keys, k), (values, v)):
                kept.append(new)
            every = [torch.cat(kept, dim=1) for kept in (queries, keys, values)]
            return level(*every)[:, -width:]

        return positions[-1], attend


class Pending(NamedTuple):
    """The rows to catch up on: features [B, M, n] of all hidden states, the tokens after them, and positions [B, M]."""

    features: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor


class Sampling(NamedTuple):
    """The inputs of `methods.chains.sampling_inputs`, in order."""

    scale: torch.Tensor
    noise_scale: torch.Tensor
    keys: torch.Tensor
    drawn: torch.Tensor

    def noisy(self, logits: torch.Tensor, tables: Sequence[torch.Tensor], step: int = 0) -> torch.Tensor:
        """Return logits [B, S, H] of the levels from `step` on, with noise. A draft vocabulary is the last table."""
        ids = tables[-1] if tables else torch.arange(logits.shape[2])
        noisy: torch.Tensor = add_noise(logits, self.noise_scale, self.keys[:, step : step + logits.shape[1]], ids)
        return noisy

    def scaled(self, logits: torch.Tensor, tables: Sequence[torch.Tensor], step: int = 0) -> torch.Tensor:
        """Return `noisy` logits times the draft logit scale."""
        return self.noisy(logits, tables, step) * self.scale[:, None, None]


class DraftGraph(nn.Module, Generic[M]):
    """A drafter with the verifier's embedding and the rows of its head for H tokens. A subclass computes the draft.

    Inputs and outputs are in the order of `methods.chains.draft_inputs` and `draft_outputs`.

    It changes the drafter that it wraps: rotation becomes one operator over every position that a draft can reach.
    """

    def __init__(self, drafter: M, config: DrafterConfig, shape: Any, max_positions: int) -> None:
        super().__init__()
        dtype = tracing.TORCH[shape.dtype]
        self.drafter, self.shape = drafter, shape
        self._prepare(drafter, max_positions + names.CATCH_UP_ROWS + shape.steps)
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden, dtype=dtype), requires_grad=False)
        self.head = DraftHead(shape.draft_vocabulary, shape.hidden, shape.head_rank, dtype)
        self._scale = config.logit_scale

    def _prepare(self, drafter: M, positions: int) -> None:
        """Replace the drafter's rotation and norms by single operators."""
        layer: Any = drafter.layer
        layer.rotary = GraphRotary(layer.rotary, positions, tracing.TORCH[self.shape.dtype])
        modules.replace_rms_norms(drafter)

    def forward(
        self, features: torch.Tensor | list[torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor,
        pending: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor, caches: list[torch.Tensor],
        sampling: Sampling, tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Return the tree, the logits of its levels' best nodes, and the KV buffers."""
        rows = self.rows(positions, pending, cache_len, kv_len, caches)
        joined = torch.cat(features, dim=-1) if isinstance(features, list) else features
        *tree, chain = self.draft(Pending(joined, tokens, positions), rows, sampling, tables)
        return (*tree, chain, *rows.caches)

    def rows(self, *rows: Any) -> DraftRows:
        """Return the rows of a draft. The arguments are those of `DraftRows`."""
        drafter: Any = self.drafter
        return ChainAttention(drafter.config, *rows)

    @abstractmethod
    def draft(
        self, pending: Pending, rows: Any, sampling: Sampling, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return tokens, parents and log probabilities of the tree, [B, K] each, and the chain's logits [B, N, H]."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, T, n] of tokens [B, T]."""
        return F.embedding(tokens, self.embedding)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, H] in fp32 of states [B, T, n], times the verifier's own logit scale."""
        logits: torch.Tensor = self.head(states if self._scale == 1.0 else states * self._scale)
        return logits.float()


class TokenChain(DraftGraph[M], Generic[M]):
    """A draft that catches up on rows and unrolls a chain of tokens, each read by the next step.

    The drafter takes features, embeddings, positions, how to attend and which rows to keep, and has `readout`.
    """

    def draft(
        self, pending: Pending, rows: ChainRows[Any], sampling: Sampling, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the chain and its logits."""
        drafter: Any = self.drafter
        hidden = drafter(pending.features, self.embed(pending.tokens), pending.positions, rows.catch_up(), rows.last)
        nodes = [rows.last_token(pending.tokens)]
        log_probs, chain = [torch.zeros_like(nodes[0], dtype=torch.float32)], []
        by_rank, of_rank = sampling.drawn[:, None] > 0, rank_log_probs(1)
        for step in range(self.shape.steps):
            chain.append(self.logits(drafter.readout(hidden)))  # [B, 1, H]
            found = likeliest(sampling.scaled(chain[-1], tables, step), 1)
            log_prob, best = (values.squeeze(-1) for values in found)  # [B, 1]
            nodes.append(tracing.take(tables[0], best) if tables else best)
            log_probs.append(log_probs[-1] + torch.where(by_rank, of_rank, log_prob))
            if step + 1 < self.shape.steps:
                hidden = drafter(hidden, self.embed(nodes[-1]), *rows.next_step())
        parents = torch.arange(-1, self.shape.steps)[None].expand(pending.tokens.shape[0], -1)
        return torch.cat(nodes, 1), parents.contiguous(), torch.cat(log_probs, 1), torch.cat(chain, 1)
