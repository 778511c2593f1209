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
from redraft.train.distillation import Distillation
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives import find_training
from redraft.train.questions import ChatTurns
from redraft.train.text_batches import text_batch
from redraft.train.verifier_model import VerifierModel, check_device, open_verifier
from redraft.train.writer import continue_greedily

_TEXTS_AT_ONCE = 8


@dataclass(frozen=True)
class KindAcceptance:
    """Acceptance on the texts of one kind, and the number of prompts."""

    prompts: int
    acceptance: Acceptance

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"prompts": self.prompts, **asdict(self.acceptance)}


def evaluate_drafter(  # noqa: PLR0913 - facts of one evaluation
    folder: Path,
    verifier: Path,
    prompts: Sequence[Path],
    new_tokens: int = 128,
    limit: int | None = None,
    chat: bool = False,
    device: str = "cpu",
) -> dict[str, KindAcceptance]:
    """Return acceptance by kind of prompt, over drafts that start at a prompt's last token or later.

    `limit` takes only the first prompts of every kind. `chat` asks through the verifier's chat template. Raises
    CheckpointError if the drafter is damaged or belongs to another verifier, and DataError for damaged prompts.
    """
    check_device(device)
    texts = read_prompts(prompts, limit)
    checkpoint = DrafterCheckpoint.open(folder)
    found = open_verifier(verifier, device)
    objective = open_drafter(checkpoint, found)
    objective.to(device)
    turns = ChatTurns.of(str(found.texts), found.ends) if chat else None
    ends = turns.ends if turns else found.ends
    return {
        kind: _measure(objective, found, ends, kind, _encoded(found, turns, some), new_tokens)
        for kind, some in texts.items()
    }


def open_drafter(checkpoint: DrafterCheckpoint, verifier: VerifierModel) -> Distillation:
    """Return the loss of a published drafter. Raises CheckpointError if it does not belong to the verifier."""
    training = find_training(checkpoint.method)
    config = checkpoint.configure(training.config)
    checkpoint.check_verifier(config, verifier.hidden_size, verifier.vocab_size, verifier.identity)
    module = training.loss.module(config)
    tokens = checkpoint.load(module)
    vocabulary = DraftColumns.of(tokens.draft_vocabulary, config.vocab_size)
    objective = training.loss(verifier.model, config, training.table(), vocabulary)
    objective.drafter.load_state_dict(module.state_dict())
    objective.count(tokens.counts)
    return objective


def _encoded(verifier: VerifierModel, turns: ChatTurns | None, prompts: list[str]) -> list[tuple[int, ...]]:
    if turns:
        return [turns.ask(prompt) for prompt in prompts]
    return [tuple(encoding.ids) for encoding in verifier.tokenizer.encode_batch(prompts)]


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
    objective: Distillation, verifier: VerifierModel, ends: frozenset[int], kind: str, ids: list[tuple[int, ...]],
    new_tokens: int,
) -> KindAcceptance:  # fmt: skip
    """Leave out prompts whose text would pass the verifier's positions."""
    most = verifier.max_positions
    ids = [prompt for prompt in ids if prompt and (not most or len(prompt) + new_tokens <= most)]
    if not ids:
        raise DataError(f"no prompt of {kind} fits the verifier with {new_tokens} more tokens", "give shorter prompts")
    written = continue_greedily(verifier.model, ids, new_tokens, ends)
    texts = [
        ({"tokens": np.array(tokens)}, len(prompt))
        for prompt, tokens in zip(ids, written, strict=True)
        if len(tokens) >= len(prompt) + objective.lookahead
    ]
    if not texts:
        raise DataError(f"every answer of {kind} is shorter than a draft", "give other prompts")
    texts.sort(key=lambda text: len(text[0]["tokens"]))
    parts = [texts[i : i + _TEXTS_AT_ONCE] for i in range(0, len(texts), _TEXTS_AT_ONCE)]
    batches = (text_batch([t for t, _ in part], [p for _, p in part], (kind,) * len(part)) for part in parts)
    return KindAcceptance(len(texts), acceptance_of(objective, batches))
