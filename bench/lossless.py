"""The proof that a bundle's speculation loses nothing: texts token for token, and distributions by chi-square.

- At temperature 0, and above it with coupled sampling, every method writes plain decoding's tokens: with sizes of trees
  of its own, in branching trees, in chains, and in batches. Other seeds write other texts.
- With coupled sampling, so much is left to prove for plain decoding alone: noise draws tokens from the softmax.
- Rejection and block verification only keep the distribution, so each method's own draws are tested.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log, log10
from typing import Any

from redraft.bench.compare import PLAIN, Progress, Run
from redraft.bench.draws import Draws
from redraft.bench.prompts import BenchPrompt
from redraft.bench.summary import difference, margin_finder
from redraft.errors import UsageError
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers import ADAPTIVE
from redraft.runtime.drafters import split_pair
from redraft.runtime.params import BLOCK, COUPLED
from redraft.runtime.steps.exactness import measure_exactness

FALSE_ALARM = 1e-6
"""At most this is the probability that a lossless bundle fails."""
TREES, CHAINS = Budget(nodes=8, depth=3, width=3), Budget(nodes=3, depth=3, width=1)
DRAWN_TREES, DRAWN_PAIRS = Budget(nodes=4, depth=2, width=2), Budget(nodes=8, depth=2, width=4)
"""The trees of draws, and those of lookups merged with drafts. Two levels are enough for two tokens."""
BATCH = 3
"""Sequences at once, if the bundle allows more than one."""
_DRAWN_TOKENS = 64


def variants_of(method: str, slots: int) -> Iterator[tuple[str, SpeculationParams]]:
    """Yield the ways in which a method decodes all prompts, by name: with sizes by costs, in trees and in chains.

    slots: sequences at once. A fixed size leaves lookups out of a pair, so a pair has sizes by costs alone.
    """
    if method == PLAIN:
        if slots > 1:  # alone, it is what all are compared with
            yield "none", SpeculationParams(PLAIN)
        return
    yield "adaptive", SpeculationParams(method)
    if split_pair(method)[1] is not None:
        yield "adaptive trees", SpeculationParams(method, budget=TREES, controller=ADAPTIVE)
    else:
        yield "trees", SpeculationParams(method, budget=TREES)
        if slots == 1:
            yield "chains", SpeculationParams(method, budget=CHAINS)


@dataclass
class Proof:
    """A proof in two parts, so that only one runtime is open at a time: `alone`, then `together` if batches can be.

    token_ids:   of each prompt.
    methods:     all but plain decoding.   draws: by method.
    temperature: of the sampled part; with 0, only greedy texts are compared.   seed: the first one.
    """

    prompts: Sequence[BenchPrompt]
    token_ids: Sequence[Sequence[int]]
    methods: Sequence[str]
    temperature: float
    acceptance: str
    max_tokens: int
    draws: int
    seed: int
    progress: Progress
    _plain: dict[float, list[Generation]] = field(default_factory=dict)
    _seeds: dict[str, Any] | None = None
    _texts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _drawn: dict[str, dict[str, Any]] = field(default_factory=dict)

    def alone(self, runtime: Runtime) -> None:
        """Compare texts of one sequence at a time, and test distributions."""
        self.progress("plain decoding")
        coupled = self.acceptance == COUPLED  # then sampled texts must equal plain decoding's
        temperatures = (0.0, self.temperature) if self.temperature and coupled else (0.0,)
        self._plain = {each: runtime.generate(self.token_ids, self._params(each), PLAIN) for each in temperatures}
        self._compare_all(runtime, 1)
        if self.temperature:
            if coupled:
                self._seeds = self._compare_seeds(runtime)
            drawn = (PLAIN,) if coupled else self.methods
            for method in drawn:
                self._drawn[method] = self._test(runtime, method, FALSE_ALARM / len(drawn))

    def together(self, runtime: Runtime) -> None:
        """Compare texts that were decoded in batches."""
        self._compare_all(runtime, runtime.verifier.max_num_seqs)

    def result(self) -> dict[str, Any]:
        """Return what was compared, by method, and whether all holds, as a JSON object."""
        methods = {}
        for method, texts in self._texts.items():
            drawn = self._drawn.get(method)
            holds = all(text["holds"] for text in texts) and (drawn is None or drawn["holds"])
            methods[method] = {"holds": holds, "texts": texts, "distribution": drawn}
        return {
            "holds": all(one["holds"] for one in methods.values()) and (self._seeds is None or self._seeds["holds"]),
            "methods": methods,
            "seeds": self._seeds,
            "warnings": list(_warnings(methods, self._seeds)),
        }

    def _params(self, temperature: float, first: int = 0) -> list[SamplingParams]:
        """Return the parameters of every prompt. first: added to the seeds."""
        return [
            SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=seed, ignore_eos=True, logprobs=0)
            for seed in range(self.seed + first, self.seed + first + len(self.token_ids))
        ]

    def _compare_all(self, runtime: Runtime, slots: int) -> None:
        for method in (PLAIN, *self.methods):
            texts = self._texts.setdefault(method, [])
            for name, how in variants_of(method, slots):
                self.progress(f"texts of {method}, {name}, {slots} at a time")
                for temperature in self._plain:
                    compared = self._compare(runtime, name, how, temperature)
                    texts.append({"temperature": temperature, "trees": name, "max_num_seqs": slots, **compared})

    def _compare(self, runtime: Runtime, name: str, how: SpeculationParams, temperature: float) -> dict[str, Any]:
        """Return how a variant's texts differ from plain decoding's, and its drafts."""
        params = self._params(temperature)
        others = runtime.generate(self.token_ids, params, how)
        texts = zip(self.prompts, self.token_ids, params, self._plain[temperature], others, strict=True)
        compared = (
            difference(Run(prompt, ids, {PLAIN: plain, name: other}), name, margin_finder(runtime, one))
            for prompt, ids, one, plain, other in texts
        )
        differences = [each for each in compared if each]
        near = bool(differences) and all(one["near_tie"] for one in differences)
        return {
            "texts": len(others),
            "tokens": sum(len(one.token_ids) for one in others),
            "num_draft_tokens": sum(one.metrics.num_draft_tokens for one in others),
            "num_accepted_draft_tokens": sum(one.metrics.num_accepted_draft_tokens for one in others),
            "differences": differences,
            "holds": not differences or (near and not _is_exact(runtime)),
        }

    def _compare_seeds(self, runtime: Runtime) -> dict[str, Any]:
        """Compare the texts with those of other seeds.

        same_texts_log10: logarithm of the probability that other seeds write all the same texts.
        """
        plain = self._plain[self.temperature]
        others = runtime.generate(self.token_ids, self._params(self.temperature, len(plain)), PLAIN)
        differing = sum(one.token_ids != other.token_ids for one, other in zip(plain, others, strict=True))
        chance = sum(token.logprob for one in plain for token in one.logprobs or ()) / log(10)
        return {
            "texts": len(plain),
            "differing": differing,
            "same_texts_log10": chance,
            "holds": differing > 0 or chance > log10(FALSE_ALARM),
        }

    def _test(self, runtime: Runtime, method: str, level: float) -> dict[str, Any]:
        """Draw tokens by a method, and return the tests of their distribution.

        level: probability of a false alarm.   total_variation: the smallest bias of the next token that is found.
        """
        params = SamplingParams(
            max_tokens=_DRAWN_TOKENS, temperature=self.temperature, seed=self.seed, ignore_eos=True,
            acceptance=self.acceptance,
        )  # fmt: skip
        budget = CHAINS if self.acceptance == BLOCK else DRAWN_TREES if split_pair(method)[1] is None else DRAWN_PAIRS
        draws = Draws(method, params, budget, self.draws)
        drawn = draws.draw(runtime, self.token_ids, lambda line: self.progress(f"draws of {method}, {line}"))
        fits = drawn.fits()
        bound = level / max(len(fits), 1)
        return {
            "draws": drawn.draws,
            "trees": [str(kind) for kind in drawn.kinds],
            "num_draft_tokens": drawn.drafted,
            "num_accepted_draft_tokens": drawn.accepted,
            "tests": {name: {**vars(fit), "p_value": fit.p_value} for name, fit in fits.items()},
            "least_p_value": bound,
            "total_variation": fits["ranks"].detectable(bound) if fits else None,
            "holds": all(fit.p_value >= bound for fit in fits.values()),
        }


def _is_exact(runtime: Runtime) -> bool:
    """Return True if this machine promises exact texts, so that no near-tie excuses a difference."""
    return runtime.exact and measure_exactness(runtime.verifier).holds


def _warnings(methods: Mapping[str, Mapping[str, Any]], seeds: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what the proof does not show."""
    for method, one in methods.items():
        if method == PLAIN:
            continue
        parts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for text in one["texts"]:
            parts[f"texts at temperature {text['temperature']:g}"].append(text)
        drawn = one["distribution"]
        if drawn is not None and drawn["draws"]:
            parts["draws"] = [drawn]
        elif drawn is not None:
            yield f"{method}: no text of the prompts had a draft to draw from"
        for name, some in parts.items():
            drafted, accepted = drafts_of(some)
            if not accepted:
                yield (
                    f"{method}, {name}: none of {drafted} drafted tokens was accepted, so this proves nothing about "
                    "accepted drafts"
                )
    if seeds is not None and not seeds["differing"] and seeds["holds"]:
        yield "two seeds wrote the same texts, which this temperature makes likely: a higher one shows more"


def drafts_of(parts: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the drafted and the accepted tokens of several comparisons."""
    return sum(part["num_draft_tokens"] for part in parts), sum(part["num_accepted_draft_tokens"] for part in parts)


def check_methods(runtime: Runtime, method: str | None) -> tuple[str, ...]:
    """Return the methods to check, all of the bundle or one. Raises UsageError for an unknown one and for PLAIN."""
    drafting = tuple(one for one in runtime.methods if one != PLAIN)
    if method is None:
        return drafting
    if method not in drafting:
        raise UsageError(f"this bundle has no drafting method {method!r}", f"choose one of {', '.join(drafting)}")
    return (method,)
