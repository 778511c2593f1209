"""redraft as a decoder: plain, with n-grams, by a draft model, and by the bundle's default method."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from redraft.bench.compare import Settings, checked
from redraft.bench.load import Traffic
from redraft.bench.peers.base import DRAFT, NGRAM, PLAIN, Asked, Continued, Decoded, PeerError, PeerModel
from redraft.engines import open_bundle
from redraft.methods import NONE, checkpoint_method
from redraft.runtime import Runtime, SamplingParams

NAME = "redraft"


class Ours:
    """An open bundle with redraft's own defaults."""

    def __init__(self, model: PeerModel) -> None:
        self._runtime = Runtime.open(model.path, threads=model.threads)
        default = self._runtime.default_method
        self._methods = {PLAIN: NONE, NGRAM: NGRAM}
        if model.draft is not None:
            self._methods[DRAFT] = draft_model_of(model.path)
        if default not in self._methods.values():
            self._methods[default] = default
        self.modes = tuple(self._methods)
        self.settings = {"bundle": str(model.path), "threads": model.threads, "exact": self._runtime.exact}

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """See `Decoder.decode`."""
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        times: list[tuple[float, int]] = []
        self._runtime.forget_prefixes()
        submission = self._runtime.submit(
            list(token_ids), params, self._methods[mode],
            on_output=lambda output: times.append((time.perf_counter(), len(output.token_ids))),
        )  # fmt: skip
        done = checked(submission.result())
        (first, together), (last, _) = times[0], times[-1]
        after_first, later = len(done.token_ids) - 1, len(done.token_ids) - together
        if not later:
            return Decoded(done.token_ids, after_first / done.metrics.decode_tokens_per_second)
        return Decoded(done.token_ids, (last - first) * after_first / later)  # the first step's tokens come together


class OursUnderLoad:
    """A bundle that was opened for several requests at once: plain, and by its default method."""

    def __init__(self, model: PeerModel) -> None:
        self._clients = model.max_num_seqs
        self._runtime = Runtime.open(model.path, threads=model.threads, max_num_seqs=self._clients)
        self._methods = {PLAIN: NONE, self._runtime.default_method: self._runtime.default_method}
        for method in self._methods.values():
            self._runtime.warm(method)
        self.modes = tuple(self._methods)
        self.settings = {"bundle": str(model.path), "threads": model.threads, "exact": self._runtime.exact}

    def decode(self, mode: str, asked: Sequence[Asked]) -> list[Continued]:
        """See `Server.decode`. Raises RequestError if requests failed."""
        prompts, limits = [one.token_ids for one in asked], [one.count for one in asked]
        settings = Settings(SamplingParams(ignore_eos=True))
        block = Traffic(self._runtime, prompts, self._methods[mode], settings, limits).run(
            range(len(asked)), self._clients
        )
        in_order = sorted(block.served, key=lambda one: one.prompt)
        return [Continued(one.submitted, len(one.answer), one.outputs) for one in in_order]


def draft_model_of(bundle: Path) -> str:
    """Return the id of a bundle's draft model. Raises PeerError if it has none."""
    drafters = open_bundle(bundle).manifest.drafters
    found = next((name for name, drafter in drafters.items() if drafter.method == checkpoint_method()), None)
    if found is None:
        raise PeerError(f"{bundle} has no draft model", "build it with --drafter ID=CHECKPOINT")
    return found
