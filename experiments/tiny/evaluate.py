"""Measure a published verifier: bits per byte, Python that parses, answers that end, MTP acceptance.

This module computes every figure of the model card from the published folder alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.tiny.python_text import syntax_checks
from redraft.errors import CheckpointError
from redraft.train.data import SEPARATOR
from redraft.train.mtp import load_mtp

NEW_TOKENS = 128
_GENERATION_ROWS = 16


@dataclass(frozen=True)
class KindFigures:
    """Figures of one kind; shares are between 0 and 1."""

    bits_per_byte: float
    tokens_per_byte: float
    prompts: int
    ended: float  # share of greedy completions that reach EOS within NEW_TOKENS
    mtp_acceptance: float  # share of greedy tokens that the MTP module predicts one step early


@dataclass(frozen=True)
class Figures:
    """Figures of a published verifier."""

    parameters: int
    mtp_parameters: int
    new_tokens: int
    kinds: dict[str, KindFigures]
    python_without_error: float
    python_parsed: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def evaluate(folder: Path, new_tokens: int = NEW_TOKENS) -> Figures:
    """Load `folder` with transformers, on the CPU in fp32, and measure. Raises CheckpointError if it is incomplete."""
    paths = sorted((folder / "heldout").glob("*.txt"))
    if not paths:
        raise CheckpointError(f"{folder} has no heldout/*.txt", "publish it again")
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    mtp = load_mtp(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left")
    kinds: dict[str, KindFigures] = {}
    checked: list[tuple[bool, bool]] = []
    for path in paths:
        prompts = read_prompts(folder / "prompts" / f"{path.stem}.jsonl")
        bits, per_byte = bits_per_byte(model, tokenizer, path.read_text(encoding="utf-8"))
        rows = greedy(model, tokenizer, prompts, new_tokens)
        accepted = [mtp_matches(model, mtp, prompt, row) for prompt, row in rows]
        kinds[path.stem] = KindFigures(
            bits_per_byte=bits,
            tokens_per_byte=per_byte,
            prompts=len(prompts),
            ended=sum(row[-1] == tokenizer.eos_token_id for _, row in rows) / len(rows),
            mtp_acceptance=sum(hits for hits, _ in accepted) / max(1, sum(total for _, total in accepted)),
        )
        if path.stem == "code":
            texts = [str(tokenizer.decode(row, skip_special_tokens=True)) for _, row in rows]
            checked = [syntax_checks(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    return Figures(
        parameters=sum(p.numel() for p in model.parameters()),
        mtp_parameters=sum(p.numel() for p in mtp.parameters()),
        new_tokens=new_tokens,
        kinds=kinds,
        python_without_error=sum(v[0] for v in checked) / max(1, len(checked)),
        python_parsed=sum(v[1] for v in checked) / max(1, len(checked)),
    )


def read_prompts(path: Path) -> list[str]:
    """Return the first turn of every line."""
    return [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@torch.inference_mode()
def bits_per_byte(model: Any, tokenizer: Any, text: str) -> tuple[float, float]:
    """Return bits a byte over the documents of `text` (EOS counted, BOS given), and tokens a byte.

    Windows are as long as the model's positions and advance by half of it. A token is scored with its longest context.
    """
    window: int = model.config.max_position_embeddings
    nats, tokens, size = 0.0, 0, 0
    for document in text.split(f"\n{SEPARATOR}\n"):
        ids = torch.tensor([*tokenizer(document, verbose=False).input_ids, tokenizer.eos_token_id])  # BOS first
        size += len(document.encode())
        tokens += len(ids) - 1
        scored = 1
        for start in range(0, max(1, len(ids) - window // 2), window // 2):
            piece = ids[start : start + window]
            log_probs = F.log_softmax(model(piece[None]).logits[0, :-1].float(), dim=-1)
            losses = -log_probs.gather(1, piece[1:, None])[:, 0]  # for tokens start + 1 ...
            nats += float(losses[scored - start - 1 :].sum())
            scored = start + len(piece)
    return nats / math.log(2) / size, tokens / size


@torch.inference_mode()
def greedy(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    new_tokens: int,
) -> list[tuple[list[int], list[int]]]:
    """Return token ids of every prompt and of its greedy completion, up to EOS."""
    rows = []
    for first in range(0, len(prompts), _GENERATION_ROWS):
        batch = tokenizer(list(prompts[first : first + _GENERATION_ROWS]), return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        out = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
        for ids, mask, whole in zip(batch["input_ids"], batch["attention_mask"], out, strict=True):
            new = whole[len(ids) :].tolist()
            if tokenizer.eos_token_id in new:
                new = new[: new.index(tokenizer.eos_token_id) + 1]
            rows.append((ids[mask.bool()].tolist(), new))
    return rows


@torch.inference_mode()
def mtp_matches(model: Any, mtp: Any, prompt: list[int], new: list[int]) -> tuple[int, int]:
    """Return the numbers of the completion's tokens that the MTP module predicts, greedily, and that it tries.

    The completion's first token is left out.
    """
    ids = torch.tensor([prompt + new])
    hidden = model.model(ids).last_hidden_state
    states = mtp(hidden[:, :-2], model.model.embed_tokens(ids[:, 1:-1]))  # row t predicts token t + 2
    predicted = model.lm_head(states).argmax(dim=-1)[0, len(prompt) - 1 :]
    actual = ids[0, len(prompt) + 1 :]
    return int((predicted == actual).sum()), len(actual)
