"""What tests of losses share: texts of a batch, attention row by row, and the loss of one token from the papers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from redraft.train.batches import Batch
from redraft.train.states import TOP_LOGITS
from redraft.train.text_batches import text_batch


def texts(vocabulary: int, lengths: Sequence[int], prompts: Sequence[int], drawn: torch.Tensor | None = None) -> Batch:
    """Random texts of different lengths, whose drafts start after their prompts; the shorter ones are padded.

    drawn: the tokens to draw from, all by default.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.arange(vocabulary) if drawn is None else drawn
    rows = tokens[torch.randint(0, len(tokens), (len(lengths), max(lengths)), generator=generator)].numpy()
    arrays = [{"tokens": row[:length]} for row, length in zip(rows.astype(np.uint32), lengths, strict=True)]
    return text_batch(arrays, prompts, ("a",) * len(lengths))


def some_tokens(vocabulary: int, size: int) -> torch.Tensor:
    """A draft vocabulary of this size."""
    return torch.randperm(vocabulary, generator=torch.Generator().manual_seed(2))[:size].sort().values


def token_loss(
    own: torch.Tensor, logits: torch.Tensor, truth: torch.Tensor, some: torch.Tensor, soft: float = 0.0,
    hard: float = 0.0, greedy: float = 0.0, top: int = 0, top_weight: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The cross-entropies of a draft's logits [H] over the tokens `some`, with the verifier's logits [V] and the text.

    soft: weight of the verifier's kept likeliest tokens, hard: of the text's token, greedy: of the verifier's
    likeliest one, top_weight: of its `top` likeliest ones. Tokens outside of `some` have no loss.
    """
    log_probs = torch.zeros(len(logits)).index_copy(0, some, own.log_softmax(-1))
    shares, order = logits.softmax(-1), logits.argsort(descending=True)
    wanted = torch.zeros(len(logits))
    wanted[order[:TOP_LOGITS]] = soft * shares[order[:TOP_LOGITS]]
    wanted[order[:top]] += top_weight * shares[order[:top]]
    wanted[order[0]] += greedy
    wanted[truth] += hard
    return -(wanted * log_probs).sum()


class ExplicitAttention:
    """Attends one row at a time over lists of keys and values, one head after the other."""

    def __init__(self, config):
        self.config, self.keys, self.values = config, [], []

    def __call__(self, q, k, v):
        shape = self.config
        self.keys.append(k.view(shape.kv_heads, shape.head_dim))
        self.values.append(v.view(shape.kv_heads, shape.head_dim))
        heads = []
        for head, query in enumerate(q.view(shape.heads, shape.head_dim)):
            group = head // (shape.heads // shape.kv_heads)
            scores = torch.stack([query @ key[group] for key in self.keys]) / shape.head_dim**0.5
            weights = scores.softmax(0)
            heads.append(sum(w * value[group] for w, value in zip(weights, self.values, strict=True)))
        return torch.cat(heads).view(1, 1, -1)


def check_loss(objective: nn.Module, loss: torch.Tensor, expected: torch.Tensor) -> None:
    """Both losses are equal, and so are their gradients. Every trained parameter has one, except a frozen norm."""
    assert loss.item() == pytest.approx(expected.item(), rel=2e-5)
    gradients = []
    for one in (loss, expected):
        objective.zero_grad()
        one.backward()
        gradients.append({name: p.grad for name, p in objective.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        rounding = 5e-5 * gradients[1][name].abs().max().item()  # of sums of numbers as large as the largest
        assert rounding > 0, name
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=rounding, msg=name)
