"""One checkpoint through the product and through transformers: tokens and logits of both, and the result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.assembly.self_check import named_tokens
from redraft.assembly.tokenizers import write_stand_in
from redraft.config import BuildConfig
from redraft.engines import Bundle, open_bundle, open_host
from redraft.errors import RedraftError
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.drafters import load_drafter
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.steps.verifier import open_verifier
from redraft.runtime.trees.offers import Speculation
from redraft.runtime.trees.tree import make_tree, root_only
from redraft.types import NO_SPECULATION, Budget, FloatArray, Outcome, Tree

from .checkpoints import FIRST_WORD, SPECIAL_TOKENS, VOCABULARY, load_reference, write_checkpoint

PROMPT_LENGTHS = (24, 17)
NEW_TOKENS = 24
TREES = Budget(nodes=8, depth=3, width=3)
TOLERANCE = 1e-3
"""Largest difference of two logits of one token that counts as rounding, in standard deviations of the logits."""


class Result(StrEnum):
    """Result of a checkpoint."""

    SAME = "SAME"
    REFUSED = "REFUSED"
    WRONG = "WRONG"
    ERROR = "ERROR"
    NOT_MADE = "NOT MADE"


@dataclass(frozen=True)
class Finding:
    """A result and one line about it.

    difference: the largest difference of logits, in standard deviations; None if nothing ran.
    accepted:   drafted tokens that trees of known tokens got accepted.
    """

    result: Result
    note: str = ""
    difference: float | None = None
    accepted: int = 0


@dataclass(frozen=True)
class Text:
    """A prompt and its greedy continuation. logits: float32[NEW_TOKENS, V], from which each new token was chosen."""

    prompt: list[int]
    tokens: list[int]
    logits: FloatArray


class Recorder(Greedy):
    """Greedy decoding that keeps the logits of each token and counts moved KV rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[FloatArray] = []
        self.moved = 0

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Keep a copy of the rows on the accepted path."""
        outcome = super().verify(logits, tree, tokens)
        self.rows.extend(logits[[0, *outcome.path]].copy())
        self.moved += sum(node != place for place, node in enumerate(outcome.path, 1))
        return outcome


class KnownText(TreeMaker):
    """Drafts the known continuation after wrong siblings, so that each accepted row must move."""

    texts: Sequence[Text] = ()

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        """Return trees of up to three known tokens, each after one wrong sibling or two."""
        return [self._tree(seq, budget.depth) for seq, budget in zip(batch, budgets, strict=True)]

    def _tree(self, seq: Request, depth: int) -> Tree:
        prompt = seq.tokens[: seq.prompt_length]
        known = next(text.tokens for text in self.texts if text.prompt == prompt)
        said = len(seq.tokens) - seq.prompt_length
        coming = known[said : said + depth]
        if not coming:
            return root_only(seq.tokens[-1])
        tokens, parents = [seq.tokens[-1]], [-1]
        last = 0
        for step, token in enumerate(coming):
            wrong = [(token + shift) % VOCABULARY for shift in (1, 2)]
            tokens += [wrong[0], wrong[1], token] if step == 0 else [wrong[0], token]
            parents += [last, 1, last] if step == 0 else [last, last]
            last = len(tokens) - 1
        return make_tree(tokens, parents, [0.9**node for node in range(len(tokens))])


@dataclass
class Comparison:
    """Runs of one product against transformers' texts. Collects findings."""

    texts: Sequence[Text]
    special: frozenset[int] = frozenset()
    largest: float = 0.0
    accepted: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, mode: str, requests: Sequence[Request]) -> None:
        """Compare each request with the text of its prompt."""
        for request, text in zip(requests, self.texts, strict=False):
            assert isinstance(request.sampler, Recorder)
            if note := self._differs(request.new_tokens, np.stack(request.sampler.rows), text):
                self.notes.append(f"{mode}: {note}")

    def _differs(self, tokens: Sequence[int], logits: FloatArray, text: Text) -> str | None:
        """Return the first place at which tokens or logits differ, up to the first near-tie."""
        for place, (found, expected) in enumerate(zip(tokens, text.tokens, strict=True)):
            scale = float(text.logits[place].std())
            difference = float(np.abs(logits[place] - text.logits[place]).max()) / scale
            self.largest = max(self.largest, difference if np.isfinite(difference) else np.inf)
            if not difference <= TOLERANCE:
                return f"token {place + 1} is {found}, expected {expected}; logits differ by {difference:.2g} std"
            if found != expected or expected in self.special:  # an image's token has no text for the whole model
                return None
        return None


def check(folder: Path, model_type: str, overrides: Mapping[str, Any]) -> Finding:
    """Make a checkpoint under `folder`, build it, run it in every way and compare."""
    torch.set_num_threads(1)
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    try:
        write_checkpoint(checkpoint, model_type, **overrides)
        texts = reference_texts(checkpoint)
    except Exception as error:  # noqa: BLE001 - architectures fail in their own ways
        return Finding(Result.NOT_MADE, described(error))
    write_stand_in(checkpoint, VOCABULARY)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}  # not the architecture's fault: its files are missing
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    try:
        build_bundle(Model(model_type, model_type, checkpoint), BuildConfig(), bundle, {}, True, lambda line: None)
        return compared(open_bundle(bundle), texts, frozenset(special_tokens(checkpoint)))
    except RedraftError as error:
        line = " ".join(str(error).split()).replace(f"{folder}/", "")
        return Finding(Result.ERROR if "unexpected" in line else Result.REFUSED, line)
    except Exception as error:  # noqa: BLE001 - the finding is that this kind of error was raised
        return Finding(Result.ERROR, described(error))


def special_tokens(checkpoint: Path) -> list[int]:
    """Return the ids with a meaning in the configuration, except those of the text's own ends."""
    values = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    ordinary = set(SPECIAL_TOKENS.values())
    return [token for token in named_tokens(values) if token not in ordinary]


def reference_texts(checkpoint: Path) -> list[Text]:
    """Return greedy continuations by transformers, each token from the whole text, without any cache."""
    model = load_reference(checkpoint)
    generator = np.random.default_rng(0)
    return [_continued(model, generator.integers(FIRST_WORD, VOCABULARY, n).tolist()) for n in PROMPT_LENGTHS]


@torch.no_grad()
def _continued(model: torch.nn.Module, prompt: list[int]) -> Text:
    tokens, rows = list(prompt), []
    for _ in range(NEW_TOKENS):
        rows.append(model(input_ids=torch.tensor([tokens])).logits[0, -1].float().numpy())
        tokens.append(int(rows[-1].argmax()))
    logits = np.stack(rows)
    if not np.isfinite(logits).all():
        raise ValueError("transformers' own logits are not finite")
    return Text(prompt, tokens[len(prompt) :], logits)


def compared(bundle: Bundle, texts: Sequence[Text], special: frozenset[int] = frozenset()) -> Finding:
    """Run plainly, with n-grams and with trees of known tokens, one text and two."""
    found = Comparison(texts, special)
    for some in (texts[:1], texts):
        verifier = open_verifier(bundle, open_host(bundle, 1, len(some)), len(some))
        verifier.take_branches()
        known = KnownText(verifier)
        known.texts = texts
        ways = {
            "plain": Speculation(load_drafter("none", verifier), FixedBudget(NO_SPECULATION)),
            "n-grams": Speculation(load_drafter("ngram", verifier), FixedBudget(TREES)),
            "trees": Speculation(known, FixedBudget(TREES)),
        }
        for mode, way in ways.items():
            requests = [_request(text) for text in some]
            DecodeLoop(verifier, way).run(requests)
            found.add(mode if len(some) == 1 else f"{mode}, batch of {len(some)}", requests)
            if mode == "trees":
                found.accepted += sum(r.sampler.moved for r in requests if isinstance(r.sampler, Recorder))
        verifier.close()
    if found.notes:
        return Finding(Result.WRONG, found.notes[0], found.largest, found.accepted)
    if found.accepted < NEW_TOKENS:
        return Finding(Result.WRONG, f"only {found.accepted} drafted tokens were accepted", found.largest)
    return Finding(Result.SAME, "", found.largest, found.accepted)


def _request(text: Text) -> Request:
    limit = len(text.prompt) + NEW_TOKENS
    return Request(list(text.prompt), len(text.prompt), limit, frozenset(), Recorder())


def described(error: BaseException) -> str:
    """Return the kind of an error and its last line, at most 300 characters."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[-1].split())}"[:300]
