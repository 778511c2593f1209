"""`redraft train text`: the verifier answers questions, and everything that its drafters learn from is kept.

text.json        recipe, digests of verifier and data
questions.npz    the prompts, in the order of writing
shards/NNNN/     see `redraft.train.text_shards`
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import TrainingError, UsageError
from redraft.export.graph import decoder
from redraft.names import LAST_HIDDEN_STATE
from redraft.records import PositiveInt, from_plain, to_plain
from redraft.train.batches import similar_lengths
from redraft.train.config import read_recipe
from redraft.train.data import Corpus
from redraft.train.questions import ChatTurns, questions_of
from redraft.train.states import TOP_LOGITS, states_of_tokens, stored_size
from redraft.train.text_shards import (
    FACTS,
    FORM,
    Shards,
    check_written_by,
    load_facts,
    load_packed,
    save_facts,
    save_packed,
    split,
)
from redraft.train.verifier_model import VerifierModel
from redraft.train.writer import Engines, TextStart, Write, Writer

QUESTIONS = "questions.npz"
KINDS = ("chat", "math", "code", "edit", "prose")
_SORTED = 16  # batches whose prompts are sorted by length together
_MOST_FREQUENT = 3  # the same question is asked at most so often
_STATES_TOKENS = 1024
"""Tokens of a call that computes states of given texts. A layer's outputs of more leave a CPU's caches."""


@dataclass(frozen=True)
class TextRecipe:
    """Texts to write.

    texts:           number by kind, of KINDS; `redraft.train.questions` describes the kinds.
    greedy:          share of greedy texts; the others are sampled from the 64 likeliest tokens at temperature 1.
    new_tokens:      longest answer.   question_tokens: longest question that the verifier asks itself.
    rows:            texts that are written at once.
    hidden_states:   those to keep, with the likeliest logits; none keeps tokens alone.
    held_out_every:  one document of the data in so many is not asked about.
    """

    texts: Mapping[str, int] = field(default_factory=dict)
    greedy: float = 0.6
    new_tokens: PositiveInt = 256
    question_tokens: PositiveInt = 96
    rows: PositiveInt = 256
    hidden_states: tuple[str, ...] = (LAST_HIDDEN_STATE,)
    held_out_every: PositiveInt = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.texts) - set(KINDS)):
            raise UsageError(f"texts.{unknown[0]} is not a kind", f"the kinds are {', '.join(KINDS)}")
        if not self.texts or min(self.texts.values()) < 1:
            raise UsageError("texts must give a positive number of texts for at least one kind")
        if not 0 <= self.greedy <= 1:
            raise UsageError(f"greedy must be a share from 0 to 1, it is {self.greedy}")

    @classmethod
    def load(cls, name_or_path: str) -> TextRecipe:
        """Read a TOML recipe: a path, or the name of one in the package."""
        return from_plain(cls, *read_recipe(name_or_path))

    @property
    def data_kinds(self) -> tuple[str, ...]:
        """Kinds whose questions come from documents."""
        return tuple(kind for kind in self.texts if kind != "chat")


Progress = Callable[[str, int, int, int], None]
"""Stage, batches done, batches in all, tokens of this batch."""


def write_text(  # noqa: PLR0913 - the options of a command
    verifier: VerifierModel, corpora: Mapping[str, Corpus], recipe: TextRecipe, out: Path,
    progress: Progress = lambda stage, done, of, tokens: None, warn: Callable[[str], None] = print,
    engines: Engines | None = None,
) -> None:  # fmt: skip
    """Write the texts of a recipe into `out`, or continue to.

    engines: they write in place of the verifier's modules.
    If the disk has too little space for states, only tokens are kept, and `warn` gets a line. Raises TrainingError if
    `out` holds texts of another recipe, verifier, data or engines, and UsageError if engines are to keep states.
    """
    if engines is not None:
        check_engines(recipe)
    turns = ChatTurns.of(str(verifier.texts), verifier.ends)
    facts = {
        "recipe": to_plain(recipe),
        "verifier": to_plain(verifier.identity),
        "data": {kind: corpora[kind].digest() for kind in recipe.data_kinds},
        "engines": engines and engines.name,
    }
    decoder.check_hidden_states(recipe.hidden_states, verifier.layers)
    _begin(out, facts | (FORM if recipe.hidden_states else {}))
    if not (out / QUESTIONS).exists():
        save_packed(out / QUESTIONS, _questions_in_order(verifier, turns, corpora, recipe, progress, engines))
    asked = load_packed(out / QUESTIONS)
    prompts = [
        TextStart(tuple(tokens.tolist()), float(temperature))
        for tokens, temperature in zip(split(asked["lengths"], asked["tokens"]), asked["temperatures"], strict=True)
    ]
    save_facts(out, {**load_facts(out), "texts": len(prompts)})
    shards = Shards(out)
    batches = [slice(i, i + recipe.rows) for i in range(0, len(prompts), recipe.rows)]
    for index, some in enumerate(batches):
        if index in shards:
            continue
        longest = max(len(prompt.tokens) for prompt in prompts[some]) + recipe.new_tokens
        needed = _bytes_of(longest * len(prompts[some]), len(recipe.hidden_states), verifier.hidden_size)
        kept = recipe.hidden_states
        if kept and not shards.fits(needed):
            warn(f"the disk has too little space for hidden states: shard {index} keeps tokens alone")
            kept = ()
        write = engines.write if engines else _by_modules(verifier, kept)
        written = write(prompts[some], turns.ends, recipe.new_tokens, recipe.seed + index)
        tokens = written.tokens.astype(np.uint32)
        texts: dict[str, NDArray[Any]] = {"tokens": tokens, "lengths": written.lengths, "prompts": written.prompts}
        about = {name: asked[name][some] for name in ("kinds", "temperatures")}
        shards.add(index, {**texts, **written.states, **about})
        progress("texts", index + 1, len(batches), int((written.lengths - written.prompts).sum()))


def check_engines(recipe: TextRecipe) -> None:
    """Raise UsageError for a recipe whose texts engines cannot write."""
    if recipe.hidden_states:
        raise UsageError(
            "engines keep no hidden states of the texts that they write",
            "take a recipe with hidden_states = []; later `redraft train pack` and `redraft train states` compute them",
        )


def _by_modules(verifier: VerifierModel, kept: tuple[str, ...] = ()) -> Write:
    """Return what the verifier's modules write, with these hidden states."""
    return lambda prompts, ends, new_tokens, seed: Writer(verifier.model, ends, new_tokens, kept).write(prompts, seed)


def _begin(out: Path, facts: Mapping[str, Any]) -> None:
    """Make the folder, or check that it has the same facts. The number of texts may not change either."""
    if not (out / FACTS).exists():
        save_facts(out, facts)
        return
    before = load_facts(out)
    if differing := next((name for name in facts if before.get(name) != facts[name]), None):
        raise TrainingError(
            f"{out} holds texts of a run that differs in its {differing}", "give the same as before, or another --out"
        )


def _bytes_of(tokens: int, hidden_states: int, width: int) -> int:
    """Return the size of so many tokens' states: 8 bits a number, and an id and a half for each likely token."""
    return tokens * (stored_size(width) * hidden_states + 6 * TOP_LOGITS + 4)


def _questions_in_order(
    verifier: VerifierModel, turns: ChatTurns, corpora: Mapping[str, Corpus], recipe: TextRecipe, progress: Progress,
    engines: Engines | None,
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Return prompts, kinds and temperatures in the order of writing: batches of similar lengths, in random order."""
    rng = np.random.Generator(np.random.PCG64(recipe.seed))
    most = min(verifier.max_positions or sys.maxsize, engines.max_positions if engines else sys.maxsize)
    longest = most - recipe.new_tokens
    write = engines.write if engines else _by_modules(verifier)
    asked: list[tuple[str, tuple[int, ...]]] = []
    for kind, count in recipe.texts.items():
        if kind == "chat":
            prompts = _asked_by_itself(write, turns, count, recipe, progress)
        else:
            prompts = [turns.ask(question) for question in questions_of(kind, corpora[kind].train, count, rng)]
        fitting = [tokens for tokens in prompts if len(tokens) <= longest]
        if not fitting:
            raise UsageError(f"there is no question of kind {kind} that fits the verifier", "give more data")
        taken = [fitting[i] for i in rng.permutation(len(fitting))]
        asked += [(kind, taken[i % len(taken)]) for i in range(min(count, _MOST_FREQUENT * len(taken)))]
    temperatures = np.where(rng.random(len(asked)) < recipe.greedy, 0.0, 1.0)
    lengths = np.array([len(tokens) for _, tokens in asked])
    order = np.concatenate(similar_lengths(rng.permutation(len(asked)), lengths, recipe.rows, _SORTED, rng))
    tokens = [np.array(asked[i][1], np.uint32) for i in order]
    return {
        "tokens": np.concatenate(tokens),
        "lengths": lengths[order],
        "kinds": np.array([asked[i][0] for i in order]),
        "temperatures": temperatures[order].astype(np.float32),
    }


def _asked_by_itself(
    write: Write, turns: ChatTurns, count: int, recipe: TextRecipe, progress: Progress
) -> list[tuple[int, ...]]:
    """Return prompts of distinct questions that the verifier samples as the user's turn."""
    special = set(turns.tokenizer.all_special_ids)
    asked: dict[tuple[int, ...], None] = {}
    batches = -(-count * 5 // 4 // recipe.rows)  # a fifth is expected to be too long, or asked twice
    for batch in range(batches):
        if len(asked) >= count:
            break
        starts = [TextStart(turns.before, 1.0)] * recipe.rows
        texts = write(starts, turns.ends, recipe.question_tokens, recipe.seed + batch + 1)
        for text in split(texts.lengths, texts.tokens):
            question = text[len(turns.before) :].tolist()
            if question[-1] in turns.ends and len(question) > 5 and not special & set(question[:-1]):
                asked[turns.around(question[:-1])] = None
        progress("questions", batch + 1, batches, len(texts.tokens))
    return list(asked)[:count]


@torch.inference_mode()
def compute_states(  # noqa: PLR0913 - the options of a command
    verifier: VerifierModel, texts: Path, out: Path, hidden_states: tuple[str, ...], rows: int = 256,
    progress: Progress = lambda stage, done, of, tokens: None, limit: int | None = None,
) -> None:  # fmt: skip
    """Write the texts of a packed folder with their states into `out`, or continue to. Nothing is written again.

    limit: number of texts to take, the first ones; None takes all.
    Raises UsageError if `texts` is not such a folder or a hidden state is unknown. Raises TrainingError if `out` holds
    the states of other texts or of another verifier, or if the disk is full.
    """
    packed = Shards(texts).packed()
    decoder.check_hidden_states(hidden_states, verifier.layers)
    tokens = split(packed.array("lengths"), packed.array("tokens"))[:limit]
    check_written_by(texts, verifier.identity)
    _begin(out, {**load_facts(texts), "texts": len(tokens), "hidden_states": list(hidden_states), **FORM})
    shards = Shards(out)
    parts = [slice(i, i + rows) for i in range(0, len(tokens), rows)]
    for index, some in enumerate(parts):
        if index in shards:
            continue
        total = sum(map(len, tokens[some]))
        if not shards.fits(_bytes_of(total, len(hidden_states), verifier.hidden_size)):
            raise TrainingError(f"the disk of {out} is full", "free some space and give the same command again")
        about = {name: packed.array(name)[:limit][some] for name in ("lengths", "prompts", "kinds", "temperatures")}
        states = _states_of_texts(verifier.model, tokens[some], hidden_states)
        flat = np.concatenate(tokens[some]).astype(np.uint32)
        shards.add(index, {"tokens": flat, **about, **states})
        progress("states", index + 1, len(parts), total)


def _states_of_texts(model: Any, texts: Sequence[NDArray[Any]], names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Return the states of every token of texts, one after the other, computed in calls of similar lengths."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: list[Any] = [None] * len(texts)
    while order:
        most = max(1, _STATES_TOKENS // len(texts[order[-1]]))
        some, order = order[-most:], order[:-most]
        rows = [torch.from_numpy(texts[i].astype(np.int64)) for i in some]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        arrays = states_of_tokens(model, tokens, names).to_numpy()
        for row, index in enumerate(some):
            found[index] = {name: array[row, : len(texts[index])].copy() for name, array in arrays.items()}
    return {name: np.concatenate([states[name] for states in found]) for name in found[0]}


def written_tokens(shards: Shards) -> Counter[str]:
    """Return the number of tokens that the verifier wrote, by kind."""
    found: Counter[str] = Counter()
    for shard in shards:
        new = shard.array("lengths") - shard.array("prompts")
        for kind, tokens in zip(shard.array("kinds").tolist(), new.tolist(), strict=True):
            found[kind] += tokens
    return found
