"""Training of a steered student: a preset of `decoder_method`."""

from __future__ import annotations

from dataclasses import dataclass, field

from redraft.methods.steered import METHOD as SPECIFICATION
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.objectives.decoder_method import SteeringTable, method_of


@dataclass(frozen=True)
class SteeredRecipe(DrafterRecipe):
    """The recipe with a steered student's table."""

    method: str = SPECIFICATION.id
    drafter: SteeringTable = field(default_factory=SteeringTable)


METHOD = method_of(SteeredRecipe)
