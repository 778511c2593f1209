"""Speed of suffix decoding and predicted outputs, on texts that repeat and texts that do not.

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

import keyword
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from redraft.bench.command import bundle_parser, run
from redraft.bench.compare import Flips, timing
from redraft.bench.environment import environment
from redraft.bench.prompts import BenchPrompt, load_prompts
from redraft.bench.statistics import speedup
from redraft.runtime import Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.conversation import Conversation

STORE = {"suffix": {"suffix_decoding_max_cached_requests": 10_000}}
LEAST_TOKENS = 16
"""Shorter outputs are not timed."""
OCCURRENCES = 3
_SHARED = SpeculationParams("suffix", tenant="all questions")
_UNCHANGED = SpeculationParams("suffix", tenant="the unchanged question")

Pair = tuple[Generation, Generation]
"""Plain decoding, and the method."""


def main() -> dict[str, Any]:
    """See the module."""
    parser = bundle_parser(__doc__, max_new_tokens=128, limit=8)
    parser.add_argument("--chat", action="store_true", help="through the bundle's chat template")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    pairs: defaultdict[str, defaultdict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    with Runtime.open(options.engines, threads=options.threads, drafter_options=STORE) as runtime:
        params = SamplingParams(max_tokens=options.max_new_tokens)

        def decode(text: str, how: SpeculationParams | str = "none") -> Generation:
            ids = Conversation(runtime).ask(text) if options.chat else runtime.encode(text)
            return runtime.generate([ids], params, how)[0]

        prompts = load_prompts(options.prompts, options.limit)
        decode(prompts[0].text)  # warms up
        other, flips = "", Flips()
        for number, prompt in enumerate(prompts, 1):
            text = decode(prompt.text).text
            runtime.forget(str(_UNCHANGED.tenant))
            decode(prompt.text, _UNCHANGED)
            for name, question, how in _cases(prompt, text, other):
                order = flips.order((prompt.kind, name), ("none", how))
                found = {one: decode(question, one) for one in order}
                if len(found["none"].token_ids) >= LEAST_TOKENS:
                    for kind in (prompt.kind, "all"):
                        pairs[kind][name].append((found["none"], found[how]))
            other = text or other
            print(f"{number} of {len(prompts)}", file=sys.stderr, flush=True)
    return {
        "environment": environment(options.threads),
        "prompts": Counter(prompt.kind for prompt in prompts),
        "cases": {kind: {name: _figures(some) for name, some in named.items()} for kind, named in pairs.items()},
    }


def _figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    plain, found = ([timing(one) for one in side] for side in zip(*pairs, strict=True))
    ratio = speedup(plain, found)
    steps = [(len(one.token_ids) - 1) / one.metrics.num_steps for _, one in pairs]
    return {
        "pairs": ratio.count,
        "speedup": round(ratio.ratio, 3),
        "speedup_interval": ratio.interval,
        "least": round(min(speedup([a], [b]).ratio for a, b in zip(plain, found, strict=True)), 3),
        "tokens_per_step": round(median(steps), 2),
        "identical_to_plain": all(one.token_ids == other.token_ids for one, other in pairs),
    }


def _cases(prompt: BenchPrompt, text: str, other: str) -> Iterator[tuple[str, str, SpeculationParams | str]]:
    """Yield name, prompt and way to speculate. `text` is the plain output, `other` that of another prompt."""
    question = prompt.text
    yield "own text", question, "suffix"
    yield "first", question, _SHARED
    yield "again", question, _SHARED
    yield "thanks", f"{question} Thank you.", _SHARED
    yield "please", f"Please help me. {question}", _SHARED
    if words := [word for word in re.findall(r"[A-Za-z]{5,}", question) if question.count(word) == 1]:
        yield "word", question.replace(words[-1], "something"), _UNCHANGED
    identifiers = [word for word in re.findall(r"\b[A-Za-z_]{3,}\b", text) if not keyword.iskeyword(word)]
    for word, count in Counter(identifiers).most_common(1):
        if count >= OCCURRENCES:
            renamed = re.sub(rf"\b{word}\b", "renamed_value", text)
            yield "renamed", question, SpeculationParams("ngram", renamed)
    if other:
        yield "unrelated", question, SpeculationParams("ngram", other)


if __name__ == "__main__":
    run(main)
