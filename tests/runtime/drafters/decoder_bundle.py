"""A bundle of a random Llama and of draft models: the verifier itself, part of it, and a wide one."""

from __future__ import annotations

from pathlib import Path

import torch

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.config import BuildConfig, DrafterBuild
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import Identity, save_drafter
from redraft.export.drafters.decoder_drafter import DraftModel, configuration_of
from tests.export.models import write_checkpoint
from tests.little import WORDS, write_tokenizer

CONTEXT = 160


def write_bundle(folder: Path) -> Path:
    """Build `folder`/engines from a checkpoint, next to its draft models.

    same:  the verifier's own checkpoint.   narrow, rounded: its first layer, in fp32 and in int8.
    wide:  as `narrow`, with trees.   part: its first layer and all but two of its tokens.
    fewer: another checkpoint, whose tokenizer lacks the last three tokens.
    """
    sizes = dict(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 max_position_embeddings=CONTEXT)  # fmt: skip
    verifier = Checkpoint.open(write_checkpoint(folder / "verifier", "llama", **sizes))
    write_tokenizer(folder / "verifier")
    write_student(folder / "student", verifier, 0)
    write_student(folder / "part", verifier, len(WORDS) - 2)
    write_checkpoint(folder / "fewer", "llama", **{**sizes, "vocab_size": len(WORDS) - 3, "num_hidden_layers": 1})
    write_tokenizer(folder / "fewer", words=WORDS[:-3])
    same, student, part, fewer = (str(folder / name) for name in ("verifier", "student", "part", "fewer"))
    exact = {"precision": "fp32"}
    drafters = (
        DrafterBuild("same", same, METHOD, exact),
        DrafterBuild("narrow", student, METHOD, exact),
        DrafterBuild("rounded", student, METHOD),
        DrafterBuild("wide", student, METHOD, {**exact, "width": 3, "nodes": 14, "steps": 6}),
        DrafterBuild("part", part, METHOD, exact),
        DrafterBuild("fewer", fewer, METHOD, exact),
    )
    model = Model("little", str(verifier.path), verifier.path)
    build_bundle(model, BuildConfig(drafters=drafters), folder / "engines", {}, False, lambda message: None)
    return folder / "engines"


METHOD = "draft_model"


def write_student(folder: Path, verifier: Checkpoint, drafted: int) -> DraftModel:
    """The verifier's first layer and final norm, with `drafted` tokens, or all for 0."""
    config = configuration_of(load_config(verifier), len(WORDS), (0,), drafted)
    student = DraftModel(config)
    from safetensors.torch import load_file

    stored = load_file(verifier.path / "model.safetensors")
    state = student.state_dict()
    for name, tensor in state.items():
        tensor.copy_(stored[name])
    tokens = torch.arange(1, 1 + drafted) if drafted else None
    counts = torch.ones(len(WORDS), dtype=torch.int32)
    save_drafter(folder, METHOD, config, Identity.of(verifier), student, counts, {}, tokens)
    return student
