"""The cross-entropy that never holds all logits equals the plain one, and so do its gradients."""

from __future__ import annotations

import torch

from redraft.train import linear_loss
from redraft.train.linear_loss import linear_cross_entropy

ROWS, COLUMNS, WIDTH, RANK, TARGETS = 11, 23, 6, 3, 4


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (ROWS, WIDTH), (COLUMNS, WIDTH), (ROWS, RANK), (COLUMNS, RANK)
    states, head, own_states, own_head = (torch.randn(shape, generator=generator) for shape in shapes)
    columns = torch.stack([torch.randperm(COLUMNS, generator=generator)[:TARGETS] for _ in range(ROWS)])
    weights = torch.rand(ROWS, TARGETS, generator=generator)
    return states.requires_grad_(), head, own_states.requires_grad_(), own_head.requires_grad_(), columns, weights


def plain(states, head, own_states, own_head, columns, weights):
    logits = states @ head.T + own_states @ own_head.T
    return -(weights * logits.log_softmax(-1).gather(1, columns)).sum(), logits


def test_loss_and_gradients_equal_those_of_all_logits(monkeypatch):
    """With rows in several parts, the last one shorter."""
    monkeypatch.setattr(linear_loss, "_ROWS", 4)
    given, again = values(), values()
    found = linear_cross_entropy(*given)
    expected, logits = plain(*again)
    assert torch.allclose(found.loss, expected)
    (3 * found.loss).backward()
    (3 * expected).backward()
    for one, other in ((given[i], again[i]) for i in (0, 2, 3)):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)
    assert torch.allclose(found.log_sum, logits.logsumexp(-1))
    assert torch.allclose(found.largest, logits.amax(-1))
    assert torch.allclose(found.chosen, logits.gather(1, again[4]))


def test_the_same_column_twice_counts_twice():
    given, again = values(), values()
    for one in (given, again):
        one[4][:, 1] = one[4][:, 0]
    found, (expected, _) = linear_cross_entropy(*given), plain(*again)
    found.loss.backward()
    expected.backward()
    assert torch.allclose(found.loss, expected)
    assert torch.allclose(given[0].grad, again[0].grad, atol=1e-5)
