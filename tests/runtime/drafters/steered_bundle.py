"""Random steering of a student, and its logits with the rows of a draft as SD²'s paper has them (appendix A.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig

STATES = ("2", "1", "0")
"""h, m and l: the hidden states after these layers, counted from 0."""


def verifiers_layers(student: DraftModel, verifier: Checkpoint) -> DraftModel:
    """The student with the layers and the final norm of its verifier."""
    whole = AutoModelForCausalLM.from_pretrained(verifier.path).state_dict()
    for name, tensor in student.state_dict().items():
        if not name.startswith("steering."):
            tensor.copy_(whole[name.replace("layers.1.", f"layers.{student.config.layers[-1]}.")])
    return student


def random_steering(student: DraftModel) -> DraftModel:
    """The student with steering that changes each logit."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in student.state_dict().items():
        if name.startswith("steering."):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.15)
    return student


@dataclass
class Rows:
    """The training module's logits, in one pass over a drafter's rows, each with the g that it was made with.

    tokens: of the rows.   sources: the position of the verifier's hidden states that steered each row, -1 for none.
    """

    folder: Path
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.student = open_student(self.folder / "sd2")
        self.verifier = AutoModelForCausalLM.from_pretrained(self.folder / "verifier").eval()

    @torch.no_grad()
    def draft(self, committed: Sequence[int], drafted: Sequence[int], steps: int) -> torch.Tensor:
        """Draft after these tokens, whatever tokens are chosen. Returns the logits of each drafted token, [steps, V].

        Rows of drafted tokens that were committed stay. The other rows but the last one catch up, each with the g of
        the position before it. The last returned token is at t: its g_t comes from t - 1, whose logits gave it.
        """
        last, kept = len(committed) - 1, 0
        while kept < min(len(self.tokens), last) and self.tokens[kept] == committed[kept]:
            kept += 1
        self.tokens = [*self.tokens[:kept], *committed[kept:], *drafted[: steps - 1]]
        self.sources = [*self.sources[:kept], *range(kept - 1, last), *[last - 1] * (steps - 1)]
        states = self.verifier.model(torch.tensor([list(committed)]), output_hidden_states=True).hidden_states
        features = torch.cat([states[int(name) + 1] for name in STATES], dim=-1)[:, torch.tensor(self.sources).clamp(0)]
        assert self.student.steering is not None
        biases = self.student.steering(features, torch.arange(len(self.tokens))[None])
        hidden = self.student(self.verifier.model.embed_tokens(torch.tensor([self.tokens])), biases)
        logits: torch.Tensor = self.verifier.lm_head(hidden)[0, -steps:]
        return logits


def open_student(folder: Path) -> DraftModel:
    """The student in a drafter's folder."""
    opened = DrafterCheckpoint.open(folder)
    student = DraftModel(opened.configure(DraftModelConfig)).eval()
    opened.load(student)
    return student
