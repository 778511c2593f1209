"""Recipes: data mixture and optimisation of a run in one frozen value, which the trained model's own recipe extends.

The TOML recipe and the command line build the same class, which refuses unknown keys.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from redraft.errors import UsageError
from redraft.records import PositiveInt, from_plain

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run, except the places of its files. Subclasses add the trained model.

    `steps` is the whole length; with `epochs` it follows from the data's size. The learning rate warms up, is constant
    until the last `decay_share` of the steps, then falls to zero: linearly, or along half a cosine (`decay`), which
    begins after the warm-up at the earliest. While it is constant, a run can be resumed with another length. Rows have
    `seq_len` tokens, and `decay_seq_len` in the decay; a batch always has `batch_tokens`.

    optimizer: `muon` (Muon for matrices at `matrix_lr`, AdamW for the rest at `embedding_lr`), `adam` (all at `lr`),
    `adamw` (the same with `weight_decay`), or `scaled_adam` (Adam, with steps that allow for the size of inputs). The
    last three have `betas`.   grad_clip: largest norm of all gradients, or
    largest absolute value of each one if `clip_by` is `value`.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    steps: PositiveInt = 2000
    epochs: Annotated[int, 0, "a number of epochs"] = 0
    batch_tokens: PositiveInt = 4096
    seq_len: PositiveInt = 256
    decay_seq_len: PositiveInt = 256
    warmup_steps: int = 40
    decay_share: float = 0.25
    decay: Literal["linear", "cosine"] = "linear"
    optimizer: Literal["muon", "adam", "adamw", "scaled_adam"] = "muon"
    matrix_lr: float = 0.02
    embedding_lr: float = 0.005
    lr: float = 3e-5
    weight_decay: float = 0.01
    momentum: float = 0.95
    betas: tuple[float, ...] = (0.9, 0.999)
    grad_clip: float = 1.0
    clip_by: Literal["norm", "value"] = "norm"
    held_out_every: PositiveInt = 20
    seed: int = 0

    adjustable: ClassVar[frozenset[str]] = frozenset({"steps", "epochs"})
    """Fields that a resumed run may change, if its earlier steps would have been the same."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", dict(self.weights))
        for name in ("seq_len", "decay_seq_len"):
            if self.batch_tokens % getattr(self, name):
                raise UsageError(f"{name} {getattr(self, name)} must divide batch_tokens {self.batch_tokens}")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UsageError(f"betas must be two numbers from 0 to below 1, they are {list(self.betas)}")
        if not self.grad_clip > 0:
            raise UsageError(f"grad_clip must be above 0, it is {self.grad_clip}")
        if not 0.0 <= self.decay_share <= 1.0:
            raise UsageError(f"decay_share must be between 0 and 1, it is {self.decay_share}")
        if any(w <= 0 for w in self.weights.values()):
            raise UsageError(f"weights must be positive, they are {dict(self.weights)}")

    @property
    def decay_start(self) -> int:
        """First step of the decay. Its rows have another length."""
        return self.steps - round(self.steps * self.decay_share)

    def lr_factor(self, step: int) -> float:
        """Return the factor on learning rates at `step`: linear warmup, one, decay to zero at the end."""
        warmed = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.decay == "cosine":
            start = min(max(self.decay_start, self.warmup_steps), self.steps - 1)
            passed = max(0.0, (step - start) / (self.steps - start))
            return warmed * (1 + math.cos(math.pi * passed)) / 2
        return warmed * min(1.0, (self.steps - step) / max(1, self.steps - self.decay_start))

    def row_length(self, step: int) -> int:
        """Return the tokens in a row of the batch at `step`."""
        return self.decay_seq_len if step >= self.decay_start else self.seq_len

    def course(self, step: int) -> tuple[float, ...]:
        """Return the values that `step` takes from the adjustable fields."""
        return self.lr_factor(step), self.row_length(step)

    def for_epoch(self, batches: float) -> Self:
        """Return the recipe with the number of steps of its epochs, each of so many batches."""
        return dataclasses.replace(self, steps=max(1, math.ceil(self.epochs * batches))) if self.epochs else self

    def with_options(self, steps: int | None, seed: int | None, epochs: int | None = None) -> Self:
        """Return the recipe with the command line's options. A number of steps replaces epochs."""
        recipe = self if epochs is None else dataclasses.replace(self, epochs=epochs)
        recipe = recipe if steps is None else dataclasses.replace(recipe, steps=steps, epochs=0)
        return recipe if seed is None else dataclasses.replace(recipe, seed=seed)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for the checkpoint and the model card."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "recipe") -> Self:
        """Build a recipe from plain values. Raises UsageError for an unknown key or a value of the wrong type."""
        return from_plain(cls, values, source)

    @classmethod
    def load(cls, name_or_path: str) -> Self:
        """Read a TOML recipe: a path, or the name of one in the package."""
        values, source = read_recipe(name_or_path)
        return cls.from_dict(values, source)


def read_recipe(name_or_path: str) -> tuple[dict[str, Any], str]:
    """Return the values of a TOML recipe, and its path. Raises UsageError if it is missing or not TOML."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = RECIPES / f"{name_or_path}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), str(path)
    except FileNotFoundError:
        shipped = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise UsageError(f"no recipe {name_or_path}", f"give a .toml file or one of: {shipped}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
