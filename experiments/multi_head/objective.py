"""The joint loss of a verifier and its heads (Gloeckle et al. 2024, section 2): the mean over heads of their CE.

    L = 1/n Σ_i CE(M N(Layer_i(z_1 … z_t)), x_{t+i})        z = trunk(x), i from 1 to n

Layer_1 is the verifier's last layer, and the others are the drafter's. The paper has the sum (equation 2). It has the
same minimum, and neither Muon nor Adam sees a constant factor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from experiments.multi_head.recipe import VariantRecipe
from redraft.export.drafters.layer import renamed
from redraft.export.drafters.multi_head import MultiHeadDrafter, configuration_of
from redraft.train.batches import Batch
from redraft.train.objectives.distillation import ChainAttention


class JointObjective(nn.Module):
    """A Llama verifier with heads on its trunk. All of them share its final norm and its head."""

    def __init__(self, start: Path, recipe: VariantRecipe) -> None:
        """Begin with the verifier in the folder `start`, and with its last layer for each head."""
        super().__init__()
        self.model = LlamaForCausalLM.from_pretrained(str(start), dtype=torch.float32)
        config = configuration_of(self.model.config, self.model.config.vocab_size, draft_heads=recipe.draft_heads)
        self.drafter = MultiHeadDrafter(config)
        last = {renamed(name): tensor for name, tensor in self.model.model.layers[-1].state_dict().items()}
        for layer in self.drafter.layers:
            layer.load_state_dict(last)
        self.drafter.norm = self.model.model.norm  # type: ignore[assignment]

    @property
    def lookahead(self) -> int:
        """Tokens that a row needs after its inputs: one for each head, the verifier's own too."""
        return 1 + self.drafter.config.draft_heads

    def prepare(self, step: int) -> bool:
        """Return False: the parameters never change."""
        return False

    def trunk(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the output [B, T, n] of all layers but the last, for tokens i64[B, T]."""
        hidden = self.model.model.embed_tokens(tokens)
        for number in range(len(self.model.model.layers) - 1):
            hidden = self._layer(number, hidden)
        return hidden

    def states(self, trunk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the states [B, T, n] of every head, the verifier's own first, after the final norm."""
        yield self.model.model.norm(self._layer(len(self.model.model.layers) - 1, trunk))
        places = torch.arange(trunk.shape[1])
        for head in range(self.drafter.config.draft_heads):
            attend = ChainAttention(self.drafter.config, places[None])
            yield self.drafter.head(head, trunk, places, attend)

    def head_losses(self, trunk: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the mean loss [B] of every head in nats a token, for tokens i64[B, T + lookahead]."""
        rows = trunk.shape[1]
        for head, hidden in enumerate(self.states(trunk), 1):
            logits = self.model.lm_head(hidden).float()  # [B, T, V]
            targets = tokens[:, head : head + rows]
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            yield losses.view(targets.shape).mean(dim=1)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the mean over heads, and metrics in nats a token: by kind for the next token, and by head.

        With gradients, each head's backward pass runs here before the next head's forward pass, so the logits of one
        head exist at a time (section 2, figure 2). The loss has the gradient that is left: the trunk's.
        """
        trunk = self.trunk(batch.tokens[:, : -self.lookahead])
        cut = trunk.detach().requires_grad_(trunk.requires_grad)
        found: list[torch.Tensor] = []
        for losses in self.head_losses(cut, batch.tokens):
            if losses.requires_grad:
                torch.autograd.backward(losses.mean() / self.lookahead)
            found.append(losses.detach())
        total = torch.stack(found).mean()
        if cut.grad is not None:
            left = (trunk * cut.grad).sum()
            total = total + left - left.detach()
        by_kind: dict[str, list[float]] = defaultdict(list)
        for kind, value in zip(batch.kinds, found[0].tolist(), strict=True):
            by_kind[kind].append(value)
        metrics = {kind: math.fsum(values) / len(values) for kind, values in by_kind.items()}
        return total, {**metrics, **{f"head {n}": one.mean().item() for n, one in enumerate(found[1:], 1)}}

    def _layer(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        body = self.model.model
        places = torch.arange(hidden.shape[1])[None]
        rotary = body.rotary_emb(hidden, places)
        out: torch.Tensor = body.layers[number](
            hidden, attention_mask=None, position_ids=places, position_embeddings=rotary
        )
        return out
