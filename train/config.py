"""The recipe of a verifier: its shape, its data mixture and its optimisation, in one frozen value.

The TOML recipe and the command line build the same class; an unknown key is refused.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from redraft.errors import UsageError

KINDS = ("code", "word_problems", "prose")
RECIPES = Path(__file__).parent / "recipes"
T = TypeVar("T")


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
class VerifierRecipe:
    """Everything that decides a training run, except where its files are.

    `steps` is the whole length. The learning rate is constant until the last `decay_share` of it, then falls
    linearly to zero (warmup-stable-decay), so a run can be resumed with another `steps` while it is still constant.
    The first `grow_step` steps train a model of `start_layers` layers, which is then grown to the full depth.
    Rows are `seq_len` tokens long, and `decay_seq_len` in the decay; a batch always holds `batch_tokens` tokens.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    weights: Mapping[str, float] = field(default_factory=lambda: {"code": 0.45, "word_problems": 0.2, "prose": 0.35})
    steps: int = 2000
    batch_tokens: int = 4096
    seq_len: int = 256
    decay_seq_len: int = 512
    start_layers: int = 0
    grow_step: int = 0
    warmup_steps: int = 40
    decay_share: float = 0.25
    matrix_lr: float = 0.02
    embedding_lr: float = 0.005
    weight_decay: float = 0.01
    momentum: float = 0.95
    grad_clip: float = 1.0
    mtp_weight: float = 0.3
    mtp_row_stride: int = 2
    held_out_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", dict(self.weights))
        for name in ("steps", "batch_tokens", "seq_len", "decay_seq_len", "mtp_row_stride", "held_out_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, it is {getattr(self, name)}")
        for name in ("seq_len", "decay_seq_len"):
            length = getattr(self, name)
            if self.batch_tokens % length or length > self.model.max_positions:
                raise UsageError(
                    f"{name} {length} must divide batch_tokens {self.batch_tokens} and be at most "
                    f"model.max_positions {self.model.max_positions}"
                )
        if self.grow_step > 0 and (self.start_layers < 1 or self.model.layers % self.start_layers):
            raise UsageError(f"start_layers {self.start_layers} must divide model.layers {self.model.layers}")
        if not 0.0 <= self.decay_share <= 1.0:
            raise UsageError(f"decay_share must be between 0 and 1, it is {self.decay_share}")
        if not self.weights or any(w <= 0 for w in self.weights.values()):
            raise UsageError(f"weights must be positive, they are {dict(self.weights)}")

    @property
    def decay_start(self) -> int:
        """First step of the decay; the data order changes its row length there."""
        return self.steps - round(self.steps * self.decay_share)

    def lr_factor(self, step: int) -> float:
        """Factor on every learning rate at `step`: linear warmup, one, linear decay to zero after the last step."""
        if step >= self.decay_start:
            return (self.steps - step) / max(1, self.steps - self.decay_start)
        return min(1.0, (step + 1) / max(1, self.warmup_steps))

    def layers(self, step: int) -> int:
        """Layers of the model that `step` trains."""
        return self.start_layers if step < self.grow_step else self.model.layers

    def row_length(self, step: int) -> int:
        """Tokens in a row of the batch at `step`."""
        return self.decay_seq_len if step >= self.decay_start else self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the checkpoint and the model card."""
        return dataclasses.asdict(self)


def recipe_from_dict(values: Mapping[str, Any], source: str = "recipe") -> VerifierRecipe:
    """Build a recipe from plain values; raises UsageError on an unknown key or a value of the wrong type."""
    values = dict(values)
    model = _build(ModelConfig, values.pop("model", {}), f"{source}: [model]")
    return _build(VerifierRecipe, {**values, "model": model}, source)


def load_recipe(name_or_path: str) -> VerifierRecipe:
    """Read a TOML recipe: a path, or the name of one that ships (`tiny`)."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = RECIPES / f"{name_or_path}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        shipped = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise UsageError(f"no recipe {path}", f"give a .toml file or one of: {shipped}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    return recipe_from_dict(values, str(path))


def _build(cls: type[T], values: Mapping[str, Any], source: str) -> T:
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UsageError(f"{source}: unknown key {unknown[0]!r}", f"known: {', '.join(known)}")
    for name, value in values.items():
        wanted = str(known[name].type)
        if wanted == "int" and (not isinstance(value, int) or isinstance(value, bool)):
            raise UsageError(f"{source}: {name} must be a whole number, it is {value!r}")
        if wanted == "float" and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise UsageError(f"{source}: {name} must be a number, it is {value!r}")
    return cls(**values)
