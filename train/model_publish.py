"""Writes a drafter that is a model of its own as a checkpoint of transformers, for programs that run such pairs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.train.checkpoint import load_checkpoint
from redraft.train.drafter_publish import run_facts, trained_drafter
from redraft.train.drafter_run import RUN
from redraft.train.method import Method
from redraft.train.objectives import find_method
from redraft.train.verifier_model import VerifierModel


def publish_model(folder: Path, out: Path, verifier: VerifierModel, text_files: Sequence[str]) -> None:
    """Write a run's or a published drafter as a model with the verifier's embedding and whole head, in fp32.

    text_files: names of the files of `verifier.texts` to copy: tokenizer, chat template, special tokens. Raises
    UsageError if the drafter is no model of its own, and CheckpointError if it belongs to another verifier.
    """
    method, module, identity = _drafter_of(folder)
    if method.whole is None:
        raise UsageError(f"the drafter in {folder} is not a model of its own", "publish it without --format")
    if identity != verifier.identity:
        raise CheckpointError(
            f"{folder} was trained for another verifier", "give the --verifier that it was trained for"
        )
    out.mkdir(parents=True, exist_ok=True)
    for file in text_files:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(verifier.texts / file, out / file)
    method.whole(module, verifier).save_pretrained(out)
    for written in out.glob("*.safetensors"):
        written.chmod(0o644)  # safetensors makes files readable for their owner only


def _drafter_of(folder: Path) -> tuple[Method, nn.Module, Identity]:
    """Return the drafter of a run or of a published folder, and the verifier that it was trained for."""
    if (folder / RUN).exists():
        state, facts = load_checkpoint(folder), run_facts(folder)
        return find_method(facts.method), trained_drafter(folder, facts, state), facts.verifier
    checkpoint = DrafterCheckpoint.open(folder)
    method = find_method(checkpoint.method)
    module = method.module(checkpoint.configure(method.config))
    checkpoint.load(module)
    return method, module, checkpoint.verifier
