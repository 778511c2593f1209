"""Acceptance of a published drafter on the text that its verifier writes after given prompts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redraft.errors import DataError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.train.acceptance import Acceptance, acceptance_of
from redraft.train.method import DrafterObjective
from redraft.train.objectives import find_method
from redraft.train.self_text import continue_greedily
from redraft.train.verifier_model import VerifierModel, check_device, open_verifier


@dataclass(frozen=True)
class KindAcceptance:
    """Acceptance on the texts of one kind, and the number of prompts."""

    prompts: int
    acceptance: Acceptance

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"prompts": self.prompts, **asdict(self.acceptance)}


def evaluate_drafter(
    folder: Path,
    verifier: Path,
    prompts: Sequence[Path],
    new_tokens: int = 128,
    limit: int | None = None,
    device: str = "cpu",
) -> dict[str, KindAcceptance]:
    """Return acceptance by kind of prompt, over drafts that start at a prompt's last token or later.

    `limit` takes only the first prompts of every kind. Raises CheckpointError if the drafter is damaged or belongs
    to another verifier, and DataError for damaged prompts.
    """
    check_device(device)
    texts = read_prompts(prompts, limit)
    checkpoint = DrafterCheckpoint.open(folder)
    method = find_method(checkpoint.method)
    config = checkpoint.configure(method.config)
    found = open_verifier(verifier, device)
    checkpoint.check_verifier(config, found.hidden_size, found.vocab_size, found.identity)
    objective = method.objective(found.model, config, method.recipe(), False)
    checkpoint.load(objective.drafter)
    objective.to(device)
    return {kind: _measure(objective, found, kind, some, new_tokens) for kind, some in texts.items()}


def read_prompts(paths: Sequence[Path], limit: int | None = None) -> dict[str, list[str]]:
    """Return first turns by `category`, or by file without one, in the order of the files."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"prompts {path} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
                found[str(item.get("category", path.stem))].append(str(item["turns"][0]))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                raise DataError(f"{path}:{number}: not a JSON object with turns") from None
    if not found:
        raise DataError(f"no prompts in {', '.join(map(str, paths))}")
    return {kind: texts[:limit] for kind, texts in found.items()}


def _measure(
    objective: DrafterObjective, verifier: VerifierModel, kind: str, prompts: list[str], new_tokens: int
) -> KindAcceptance:
    """Leave out prompts whose text would pass the verifier's positions."""
    most = getattr(verifier.config, "max_position_embeddings", None)
    ids = [encoding.ids for encoding in verifier.tokenizer.encode_batch(prompts)]
    ids = [prompt for prompt in ids if prompt and (not most or len(prompt) + new_tokens <= most)]
    if not ids:
        raise DataError(f"no prompt of {kind} fits the verifier with {new_tokens} more tokens", "give shorter prompts")
    rows = continue_greedily(verifier.model, ids, new_tokens, verifier.eos)
    texts = [
        (np.array([row]), len(prompt) - 1)
        for prompt, row in zip(ids, rows, strict=True)
        if len(row) >= len(prompt) + objective.lookahead
    ]
    return KindAcceptance(len(texts), acceptance_of(objective, texts))
