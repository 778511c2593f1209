"""Long prompts: what one costs the requests that run, what they cost it, and what a shared prefix saves.

Every repeat measures, for each method in turn:

    alone   a prompt of N tokens, while nothing else runs
    hit     its first half, whose rows are there, and a question        miss    the same prompt, whose rows are not
    full    steps of B requests that run, without prompts
    quiet   steps of B - 1 requests that run                            beside  the same, while the prompt of N arrives

Whatever is compared was measured in the same repeat, seconds apart. Figures are medians over repeats, and those of
ratios are medians of each repeat's ratio. Each prompt has a `cache_salt` of its own, so that only a hit finds rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from uuid import uuid4

from redraft.bench.compare import PLAIN, Progress, Settings, speculation
from redraft.bench.statistics import (
    FEWEST_VALUES,
    first_difference,
    interval_text,
    median_and_p99,
    median_interval,
    rate_text,
)
from redraft.errors import UsageError
from redraft.runtime import Generation, RequestError, Runtime, SamplingParams
from redraft.runtime.drafters.base import PREFIX_BLOCK
from redraft.runtime.loop.scheduler import RequestOutput

REPEATS = FEWEST_VALUES
"""Repeats of every measurement: enough for an interval."""
QUESTION = 16
"""Tokens after the shared prefix of a hit."""
ANSWER = 16
"""Tokens that a long prompt's request generates."""
FEWEST_TOKENS = 2 * PREFIX_BLOCK
"""The shortest long prompt: half of it is a block of shared rows."""
HEADER = ("batch", "method", "steady tokens/s", "over batch 1", "between outputs, ms", "beside a prompt, ms",
          "p99 over quiet p50", "prompt alone, ms", "beside, ms", "ratio", "hit, ms", "miss, ms", "ratio",
          )  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """One repeat of requests that run beside a long prompt. Times are in seconds.

    quiet, busy: times between outputs of each request before the prompt came, and until its first token.
    first_token: time to the prompt's first token.
    """

    quiet: Sequence[float]
    busy: Sequence[float]
    first_token: float


@dataclass(frozen=True)
class Repeat:
    """One repeat of one method. Times are in seconds.

    alone, hit, miss: time to the first token of these prompts.
    cached, shared:   tokens of the hit whose rows were there, and those that should have been, in whole blocks.
    same_text:        True if hit and miss have the same tokens.
    rate, between:    tokens a second of B requests that run, and times between outputs of each.
    beside:           None for a batch of 1.
    """

    alone: float
    hit: float
    miss: float
    cached: int
    shared: int
    same_text: bool
    rate: float
    between: Sequence[float]
    beside: Beside | None


class Running:
    """Requests that run together until the block ends, and the times of their outputs."""

    def __init__(self, submit: Callable[..., Any], prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """submit: `Runtime.submit` with the speculation to use.   params: of texts that do not end in the block."""
        self._submit, self._prompts, self._params = submit, prompts, params
        self._outputs: list[list[tuple[float, int]]] = [[] for _ in prompts]
        self._wanted, self._reached = 1, threading.Event()
        self._submissions: list[Any] = []

    def __enter__(self) -> Running:
        for prompt, own in zip(self._prompts, self._outputs, strict=True):
            self._submissions.append(
                self._submit(prompt, self._params, cache_salt=uuid4().hex, on_output=self._listener(own))
            )
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._submissions:
            one.abort()
        for one in self._submissions:
            one.ended()

    def steps(self, count: int) -> tuple[float, float]:
        """Wait until each has `count` outputs more. Returns the times of the last outputs before and after.

        Raises UsageError if one has ended, and RequestError if it failed.
        """
        begin = self._last()
        self._wanted = max(map(len, self._outputs)) + count
        self._wait()
        return begin, self._last()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the times between two outputs of a request that were between `begin` and `end` at least in part."""
        return [b - a for own in self._outputs for (a, _), (b, _) in pairwise(tuple(own)) if b > begin and a < end]

    def tokens(self, begin: float, end: float) -> int:
        """Return the tokens of all outputs after `begin`, until `end`."""
        return sum(tokens for own in self._outputs for at, tokens in tuple(own) if begin < at <= end)

    def check(self) -> None:
        """Raise UsageError if a request has ended, and RequestError if it failed."""
        ended = [one.generation for one in self._submissions if one.done()]
        if any(one.error for one in ended):
            raise RequestError(ended)
        if ended:
            raise UsageError(
                "a request that should run beside a long prompt has filled the context",
                "give a smaller --long-prompts or --max-new-tokens, or engines with a larger context",
            )

    def _last(self) -> float:
        return max(own[-1][0] for own in self._outputs)

    def _wait(self) -> None:
        self._reached.clear()
        while min(map(len, self._outputs)) < self._wanted:
            self.check()
            self._reached.wait()
            self._reached.clear()

    def _listener(self, own: list[tuple[float, int]]) -> Callable[[RequestOutput], None]:
        def heard(output: RequestOutput) -> None:
            """Note an output, in the loop's thread."""
            if output.token_ids:
                own.append((time.perf_counter(), len(output.token_ids)))
            if output.finish_reason is not None or min(map(len, self._outputs)) >= self._wanted:
                self._reached.set()

        return heard


def long_prompt(prompts: Sequence[Sequence[int]], tokens: int, first: int) -> list[int]:
    """Return the tokens of prompts one after another, from number `first` on and round to it.

    Raises UsageError if all together have fewer.
    """
    first %= len(prompts)
    joined = [token for prompt in (*prompts[first:], *prompts[:first]) for token in prompt]
    if len(joined) < tokens:
        raise UsageError(
            f"--long-prompts needs {tokens} tokens, and the prompts have {len(joined)} together",
            "give more prompts, or a smaller number",
        )
    return joined[:tokens]


def check_context(tokens: int, max_model_len: int) -> None:
    """Raise UsageError if a long prompt and its answer do not fit into the context."""
    if tokens + ANSWER > max_model_len:
        raise UsageError(
            f"--long-prompts {tokens}, with {ANSWER} tokens more, is longer than the context of {max_model_len}",
            f"give at most {max_model_len - ANSWER}, or build with a larger --max-model-len",
        )


def measure(
    runtime: Runtime, prompts: Sequence[Sequence[int]], methods: Sequence[str], settings: Settings, tokens: int,
    progress: Progress = lambda line: None,
) -> dict[str, list[Repeat]]:  # fmt: skip
    """Return the repeats of PLAIN and of every method, after a warm-up that is not counted.

    The batch size is the runtime's `max_num_seqs`.   prompts: token ids, at least one for each request that runs.
    tokens: of a long prompt.   Raises UsageError and RequestError.
    """
    batch, ways = runtime.verifier.max_num_seqs, list(dict.fromkeys((PLAIN, *methods)))
    for method in ways:
        progress(f"batch {batch}: warming up {method}")
        runtime.generate(prompts[:batch], settings.params, speculation(method, settings))
    repeats: dict[str, list[Repeat]] = {method: [] for method in ways}
    for number in range(REPEATS):
        first = number % len(ways)
        for method in ways[first:] + ways[:first]:
            progress(f"batch {batch}: long prompts, {number + 1} of {REPEATS}, {method}")
            repeats[method].append(_repeat(runtime, prompts, method, settings, tokens, number))
    return repeats


def _repeat(
    runtime: Runtime, prompts: Sequence[Sequence[int]], method: str, settings: Settings, tokens: int, number: int
) -> Repeat:
    batch, how = runtime.verifier.max_num_seqs, speculation(method, settings)
    params = replace(settings.params, max_tokens=ANSWER, ignore_eos=True)
    endless = replace(params, max_tokens=runtime.max_model_len)
    text = long_prompt(prompts, tokens, number)
    question = long_prompt(prompts, QUESTION, number + 1)
    runners = [prompts[(number + place) % len(prompts)] for place in range(batch)]

    def answer(prompt: Sequence[int], salt: str) -> Generation:
        return runtime.submit(prompt, params, how, cache_salt=salt).result()

    def running(count: int) -> Running:
        return Running(partial(runtime.submit, speculation=how), runners[:count], endless)

    salt = uuid4().hex
    alone = answer(text, salt)
    asked = [*text[: tokens // 2], *question]
    hit, miss = answer(asked, salt), answer(asked, uuid4().hex)
    with running(batch) as full:
        begin, end = full.steps(settings.params.max_tokens)
        rate, between = full.tokens(begin, end) / (end - begin), full.gaps(begin, end)
    beside = None
    if batch > 1:
        with running(batch - 1) as others:
            quiet = others.gaps(*others.steps(settings.params.max_tokens))
            begin = time.perf_counter()
            waited = _first_token(answer(text, uuid4().hex))
            others.check()
            beside = Beside(quiet, others.gaps(begin, begin + waited), waited)
    same = min(first_difference(asked, text) or 0, len(asked) - 1)
    return Repeat(
        alone=_first_token(alone), hit=_first_token(hit), miss=_first_token(miss), cached=hit.cached_tokens,
        shared=same - same % PREFIX_BLOCK, same_text=hit.token_ids == miss.token_ids, rate=rate, between=between,
        beside=beside,
    )  # fmt: skip


def _first_token(generation: Generation) -> float:
    return generation.metrics.time_to_first_token_ms / 1e3


def summarise(repeats: Mapping[str, Sequence[Repeat]]) -> dict[str, dict[str, Any]]:
    """Return figures by method."""
    return {method: _figures(own) for method, own in repeats.items()}


def _figures(repeats: Sequence[Repeat]) -> dict[str, Any]:
    def ms(seconds: Sequence[float]) -> float:
        return median(seconds) * 1e3

    rate, interval = median_interval([one.rate for one in repeats])
    figures = {
        "steady_tokens_per_second": rate,
        "steady_tokens_per_second_interval": interval,
        "time_between_outputs_ms": _between([one.between for one in repeats]),
        "prompt_alone_ms": ms([one.alone for one in repeats]),
        "hit_ms": ms([one.hit for one in repeats]),
        "miss_ms": ms([one.miss for one in repeats]),
        **_ratio("hit_ratio", [one.hit / one.miss for one in repeats]),
        "cached_tokens": min(one.cached for one in repeats),
        "shared_tokens": min(one.shared for one in repeats),
        "differing_hits": sum(not one.same_text for one in repeats),
        "repeats": len(repeats),
    }
    beside = [(one.beside, one.alone) for one in repeats if one.beside is not None]
    if not beside:
        return figures
    quiet, busy = [one.quiet for one, _ in beside], [one.busy for one, _ in beside]
    gaps = [median_and_p99(b)[1] / median_and_p99(q)[0] for q, b in zip(quiet, busy, strict=True)]
    return {
        **figures,
        "quiet_ms": _between(quiet),
        "beside_prompt_ms": _between(busy),
        **_ratio("gap_ratio", gaps),
        "prompt_beside_ms": ms([one.first_token for one, _ in beside]),
        **_ratio("prompt_ratio", [one.first_token / alone for one, alone in beside]),
    }


def _between(repeats: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return medians over repeats of each repeat's median and 99th percentile, in milliseconds."""
    p50, p99 = (median(values) * 1e3 for values in zip(*map(median_and_p99, repeats), strict=True))
    return {"p50": p50, "p99": p99}


def _ratio(name: str, ratios: Sequence[float]) -> dict[str, Any]:
    middle, interval = median_interval(ratios)
    return {name: middle, f"{name}_interval": interval}


def table(batches: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Return a table of the figures by batch size and method, the header first. Latencies are medians / p99."""
    rows = [[*HEADER]]
    for batch, methods in batches.items():
        for method, each in methods.items():
            single = batches.get("1", {}).get(method)
            over = "-" if single is None else f"{_rate(each) / _rate(single):.2f}"
            rows.append([batch, method, rate_text(_rate(each)), over, *_cells(each)])
    return rows


def _rate(figures: Mapping[str, Any]) -> float:
    rate: float = figures["steady_tokens_per_second"]
    return rate


def _cells(figures: Mapping[str, Any]) -> list[str]:
    beside = ["-"] * 5
    if "quiet_ms" in figures:
        quiet, busy = ("{p50:.0f} / {p99:.0f}".format(**figures[key]) for key in ("quiet_ms", "beside_prompt_ms"))
        beside = [quiet, busy, _ratio_cell(figures, "gap_ratio"), f"{figures['prompt_beside_ms']:.0f}",
                  _ratio_cell(figures, "prompt_ratio")]  # fmt: skip
    else:
        beside[0] = "{p50:.0f} / {p99:.0f}".format(**figures["time_between_outputs_ms"])
    return [
        *beside[:3], f"{figures['prompt_alone_ms']:.0f}", *beside[3:], f"{figures['hit_ms']:.0f}",
        f"{figures['miss_ms']:.0f}", _ratio_cell(figures, "hit_ratio"),
    ]  # fmt: skip


def _ratio_cell(figures: Mapping[str, Any], name: str) -> str:
    interval = figures[f"{name}_interval"]
    return f"{figures[name]:.2f}" + (f" ({interval_text(interval)})" if interval else "")


def warnings(batch: str, method: str, figures: Mapping[str, Any]) -> list[str]:
    """Return warnings of hits without all of the rows, and of hits whose text differs from the miss's."""
    found, name = [], f"batch {batch}, {method}"
    if figures["cached_tokens"] < figures["shared_tokens"]:
        found.append(f"{name}: a hit found {figures['cached_tokens']} of {figures['shared_tokens']} shared tokens")
    if figures["differing_hits"]:
        found.append(f"DIFFERENT: {name}: {figures['differing_hits']} of {figures['repeats']} hits")
    return found
