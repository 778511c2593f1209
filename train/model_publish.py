"""Writes a drafter that is a model of its own as a checkpoint of transformers, for programs that run such pairs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from redraft.errors import CheckpointError, UsageError
from redraft.train.trained_drafter import TrainedDrafter
from redraft.train.verifier_model import VerifierModel


def publish_model(folder: Path, out: Path, verifier: VerifierModel, text_files: Sequence[str]) -> None:
    """Write a run's or a published drafter as a model with the verifier's embedding and whole head, in fp32.

    text_files: names of the files of `verifier.texts` to copy: tokenizer, chat template, special tokens. Raises
    UsageError if the drafter is no model of its own, and CheckpointError if it belongs to another verifier.
    """
    found = TrainedDrafter.open(folder)
    if found.training.whole is None:
        raise UsageError(f"the drafter in {folder} is not a model of its own", "publish it without --format")
    if found.verifier != verifier.identity:
        raise CheckpointError(
            f"{folder} was trained for another verifier", "give the --verifier that it was trained for"
        )
    out.mkdir(parents=True, exist_ok=True)
    for file in text_files:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(verifier.texts / file, out / file)
    found.training.whole(found.module, verifier).save_pretrained(out)
    for written in out.glob("*.safetensors"):
        written.chmod(0o644)  # safetensors makes files readable for their owner only
