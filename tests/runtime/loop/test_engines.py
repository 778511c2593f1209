"""Random schedules over real engines: each request has the tokens and log-probabilities that it has alone."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from redraft.names import Precision
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.submission import Submission
from tests.conftest import Once
from tests.runtime.lyanna_bundle import FULL, write_lyanna_bundle

HOWS = (
    "none", "ngram", "suffix", "lookahead", "lyanna", "ngram+lyanna", SpeculationParams("lyanna", budget=FULL),
    SpeculationParams("lyanna", budget=Budget(3, 3, 1)), SpeculationParams("ngram", prediction=[5, 6, 7] * 10),
)  # fmt: skip
SCHEDULES, MOST_REQUESTS, JOBS = 120, 7, 60
Job = tuple[list[int], SamplingParams]


def jobs(rng: random.Random, count: int) -> list[Job]:
    """Return prompts, which often begin alike, and parameters."""
    bases = [[rng.randrange(3, 13) for _ in range(rng.randrange(1, 60))] for _ in range(6)]
    found = []
    for _ in range(count):
        base = rng.choice(bases)
        prompt = base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(3, 13) for _ in range(rng.randrange(5))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 36), temperature=rng.choice([0, 0.8]), seed=rng.randrange(3), logprobs=1,
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        )  # fmt: skip
        found.append((prompt, params))
    return found


class Schedule:
    """Requests that join, and are aborted, after a random number of outputs of the others. Use it once."""

    def __init__(self, runtime: Runtime, jobs: list[Job], rng: random.Random) -> None:
        self._runtime, self._jobs, self._rng = runtime, jobs, rng
        self._left = rng.randrange(2, MOST_REQUESTS + 1)
        self._joins = sorted(rng.randrange(20) for _ in range(self._left - 1))
        self._aborts: list[tuple[int, Submission]] = []
        self._outputs = 0
        self._ended = threading.Event()
        self.submitted: list[tuple[int, Submission]] = []
        """Each with its job's number."""

    def run(self) -> list[tuple[int, Generation]]:
        """Return the results, with the numbers of their jobs."""
        self._join()
        assert self._ended.wait(120), "requests have not ended"
        return [(number, one.result(120)) for number, one in self.submitted]

    def _join(self) -> None:
        rng, number = self._rng, self._rng.randrange(len(self._jobs))
        prompt, params = self._jobs[number]
        salt, aborted = rng.choice([None] * 9 + ["other"]), rng.random() < 0.2
        due = self._outputs + rng.randrange(12)
        one = self._runtime.submit(
            prompt, params, rng.choice(HOWS), priority=rng.randrange(3), tenant=rng.choice("ab"), cache_salt=salt,
            on_output=self._heard,
        )  # fmt: skip
        self.submitted.append((number, one))
        if aborted:
            self._aborts.append((due, one))

    def _heard(self, output: RequestOutput) -> None:
        """Let what is due happen, in the loop's thread. If a request ends and none is there, the next one joins."""
        self._outputs += 1
        if output.finish_reason is not None:
            self._left -= 1
        for due, one in self._aborts:
            if self._outputs >= due:
                one.abort()
        while self._joins and (self._outputs >= self._joins[0] or self._left == len(self._joins)):
            self._joins.pop(0)
            self._join()
        if not self._left:
            self._ended.set()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_request_of_any_schedule_is_the_one_alone(
    once: Once, lyanna_bundle: Path, unmeasured: None, precision: Precision
) -> None:
    path = lyanna_bundle if precision == "fp32" else once(write_lyanna_bundle, precision=precision) / "engines"
    rng = random.Random(precision)
    asked = jobs(rng, JOBS)
    with Runtime.open(path, threads=1, verify=False, prefix_slots=0) as runtime:
        expected = []
        for prompt, params in asked:
            runtime.forget_prefixes()
            expected += runtime.generate([prompt], params, "none")
    generations: list[Generation] = []
    with Runtime.open(path, threads=1, max_num_seqs=3, verify=False) as runtime:
        for how in HOWS:
            runtime.warm(how if isinstance(how, str) else how.method)
        for number in range(SCHEDULES):
            if rng.random() < 0.1:
                runtime.forget_prefixes()
            results = Schedule(runtime, asked, rng).run()
            for job, one in results:
                own, count = expected[job], len(one.token_ids)
                assert one.token_ids == own.token_ids[:count], f"schedule {number}"
                assert one.logprobs == own.logprobs[:count], f"schedule {number}"
                assert one.finish_reason in ("abort", own.finish_reason)
                assert one.finish_reason == "abort" or count == len(own.token_ids)
            generations += [one for _, one in results]
        assert (runtime.health.requests, runtime.health.error) == (0, None)
    assert sum(one.finish_reason == "abort" for one in generations) > 10
    assert sum(one.cached_tokens > 0 for one in generations) > 20
    assert sum(one.metrics.num_accepted_draft_tokens for one in generations) > 200
