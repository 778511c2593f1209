"""Measure a published variant: bits per byte of its verifier, and how often each head is right on greedy texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.tiny.evaluate import bits_per_byte
from redraft.errors import CheckpointError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.multi_head import MultiHeadConfig
from redraft.methods.multi_head import METHOD
from redraft.train.acceptance import acceptance_of, rank_accuracies
from redraft.train.batches import Batch
from redraft.train.data import SEPARATOR
from redraft.train.objectives.multi_head import MultiHeadObjective
from redraft.train.verifier_model import VerifierModel, open_verifier

PROMPT_TOKENS, NEW_TOKENS, ROWS = 32, 160, 24
"""Tokens of held-out text before a greedy text, tokens of that at most, and texts of a kind."""


@dataclass(frozen=True)
class KindFigures:
    """Figures of one kind.

    bits_per_byte:   of held-out text.   before: the same of the verifier that the variant began with.
    right:           share of the verifier's greedy tokens that are each head's likeliest one, by head.
    accepted:        the same among drafts that were right at every depth before.
    """

    bits_per_byte: float
    before: float | None
    right: tuple[float, ...]
    accepted: tuple[float, ...]


@dataclass(frozen=True)
class Figures:
    """Figures of a published variant."""

    parameters: int
    head_parameters: int
    kinds: dict[str, KindFigures]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def evaluate(folder: Path, start: Path | None = None) -> Figures:
    """Measure on the CPU in fp32. `start` is the verifier that the variant began with.

    Raises CheckpointError if the folder is incomplete.
    """
    verifier = open_verifier(folder, "cpu")
    checkpoint = DrafterCheckpoint.open(folder / METHOD.id)
    config = checkpoint.configure(MultiHeadConfig)
    checkpoint.check_verifier(config, verifier.hidden_size, verifier.vocab_size, verifier.identity)
    objective = MultiHeadObjective(verifier.model, config)
    checkpoint.load(objective.drafter)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    before = None if start is None else AutoModelForCausalLM.from_pretrained(str(start), dtype=torch.float32)
    kinds = {}
    for kind, batches in greedy_texts(verifier, folder / "heldout", objective.lookahead).items():
        text = (folder / "heldout" / f"{kind}.txt").read_text(encoding="utf-8")
        kinds[kind] = KindFigures(
            bits_per_byte=bits_per_byte(verifier.model, tokenizer, text)[0],
            before=None if before is None else bits_per_byte(before, tokenizer, text)[0],
            right=tuple(shares[0] for shares in rank_accuracies(objective, batches)),
            accepted=acceptance_of(objective, batches).top,
        )
    return Figures(
        parameters=verifier.model.num_parameters(),
        head_parameters=sum(p.numel() for p in objective.drafter.layers.parameters()),
        kinds=kinds,
    )


@torch.inference_mode()
def greedy_texts(verifier: VerifierModel, held_out: Path, lookahead: int) -> dict[str, list[Batch]]:
    """Return greedy texts of the verifier by kind, which begin with held-out text; drafts start after that.

    Raises CheckpointError if there is no held-out text, or a kind's is too short.
    """
    found, most = {}, verifier.max_positions or NEW_TOKENS + PROMPT_TOKENS
    new_tokens = min(NEW_TOKENS, most - PROMPT_TOKENS)
    for path in sorted(held_out.glob("*.txt")):
        documents = path.read_text(encoding="utf-8").split(f"\n{SEPARATOR}\n")
        tokens = [encoding.ids for encoding in verifier.tokenizer.encode_batch(documents)]
        prompts = [
            ids[start : start + PROMPT_TOKENS]
            for ids in tokens
            for start in range(0, len(ids) - PROMPT_TOKENS + 1, PROMPT_TOKENS)
        ]
        if not prompts:
            raise CheckpointError(f"{path} has no {PROMPT_TOKENS} tokens", "publish it again")
        chosen = torch.tensor(prompts[:: -(-len(prompts) // ROWS)])
        texts = verifier.model.generate(chosen, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
        found[path.stem] = [
            Batch.whole(rows, (path.stem,) * len(rows), lookahead, PROMPT_TOKENS - 1) for rows in texts.split(8)
        ]
    if not found:
        raise CheckpointError(f"{held_out} has no *.txt", "publish it again")
    return found
