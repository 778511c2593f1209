"""A bundle of a random Llama and a random drafter, with so few tokens that wide trees are sometimes correct."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.config import BuildConfig, DrafterBuild
from redraft.export.checkpoint.safetensors import Checkpoint
from tests.cli.conftest import write_tokenizer
from tests.engines.drafters import lyanna_build
from tests.export.drafters.tiny import CONFIG, write_drafter, write_verifier

VOCABULARY, CONTEXT, STEPS, WIDTH = 13, 96, 4, 3
SCALE = 1.25
"""The drafter's draft logit scale."""


def write_lyanna_bundle(
    folder: Path, draft_vocab_size: int = 0, others: tuple[DrafterBuild, ...] = (), **options: object
) -> Path:
    """Build `folder`/engines from a checkpoint and a drafter. All is fp32, so that every verified step counts.

    draft_vocab_size: of the drafter's training.   others: further drafters.   options: of its build.
    """
    checkpoint = write_verifier(folder / "verifier", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    write_tokenizer(folder / "verifier")
    checkpoint = Checkpoint.open(checkpoint.path)
    config = replace(
        CONFIG, vocab_size=VOCABULARY, steps=STEPS, draft_logit_scale=SCALE, logit_scale=1.0,
        draft_vocab_size=draft_vocab_size,
    )  # fmt: skip
    drafter = write_drafter(folder / "drafter", checkpoint, config)
    lyanna = lyanna_build(str(drafter), **{"precision": "fp32", "width": WIDTH, **options})
    model = Model("little", str(checkpoint.path), checkpoint.path)
    build_bundle(model, BuildConfig(drafters=(lyanna, *others)), folder / "engines", {}, False, lambda message: None)
    return folder / "engines"
