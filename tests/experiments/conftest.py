"""The small run of tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.train.conftest import sources

from experiments.tiny.recipe import ModelConfig, VerifierRecipe

__all__ = ["sources"]


@pytest.fixture(scope="session")
def recipe() -> VerifierRecipe:
    model = ModelConfig(
        vocab_size=400, hidden_size=32, layers=4, intermediate_size=64, heads=2, kv_heads=1, head_dim=16,
        max_positions=64,
    )  # fmt: skip
    return VerifierRecipe(
        model=model, weights={"code": 0.5, "word_problems": 0.25, "prose": 0.25}, steps=12, batch_tokens=128,
        seq_len=16, decay_seq_len=32, start_layers=2, grow_step=4, warmup_steps=2, held_out_every=3,
    )  # fmt: skip


@pytest.fixture(scope="session")
def run(recipe: VerifierRecipe, sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder."""
    from experiments.tiny.run import train_verifier

    out = tmp_path_factory.mktemp("run")
    train_verifier(sources, out, recipe)
    return out


@pytest.fixture(scope="session")
def verifier_folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, published."""
    from experiments.tiny.publish import publish

    out = tmp_path_factory.mktemp("verifier")
    publish(run, out, {})
    return out
