"""How much suffix decoding and predicted outputs bring, when texts repeat and when they do not.

    python -m experiments.lookups --engines build/engines/smollm2 --prompts humaneval.jsonl mt_bench.jsonl --chat

Every case is timed in a pair with plain decoding of the same prompt, in an order that flips. Greedy, the first turn.

first:      suffix decoding of a question that is new to the store.   own text: without a store.
again, thanks, please: the same question with all earlier outputs in the store: unchanged, with "Thank you." at its end,
            with "Please help me." at its beginning.
word:       the question with one word replaced, when the store has only the output of the unchanged question.
            Questions without a word of over four letters that occurs once are left out.
renamed:    the prediction is the model's own text, in which the commonest identifier is replaced. Outputs without an
            identifier that occurs three times are left out.
unrelated:  the prediction is the output of another prompt.

Prints one JSON object: the number of prompts by kind and, by kind and case, pairs, speedup and the least of a pair,
tokens a step, and whether all texts are equal.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from redraft.bench.command import bundle_parser, run
from redraft.bench.compare import Flips, timing
from redraft.bench.environment import environment
from redraft.bench.prompts import BenchPrompt, load_prompts
from redraft.bench.statistics import Timing, speedup
from redraft.runtime import Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.conversation import Conversation

STORE = {"suffix": {"suffix_decoding_max_cached_requests": 10_000}}
LEAST_TOKENS = 16
"""Shorter outputs are not timed."""
OCCURRENCES = 3
_SHARED = SpeculationParams("suffix", tenant="all questions")
_UNCHANGED = SpeculationParams("suffix", tenant="the unchanged question")


@dataclass
class Case:
    """Pairs of one case: times of plain decoding and of the method, tokens a step, and equality of texts."""

    plain: list[Timing] = field(default_factory=list)
    found: list[Timing] = field(default_factory=list)
    tokens_per_step: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)

    def add(self, plain: Generation, found: Generation) -> None:
        """Add one pair."""
        self.equal.append(plain.token_ids == found.token_ids)
        self.plain.append(timing(plain))
        self.found.append(timing(found))
        self.tokens_per_step.append((len(found.token_ids) - 1) / found.metrics.num_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        ratio = speedup(self.plain, self.found)
        return {
            "pairs": ratio.count,
            "speedup": round(ratio.ratio, 3),
            "speedup_interval": ratio.interval,
            "least": round(min(speedup([a], [b]).ratio for a, b in zip(self.plain, self.found, strict=True)), 3),
            "tokens_per_step": round(median(self.tokens_per_step), 2),
            "identical_to_plain": all(self.equal),
        }


def main() -> dict[str, Any]:
    """See the module."""
    options = _options()
    cases: defaultdict[str, defaultdict[str, Case]] = defaultdict(lambda: defaultdict(Case))
    with Runtime.open(options.engines, threads=options.threads, drafter_options=STORE) as runtime:
        params = SamplingParams(max_tokens=options.max_new_tokens)
        prompts = load_prompts(options.prompts, options.limit)
        runtime.generate([_ids(runtime, prompts[0].text, options.chat)], params, "none")
        other, flips = "", Flips()
        for number, prompt in enumerate(prompts):
            text = _continued(runtime, prompt, options.chat, params)
            runtime.forget(str(_UNCHANGED.tenant))
            runtime.generate([_ids(runtime, prompt.text, options.chat)], params, _UNCHANGED)
            for name, question, how in _cases(prompt, text, other):
                ids = _ids(runtime, question, options.chat)
                order = flips.order((prompt.kind, name), ("none", how))
                found = {one: runtime.generate([ids], params, one)[0] for one in order}
                if len(found["none"].token_ids) >= LEAST_TOKENS:
                    for kind in (prompt.kind, "all"):
                        cases[kind][name].add(found["none"], found[how])
            other = text or other
            print(f"{number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    figures = {kind: {name: case.to_json() for name, case in named.items()} for kind, named in cases.items()}
    return {
        "environment": environment(options.threads),
        "prompts": Counter(prompt.kind for prompt in prompts),
        "cases": figures,
    }


def _cases(prompt: BenchPrompt, text: str, other: str) -> Iterator[tuple[str, str, SpeculationParams | str]]:
    """Yield name, prompt and way to speculate. `text` is the plain output, `other` that of another prompt."""
    question = prompt.text
    yield "own text", question, "suffix"
    yield "first", question, _SHARED
    yield "again", question, _SHARED
    yield "thanks", f"{question} Thank you.", _SHARED
    yield "please", f"Please help me. {question}", _SHARED
    if replaced := _one_word_replaced(question):
        yield "word", replaced, _UNCHANGED
    if renamed := _renamed(text):
        yield "renamed", question, SpeculationParams("ngram", renamed)
    if other:
        yield "unrelated", question, SpeculationParams("ngram", other)


def _one_word_replaced(question: str) -> str:
    """Replace the last word of over four letters that occurs once. Empty if no word does."""
    words = [word for word in re.findall(r"[A-Za-z]{5,}", question) if question.count(word) == 1]
    return question.replace(words[-1], "something") if words else ""


def _renamed(text: str) -> str:
    """Replace the commonest identifier of a text. Empty if none occurs three times."""
    words = Counter(word for word in re.findall(r"\b[A-Za-z_]{3,}\b", text) if not keyword.iskeyword(word))
    word, count = words.most_common(1)[0] if words else ("", 0)
    return re.sub(rf"\b{word}\b", "renamed_value", text) if count >= OCCURRENCES else ""


def _continued(runtime: Runtime, prompt: BenchPrompt, chat: bool, params: SamplingParams) -> str:
    """The plain output."""
    return runtime.generate([_ids(runtime, prompt.text, chat)], params, "none")[0].text


def _ids(runtime: Runtime, text: str, chat: bool) -> list[int]:
    return Conversation(runtime).ask(text) if chat else runtime.encode(text)


def _options() -> argparse.Namespace:
    parser = bundle_parser(__doc__, max_new_tokens=128, limit=8)
    parser.add_argument("--chat", action="store_true", help="through the bundle's chat template")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
