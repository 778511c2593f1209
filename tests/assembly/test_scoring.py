"""The perplexity that a build reports is the model's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from redraft.assembly import scoring
from redraft.assembly.scoring import Scorer
from redraft.engines import open_bundle


def test_perplexity_equals_transformers_window_by_window(
    checkpoint: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(scoring, "CHUNK_TOKENS", 8)
    tokens = np.random.default_rng(0).integers(3, 32, 50).tolist()
    window = 20
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    losses = []
    for start in range(0, len(tokens), window):
        part = torch.tensor([tokens[start : start + window]])
        with torch.no_grad():
            scores = model(part).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(scores, part[0, 1:], reduction="none").tolist()
    measured = Scorer(open_bundle(bundle), threads=1).perplexity(tokens, window)
    assert measured == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
