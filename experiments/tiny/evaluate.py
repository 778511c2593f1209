"""Measure a published verifier: bits per byte, Python that parses, answers that end, MTP acceptance.

This module computes every figure of the model card from the published folder alone.
"""

from __future__ import annotations

import ast
import codeop
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from redraft.bench.prompts import load_prompts
from redraft.train.data import SEPARATOR
from redraft.train.mtp import load_mtp

NEW_TOKENS = 128
_ROWS = 16
# CPython's own rule for interactive input: an open bracket, string or block is unfinished, not wrong.
_UNFINISHED: int = (
    codeop.PyCF_ALLOW_INCOMPLETE_INPUT  # type: ignore[attr-defined]
    | codeop.PyCF_DONT_IMPLY_DEDENT  # type: ignore[attr-defined]
    | ast.PyCF_ONLY_AST
)


def evaluate(folder: Path) -> dict[str, Any]:
    """Load `folder` with transformers, on the CPU in fp32, and measure. Shares are between 0 and 1."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    mtp = load_mtp(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left")
    kinds: dict[str, dict[str, float]] = {}
    checked: list[tuple[bool, bool]] = []
    for path in sorted((folder / "heldout").glob("*.txt")):
        prompts = [prompt.text for prompt in load_prompts([folder / "prompts" / f"{path.stem}.jsonl"])]
        bits, per_byte = bits_per_byte(model, tokenizer, path.read_text(encoding="utf-8"))
        rows = greedy(model, tokenizer, prompts)
        right, tried = zip(*(mtp_matches(model, mtp, prompt, row) for prompt, row in rows), strict=True)
        kinds[path.stem] = {
            "bits_per_byte": bits,
            "tokens_per_byte": per_byte,
            "prompts": len(prompts),
            "ended": sum(row[-1] == tokenizer.eos_token_id for _, row in rows) / len(rows),
            "mtp_acceptance": sum(right) / sum(tried),
        }
        if path.stem == "code":
            texts = [str(tokenizer.decode(row, skip_special_tokens=True)) for _, row in rows]
            checked = [syntax_checks(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "mtp_parameters": sum(p.numel() for p in mtp.parameters()),
        "new_tokens": NEW_TOKENS,
        "kinds": kinds,
        "python_without_error": sum(one for one, _ in checked) / len(checked),
        "python_parsed": sum(one for _, one in checked) / len(checked),
    }


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
def greedy(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return token ids of every prompt and of its greedy completion, up to EOS."""
    rows = []
    for first in range(0, len(prompts), _ROWS):
        batch = tokenizer(list(prompts[first : first + _ROWS]), return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        out = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
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


def has_no_error(text: str) -> bool:
    """Return True if `text`, which may be unfinished Python, has no syntax error."""
    try:
        compile(text, "<text>", "exec", _UNFINISHED)
    except SyntaxError as error:
        return "incomplete input" in str(error)
    except ValueError:  # a null byte
        return False
    return True


def syntax_checks(prompt: str, completion: str) -> tuple[bool, bool]:
    """Apply two definitions of "the completion parses" to prompt and completion, cut at the last line's end.

    First: CPython finds no syntax error, though the text may be unfinished. Second, stricter: `ast.parse` also accepts
    the prompt with at least half of the completion's lines, so the completion began a statement and ended it.
    """

    def parses(text: str) -> bool:
        try:
            ast.parse(text)
        except SyntaxError:
            return False
        return True

    lines = (prompt + completion).splitlines(keepends=True)
    if not lines[-1].endswith("\n"):
        lines.pop()
    if not has_no_error("".join(lines)):
        return False, False
    before = prompt.count("\n")
    least = before + max(1, (len(lines) - before + 1) // 2)
    return True, any(parses("".join(lines[:count])) for count in range(len(lines), least - 1, -1))
