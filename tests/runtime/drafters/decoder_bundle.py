"""A bundle of a random Llama with decoders that draft: itself, parts of it, wide ones, and steered ones."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.config import BuildConfig, DrafterBuild
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity, save_drafter
from redraft.export.drafters.decoder_drafter import DraftModel, configuration_of
from redraft.runtime import Runtime
from redraft.runtime.drafters.decoder import DecoderDrafter
from redraft.runtime.sequence import Sequence
from redraft.types import Budget, Tree
from tests.export.models import write_checkpoint
from tests.little import WORDS, write_tokenizer

from .steered_bundle import STATES, random_steering, verifiers_layers

CONTEXT, STEPS = 320, 6


def write_bundle(folder: Path) -> Path:
    """Build `folder`/engines from a checkpoint, next to its drafters.

    same: the verifier's own checkpoint.   narrow: its first layer.   wide: the same, with trees.
    part: its first layer and all but two of its tokens.
    sd2:  the verifier's first and last layer, steered.   sd2-part: the same for all but two tokens, in int8.
    """
    rope = dict(rope_type="default", rope_theta=10000.0)
    sizes = dict(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=4,
                 max_position_embeddings=CONTEXT, rope_parameters=rope)  # fmt: skip
    verifier = Checkpoint.open(write_checkpoint(folder / "verifier", "llama", **sizes))
    write_tokenizer(folder / "verifier")
    for name, drafted, steered in (
        ("student", 0, False), ("part", len(WORDS) - 2, False), ("sd2", 0, True), ("sd2-part", len(WORDS) - 2, True),
    ):  # fmt: skip
        write_student(folder / name, verifier, drafted, steered)
    exact = {"precision": "fp32"}
    drafters = (
        DrafterBuild("same", str(folder / "verifier"), "draft_model", exact),
        DrafterBuild("narrow", str(folder / "student"), "draft_model", exact),
        DrafterBuild("wide", str(folder / "student"), "draft_model", {**exact, "width": 3, "nodes": 14, "steps": 6}),
        DrafterBuild("part", str(folder / "part"), "draft_model", exact),
        DrafterBuild("sd2", str(folder / "sd2"), "steered", {**exact, "steps": STEPS}),
        DrafterBuild("sd2-part", str(folder / "sd2-part"), "steered"),
    )
    model = Model("little", str(verifier.path), verifier.path)
    build_bundle(model, BuildConfig(drafters=drafters), folder / "engines", {}, False, lambda message: None)
    return folder


def write_student(folder: Path, verifier: Checkpoint, drafted: int, steered: bool) -> None:
    """Write the verifier's first layer and final norm, with `drafted` tokens, or all for 0. If steered, two layers."""
    layers, states = ((0, 3), STATES) if steered else ((0,), ())
    config = configuration_of(load_config(verifier), len(WORDS), layers, drafted, states)
    student = verifiers_layers(DraftModel(config), verifier)
    if steered:
        random_steering(student)
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

    seq: Sequence
    tokens: list[int]
    tree: Tree
    rows: int


def watched(drafter: DecoderDrafter, patch: pytest.MonkeyPatch) -> list[Draft]:
    """Return a list that gets every later draft."""
    drafts: list[Draft] = []
    draft = drafter.draft

    def observed(batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget]) -> list[Tree]:
        made = draft(batch, budgets)
        for seq, tree, budget in zip(batch, made, budgets, strict=True):
            if budget.nodes:
                drafts.append(Draft(seq, list(seq.tokens), tree, len(seq.drafting[drafter].drafted)))
        return made

    patch.setattr(drafter, "draft", observed)
    return drafts
