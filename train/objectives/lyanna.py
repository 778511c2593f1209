"""Lyanna's loss: α·MSE of hidden states and β·CE of distributions, over every step of every chain (§4.1).

Chains start at all positions of a row at once. The rows of step 0 attend causally. As in decoding, a row of step i
attends to step 0's rows up to its start and to the earlier steps of its own chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter
from redraft.train.batches import Batch
from redraft.train.verifier_model import autocast_of, verifier_states


class ChainAttention:
    """Attention of parallel chains: call it once a step, in order. `redraft.export.drafters.layer` has the shapes."""

    def __init__(self, config: LyannaConfig) -> None:
        self._config = config
        self._keys: list[torch.Tensor] = []  # a step's rows, [B, Hq, T, D], key heads repeated
        self._values: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend for one step's rows."""
        config = self._config
        q = q.unflatten(-1, (config.heads, config.head_dim)).transpose(1, 2)
        k, v = (
            x.unflatten(-1, (config.kv_heads, config.head_dim))
            .transpose(1, 2)
            .repeat_interleave(config.heads // config.kv_heads, dim=1)
            for x in (k, v)
        )
        self._keys.append(k)
        self._values.append(v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if len(self._keys) == 1 else self._later(q)
        return out.transpose(1, 2).flatten(-2)

    def _later(self, q: torch.Tensor) -> torch.Tensor:
        scale = self._config.head_dim**-0.5
        rows = q.shape[2]
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        first = (q @ self._keys[0].mT * scale).masked_fill(hidden, float("-inf"))  # [B, Hq, T, T]
        own = [(q * k).sum(-1, keepdim=True) * scale for k in self._keys[1:]]  # [B, Hq, T, 1] each
        weights = torch.cat([first, *own], dim=-1).softmax(-1)
        out = weights[..., :rows] @ self._values[0]
        for step, value in enumerate(self._values[1:]):
            out = out + weights[..., rows + step, None] * value
        return out


def chains(
    drafter: LyannaDrafter, features: torch.Tensor, tokens: torch.Tensor, embed: nn.Module
) -> Iterator[torch.Tensor]:
    """Yield hidden states h_1, h_2 … of the chains that start at every position: [B, T, n] each.

    features: [B, T, n] of the first T tokens.   tokens: [B, T + 1 or more].
    """
    rows = features.shape[1]
    positions = torch.arange(rows, device=features.device)
    attend = ChainAttention(drafter.config)
    hidden = drafter.first(features, embed(tokens[:, 1 : rows + 1]), positions, attend)
    yield hidden
    for step in range(1, drafter.config.steps):
        hidden = drafter.following(hidden, positions + step, attend)
        yield hidden


class LyannaObjective(nn.Module):
    """The loss of a drafter with its frozen verifier. A row of T inputs needs `lookahead` more tokens."""

    def __init__(
        self, verifier: Any, config: LyannaConfig, alpha: float = 1.0, beta: float = 1.0, step_weight: float = 0.8,
        compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """alpha, beta: weights of MSE and CE.   step_weight: weight of a step's loss, relative to the step before."""
        super().__init__()
        self.drafter = LyannaDrafter(config)
        self._frozen = [verifier.requires_grad_(False).eval()]  # in a list, so that it is not a submodule
        self._alpha, self._beta, self._step_weight = alpha, beta, step_weight
        self.lookahead = config.steps
        self._losses = torch.compile(self.losses, dynamic=False) if compile_graph else self.losses

    @property
    def verifier(self) -> Any:
        """The frozen model."""
        return self._frozen[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The drafter's parameters."""
        return self.drafter.named_parameters(*args, **kwargs)

    def prepare(self, step: int) -> bool:
        """Return False: the parameters never change."""
        return False

    def losses(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean squared error, cross-entropy [nats], top-1 hit rate by step, [N] each, for tokens [B, T + N]."""
        with torch.no_grad():
            features, logits = verifier_states(self.verifier, tokens)  # [B, T + N, n], [B, T + N, V]
        rows = tokens.shape[1] - self.lookahead
        mse, ce, hits = [], [], []
        for step, (hidden, predicted) in enumerate(self._drafts(features[:, :rows], tokens)):
            here = slice(step + 1, rows + step + 1)
            mse.append(F.mse_loss(hidden.float(), features[:, here].float()))
            target = logits[:, here]
            ce.append(F.cross_entropy(predicted.flatten(0, 1), target.softmax(-1).flatten(0, 1)))
            hits.append((predicted.argmax(-1) == target.argmax(-1)).float().mean())
        return torch.stack(mse), torch.stack(ce), torch.stack(hits)

    def drafts(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
        """Return the verifier's logits [B, T + N, V], and l' of every step of every chain, [B, T, V] each."""
        features, logits = verifier_states(self.verifier, tokens)
        rows = tokens.shape[1] - self.lookahead
        return logits, (predicted for _, predicted in self._drafts(features[:, :rows], tokens))

    def _drafts(self, features: torch.Tensor, tokens: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield h_i and l'_i of every step, for features [B, T, n] of the first T tokens."""
        rows = features.shape[1]
        for step, hidden in enumerate(chains(self.drafter, features, tokens, self.verifier.get_input_embeddings())):
            yield hidden, self.step_logits(hidden, tokens[:, step + 1 : rows + step + 1])

    def step_logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return l'_i: logits of hidden states [B, T, n] plus token information of the tokens [B, T] before them."""
        head = self.verifier.get_output_embeddings().weight
        logits = F.linear(hidden, head).float() * self.drafter.config.logit_scale
        if self.drafter.token_info is None:
            return logits
        distinct, index = tokens.unique(return_inverse=True)
        return logits + self.added(distinct)[index]  # each distinct token once: V numbers each

    def added(self, distinct: torch.Tensor) -> torch.Tensor:
        """Return the numbers that distinct tokens [D] add to all logits: float32 [D, V]."""
        assert self.drafter.token_info is not None
        values: torch.Tensor = self.drafter.token_info(self.verifier.get_input_embeddings()(distinct)).float()
        return values

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weighted mean over steps, and metrics `mse`, `ce` and `hit 1` … `hit N`."""
        device = self.verifier.device
        with autocast_of(self.verifier):
            mse, ce, hits = self._losses(batch.tokens.to(device))
        weights = self._step_weight ** torch.arange(len(mse), device=device)
        total = (weights * (self._alpha * mse + self._beta * ce)).sum() / weights.sum()
        metrics = {"mse": mse.mean().item(), "ce": ce.mean().item()}
        return total, metrics | {f"hit {step}": hit for step, hit in enumerate(hits.tolist(), 1)}
