"""Fixtures of the losses' tests."""

from __future__ import annotations

import pytest

from redraft.train import linear_loss


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses compute their logits in several parts, the last one shorter."""
    monkeypatch.setattr(linear_loss, "_ROWS", 8)
