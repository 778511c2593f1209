"""Training checkpoints: one file, written under another name and then renamed, so that it is always whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from redraft.errors import TrainingError

NAME = "checkpoint.pt"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint by `state` (tensors and plain values)."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{NAME}.tmp"
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / NAME)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Read the folder's checkpoint, on the CPU. Raises TrainingError if it is missing or damaged."""
    path = folder / NAME
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TrainingError(
            f"{folder} has no {path.name}: no step was saved", "start the run without --resume"
        ) from None
    except Exception as error:  # torch raises several types for damaged files  # noqa: BLE001
        raise TrainingError(f"{path} cannot be read: {error}", "start again without --resume") from None
    return state
