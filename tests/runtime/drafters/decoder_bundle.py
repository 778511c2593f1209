"""A bundle of a random Llama with decoders that draft: itself, parts of it, wide ones, and steered ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.config import BuildConfig, DrafterBuild
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig, configuration_of
from redraft.export.drafters.steering import Mechanism
from redraft.runtime import Runtime
from redraft.runtime.drafters.decoder import DecoderDrafter
from redraft.runtime.requests.request import Request
from redraft.types import Budget, Tree
from tests.export.models import write_checkpoint
from tests.little import WORDS, write_tokenizer

CONTEXT, STEPS = 320, 6
DRAFTED = len(WORDS) - 2
"""Tokens that `wide` drafts, from the second one on."""
STATES = ("last", "0")
"""The verifier's hidden states that steer `sd2`: after the final norm, and after the first layer."""
ABLATIONS: tuple[Mechanism, ...] = ("after", "conditional")
"""Steered drafters of other mechanisms, with a norm of g."""


def write_bundle(folder: Path) -> Path:
    """Build `folder`/engines from a checkpoint, next to its drafters.

    same: the verifier's own checkpoint.   narrow: its first layer.   wide: the same, with trees of DRAFTED tokens.
    sd2:  both layers, steered. `ABLATIONS` are the same with other mechanisms.
    """
    rope = dict(rope_type="default", rope_theta=10000.0)
    sizes = dict(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 max_position_embeddings=CONTEXT, rope_parameters=rope)  # fmt: skip
    verifier = Checkpoint.open(write_checkpoint(folder / "verifier", "llama", **sizes))
    write_tokenizer(folder / "verifier")
    write_student(folder / "student", verifier)
    write_student(folder / "part", verifier, DRAFTED)
    write_student(folder / "sd2", verifier, steered="up")
    for mechanism in ABLATIONS:
        write_student(folder / mechanism, verifier, steered=mechanism)
    exact = {"precision": "fp32"}
    drafters = (
        DrafterBuild("same", str(folder / "verifier"), "draft_model", exact),
        DrafterBuild("narrow", str(folder / "student"), "draft_model", exact),
        DrafterBuild("wide", str(folder / "part"), "draft_model", {**exact, "width": 3, "nodes": 14, "steps": 6}),
        *(DrafterBuild(name, str(folder / name), "steered", {**exact, "steps": STEPS}) for name in ("sd2", *ABLATIONS)),
    )
    model = Model("little", str(verifier.path), verifier.path)
    build_bundle(model, BuildConfig(drafters=drafters), folder / "engines", {}, False, lambda message: None)
    return folder


def write_student(folder: Path, verifier: Checkpoint, drafted: int = 0, steered: Mechanism | None = None) -> None:
    """Write the verifier's first layer and final norm, with `drafted` tokens, or all for 0. If steered, both layers."""
    layers, states = ((0, 1), STATES) if steered else ((0,), ())
    config = configuration_of(load_config(verifier), len(WORDS), layers, drafted, states)
    config = replace(config, steering=steered or "up", steering_norm=steered in ABLATIONS)
    student = DraftModel(config)
    whole = AutoModelForCausalLM.from_pretrained(verifier.path).state_dict()
    generator = torch.Generator().manual_seed(7)
    for name, tensor in student.state_dict().items():
        if name.startswith("steering."):  # changes each logit
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.15 + (name == "steering.norm.weight"))
        else:
            tensor.copy_(whole[name])
    tokens = torch.arange(1, 1 + drafted) if drafted else None
    counts = torch.ones(len(WORDS), dtype=torch.int32)
    method = "steered" if steered else "draft_model"
    save_drafter(folder, method, config, Identity.of(verifier), student, counts, {}, tokens)


def drafter_of(runtime: Runtime, name: str) -> DecoderDrafter:
    drafter = runtime._speculation.drafter(name)
    assert isinstance(drafter, DecoderDrafter)
    return drafter


@dataclass
class Draft:
    """A draft of the runtime: its sequence, the committed tokens before it, its tree, and how many rows it computed."""

    seq: Request
    tokens: list[int]
    tree: Tree
    rows: int


def watched(drafter: DecoderDrafter, patch: pytest.MonkeyPatch) -> list[Draft]:
    """Return a list that gets every later draft."""
    drafts: list[Draft] = []
    draft = drafter.draft

    def observed(batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        made = draft(batch, budgets)
        for seq, tree, budget in zip(batch, made, budgets, strict=True):
            if budget.nodes:
                drafts.append(Draft(seq, list(seq.tokens), tree, len(seq.drafting[drafter].drafted)))
        return made

    patch.setattr(drafter, "draft", observed)
    return drafts


@dataclass
class Rows:
    """The logits of a training module, in one pass over a drafter's rows, each with the g that it was made with.

    name: of the drafter.   tokens: of the rows.
    sources: the position of the verifier's hidden states that steered each row, -1 for none.
    """

    folder: Path
    name: str = "sd2"
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.student = open_student(self.folder / self.name)
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
        features = torch.cat([states[-1], states[1]], dim=-1)[:, torch.tensor(self.sources).clamp(0)]
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
