"""The proof that a bundle's speculation loses nothing: texts token for token, and distributions by chi-square.

- At temperature 0, and above it with coupled sampling, every method writes plain decoding's tokens: with sizes of trees
  of its own, in branching trees, in chains, and in batches. Other seeds write other texts.
- With coupled sampling, so much is left to prove for plain decoding alone: noise draws tokens from the softmax.
- Rejection and block verification only keep the distribution, so each method's own draws are tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log, log10
from typing import Any

from redraft.bench.compare import PLAIN, Run
from redraft.bench.draws import draw
from redraft.bench.prompts import Prompt
from redraft.bench.summary import difference
from redraft.bench.turns import Report
from redraft.errors import UsageError
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers import ADAPTIVE
from redraft.runtime.drafters import split_pair
from redraft.runtime.exactness import measure_exactness
from redraft.runtime.params import BLOCK, COUPLED

FALSE_ALARM = 1e-6
"""At most this is the probability that a lossless bundle fails."""
TREES, CHAINS = Budget(nodes=8, depth=3, width=3), Budget(nodes=3, depth=3, width=1)
DRAWN_TREES, DRAWN_PAIRS = Budget(nodes=4, depth=2, width=2), Budget(nodes=8, depth=2, width=4)
"""The trees of draws, and those of lookups merged with drafts. Two levels are enough for two tokens."""
BATCH = 3
"""Sequences at once, if the bundle allows more than one."""
_DRAWN_TOKENS = 64

Ids = Sequence[int]


@dataclass(frozen=True)
class Proof:
    """What to prove.

    temperature: of the sampled part; with 0, only greedy texts are compared.   seed: the first one.
    methods:     all but plain decoding.   draws: by method.
    """

    methods: tuple[str, ...]
    temperature: float
    acceptance: str
    max_tokens: int
    draws: int
    seed: int

    @property
    def coupled(self) -> bool:
        """True if sampled texts must equal plain decoding's."""
        return self.acceptance == COUPLED

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures at which texts are compared."""
        return (0.0, self.temperature) if self.temperature and self.coupled else (0.0,)

    def params(self, temperature: float, number: int = 0) -> SamplingParams:
        """Return the parameters of a text's request."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=temperature,
            seed=self.seed + number,
            ignore_eos=True,
            logprobs=0,
        )


@dataclass(frozen=True)
class Way:
    """One way in which a method decodes all prompts. name: of the size of its trees.   slots: sequences at once."""

    name: str
    how: SpeculationParams
    slots: int


def ways_of(method: str, slots: int) -> Iterator[Way]:
    """Return the ways of a method: with sizes by costs, in trees and in chains. A fixed size leaves lookups out of a
    pair, so a pair has sizes by costs alone.
    """
    if method == PLAIN:  # alone, it is what all are compared with
        if slots > 1:
            yield Way("none", SpeculationParams(PLAIN), slots)
        return
    yield Way("adaptive", SpeculationParams(method), slots)
    if split_pair(method)[1] is not None:
        yield Way("adaptive trees", SpeculationParams(method, budget=TREES, controller=ADAPTIVE), slots)
        return
    yield Way("trees", SpeculationParams(method, budget=TREES), slots)
    if slots == 1:
        yield Way("chains", SpeculationParams(method, budget=CHAINS), slots)


class Check:
    """A proof in two parts, so that only one runtime is open at a time: `alone`, then `together` if batches can be."""

    def __init__(self, prompts: Sequence[Prompt], ids: Sequence[Ids], proof: Proof, report: Report) -> None:
        """ids: of each prompt."""
        self._prompts, self._ids, self._proof, self._report = prompts, ids, proof, report
        self._plain: dict[float, list[Generation]] = {}
        self._seeds: dict[str, Any] | None = None
        self._texts: dict[str, list[dict[str, Any]]] = {method: [] for method in (PLAIN, *proof.methods)}
        self._drawn: dict[str, dict[str, Any]] = {}

    def alone(self, runtime: Runtime) -> None:
        """Compare texts of one sequence at a time, and test distributions."""
        proof = self._proof
        self._report("plain decoding")
        plain = SpeculationParams(PLAIN)
        self._plain = {one: self._generations(runtime, one, plain) for one in proof.temperatures}
        self._compare_all(runtime, 1)
        if proof.temperature:
            if proof.coupled:
                self._seeds = self._compare_seeds(runtime)
            drawn = (PLAIN,) if proof.coupled else proof.methods
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

    def _generations(
        self, runtime: Runtime, temperature: float, how: SpeculationParams, first: int = 0
    ) -> list[Generation]:
        params = [self._proof.params(temperature, first + number) for number in range(len(self._ids))]
        return runtime.generate(self._ids, params, how)

    def _compare_all(self, runtime: Runtime, slots: int) -> None:
        for method, texts in self._texts.items():
            for way in ways_of(method, slots):
                self._report(f"texts of {method}, {way.name}, {slots} at a time")
                texts += [self._compare(runtime, way, temperature) for temperature in self._proof.temperatures]

    def _compare(self, runtime: Runtime, way: Way, temperature: float) -> dict[str, Any]:
        """Return how a way's texts differ from plain decoding's, and its drafts."""
        others = self._generations(runtime, temperature, way.how)
        differences = []
        for number, (plain, other) in enumerate(zip(self._plain[temperature], others, strict=True)):
            run = Run(self._prompts[number], self._ids[number], {PLAIN: plain, way.name: other})
            params = self._proof.params(temperature, number)
            found = difference(run, way.name, partial(_margin, runtime, params))
            differences += [found] if found else []
        near = bool(differences) and all(one["near_tie"] for one in differences)
        return {
            "temperature": temperature,
            "trees": way.name,
            "max_num_seqs": way.slots,
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
        temperature = self._proof.temperature
        plain = self._plain[temperature]
        others = self._generations(runtime, temperature, SpeculationParams(PLAIN), len(self._ids))
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
        proof = self._proof
        params = SamplingParams(
            max_tokens=_DRAWN_TOKENS, temperature=proof.temperature, seed=proof.seed, ignore_eos=True,
            acceptance=proof.acceptance,
        )  # fmt: skip

        def report(line: str) -> None:
            self._report(f"draws of {method}, {line}")

        found = draw(runtime, self._ids, params, method, _drawn_budget(method, proof.acceptance), proof.draws, report)
        fits = found.tally.fits() if found.draws else {}
        bound = level / max(len(fits), 1)
        return {
            "draws": found.draws,
            "trees": [str(kind) for kind in found.kinds],
            "num_draft_tokens": found.drafted,
            "num_accepted_draft_tokens": found.accepted,
            "tests": {name: {**vars(fit), "p_value": fit.p_value} for name, fit in fits.items()},
            "least_p_value": bound,
            "total_variation": fits["ranks"].detectable(bound) if fits else None,
            "holds": all(fit.p_value >= bound for fit in fits.values()),
        }


def _drawn_budget(method: str, acceptance: str) -> Budget:
    if acceptance == BLOCK:
        return CHAINS
    return DRAWN_TREES if split_pair(method)[1] is None else DRAWN_PAIRS


def _margin(runtime: Runtime, params: SamplingParams, run: Run, token: int) -> float | None:
    """Return the lead of a token's score in plain decoding, by decoding again; None past its end."""
    (again,) = runtime.generate([run.token_ids], params, PLAIN, record_logit_margins=True)
    margins = again.logit_margins or ()
    return margins[token] if token < len(margins) else None


def _is_exact(runtime: Runtime) -> bool:
    """Return True if this machine promises exact texts, so that no near-tie excuses a difference."""
    return runtime.exact and measure_exactness(runtime.verifier).holds


def _warnings(methods: Mapping[str, Mapping[str, Any]], seeds: Mapping[str, Any] | None) -> Iterator[str]:
    """Return what the proof does not show."""
    for method, found in methods.items():
        if method == PLAIN:
            continue
        drawn = found["distribution"]
        if drawn is not None and not drawn["draws"]:
            yield f"{method}: no text of the prompts had a draft to draw from"
        parts = [(text["temperature"], text) for text in found["texts"]]
        for temperature in dict.fromkeys(place for place, _ in parts):
            several = [part for place, part in parts if place == temperature]
            yield from _without_drafts(f"{method}, texts at temperature {temperature:g}", several)
        if drawn is not None and drawn["draws"]:
            yield from _without_drafts(f"{method}, draws", [drawn])
    if seeds is not None and not seeds["differing"] and seeds["holds"]:
        yield "two seeds wrote the same texts, which this temperature makes likely: a higher one shows more"


def drafts_of(parts: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the drafted and the accepted tokens of several comparisons."""
    return sum(part["num_draft_tokens"] for part in parts), sum(part["num_accepted_draft_tokens"] for part in parts)


def _without_drafts(what: str, parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    drafted, accepted = (
        sum(part[name] for part in parts) for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    if not accepted:
        yield f"{what}: none of {drafted} drafted tokens was accepted, so this proves nothing about accepted drafts"


def check_methods(runtime: Runtime, method: str | None) -> tuple[str, ...]:
    """Return the methods to check, all of the bundle or one. Raises UsageError for an unknown one and for PLAIN."""
    drafting = tuple(one for one in runtime.methods if one != PLAIN)
    if method is None:
        return drafting
    if method not in drafting:
        raise UsageError(f"this bundle has no drafting method {method!r}", f"choose one of {', '.join(drafting)}")
    return (method,)
