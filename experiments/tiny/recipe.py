"""The recipe of the embedded verifier: its shape, its growth, and the weight of its multi-token-prediction loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from redraft.errors import UsageError
from redraft.train.config import Recipe

TINY = Path(__file__).parent / "tiny.toml"
"""The recipe that the embedded verifier was trained with."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama verifier and of its multi-token-prediction module (one more layer of the same shape)."""

    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 12
    intermediate_size: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UsageError(f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise UsageError(f"model.head_dim {self.head_dim} must be even for rotary embeddings")


@dataclass(frozen=True)
class VerifierRecipe(Recipe):
    """A verifier's run. The first `grow_step` steps train a model of `start_layers` layers, then grown to all."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"code": 0.45, "word_problems": 0.2, "prose": 0.35})
    decay_seq_len: int = 512
    model: ModelConfig = field(default_factory=ModelConfig)
    start_layers: int = 0
    grow_step: int = 0
    mtp_weight: float = 0.3
    mtp_row_stride: int = 2

    adjustable: ClassVar[frozenset[str]] = Recipe.adjustable | {"grow_step"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights:
            raise UsageError("weights must name the kinds of the corpus")
        if self.mtp_row_stride < 1:
            raise UsageError(f"mtp_row_stride must be at least 1, it is {self.mtp_row_stride}")
        if max(self.seq_len, self.decay_seq_len) > self.model.max_positions:
            raise UsageError(
                f"seq_len {self.seq_len} and decay_seq_len {self.decay_seq_len} must be at most model.max_positions "
                f"{self.model.max_positions}"
            )
        if self.grow_step > 0 and (self.start_layers < 1 or self.model.layers % self.start_layers):
            raise UsageError(f"start_layers {self.start_layers} must divide model.layers {self.model.layers}")

    def layers(self, step: int) -> int:
        """Layers of the model that `step` trains."""
        return self.start_layers if step < self.grow_step else self.model.layers

    def course(self, step: int) -> tuple[float, ...]:
        """Return the values that `step` takes from the adjustable fields, its number of layers included."""
        return (*super().course(step), self.layers(step))
