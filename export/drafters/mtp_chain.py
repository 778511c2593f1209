"""The draft of a multi-token-prediction module: one call catches up on rows and unrolls the chain of tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from redraft.export.drafters.draft_graph import ChainRows, DraftGraph, Sampling, likeliest
from redraft.export.graph import tracing
from redraft.methods.chains import DRAWN_LOG_PROB

M = TypeVar("M", bound=nn.Module)


class MtpChain(DraftGraph[M], Generic[M]):
    """The draft graph's computation, with inputs and outputs in the order of `draft_inputs` and `draft_outputs`.

    A subclass says how the module's rows attend.
    """

    @abstractmethod
    def rows(self, *rows: torch.Tensor) -> ChainRows[Any]:
        """Return the rows of a draft. The arguments are those of `ChainRows`."""

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, pending: torch.Tensor,
        cache_len: torch.Tensor, kv_len: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sampling: Sampling,
        tables: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        drafter: Any = self.drafter
        attention = self.rows(positions, pending, cache_len, kv_len, key, value)
        hidden = drafter(features, self.embed(tokens), positions, attention.catch_up(), attention.last)
        nodes, factor = [attention.last_token(tokens)], sampling.scale[:, None, None]
        log_probs, chain = [torch.zeros_like(nodes[0], dtype=torch.float32)], []
        by_rank, of_rank = sampling.drawn[:, None] > 0, torch.full((1, 1), DRAWN_LOG_PROB)
        for step in range(self.shape.steps):
            chain.append(self.logits(drafter.readout(hidden)))  # [B, 1, H]
            logits = sampling.noisy(chain[-1], tables, step) * factor
            log_prob, best = (found.squeeze(-1) for found in likeliest(logits, 1))  # [B, 1]
            nodes.append(tracing.take(tables[0], best) if tables else best)
            log_probs.append(log_probs[-1] + torch.where(by_rank, of_rank, log_prob))
            if step + 1 < self.shape.steps:
                hidden = drafter(hidden, self.embed(nodes[-1]), *attention.next_step())
        parents = torch.arange(-1, self.shape.steps)[None].expand(tokens.shape[0], -1)
        tree = torch.cat(nodes, 1), parents.contiguous(), torch.cat(log_probs, 1)
        return (*tree, torch.cat(chain, 1), *attention.caches)
