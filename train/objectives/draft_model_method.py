"""Training of a student that drafts from tokens alone: a preset of `decoder_method`."""

from __future__ import annotations

from dataclasses import dataclass, field

from redraft.methods.draft_model import METHOD as SPECIFICATION
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.objectives.decoder_method import StudentTable, method_of, with_embedding_and_head


@dataclass(frozen=True)
class StudentRecipe(DrafterRecipe):
    """The recipe with a student's table."""

    method: str = SPECIFICATION.id
    drafter: StudentTable = field(default_factory=StudentTable)


METHOD = method_of(StudentRecipe, with_embedding_and_head)
