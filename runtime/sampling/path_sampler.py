"""Coupled sampling: the token after a position is the argmax of score + noise, with the position's own noise.

That is a draw from the softmax of the scores (Gumbel-max trick), and a function of the request's seed and the logits
alone. So the tokens are the same whatever was drafted, and a drafter that adds the same noise to its own logits often
drafts the very token ("drafter-invariant" decoding by Gumbel sampling, Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.params import LEAST_TEMPERATURE, SamplingParams
from redraft.runtime.sampling.noise import HashArray, all_ids, gumbel, hashes, largest_hash, noise_of, row_key
from redraft.runtime.sampling.processors import Processor
from redraft.runtime.sampling.sampler import Sampler, at_token, top_two_margins
from redraft.runtime.sampling.truncation import Support, support_of, token_logprobs
from redraft.runtime.trees.tree import layout
from redraft.types import NOT_REACHED, FloatArray, Outcome, Tree

_NEAR = 6.0
"""Tokens with scores above minus this are compared first, the others only if their noise can make up for it."""
_FEW = 4096
"""For so many tokens, the noise of all is computed at once."""


def choose(support: Support, seed: int | None, position: int) -> int:
    """Return the place in `support` of the token at an absolute position: the largest score + noise of the seed.

    Without a seed it is the largest score. Of equal ones it is the first.
    """
    scores = support.scores
    if seed is None or len(scores) <= _FEW:
        return int(perturbed(support, seed, position).argmax())
    found = hashes(row_key(seed, position), _ids(support))
    near = scores > -_NEAR
    best = (scores[near] + gumbel(found[near])).max()
    # All other scores are lower than the largest, 0, by _NEAR or more.
    places = np.flatnonzero(near | (found <= np.uint32(largest_hash(float(best) + _NEAR))))
    return int(places[(scores[places] + gumbel(found[places])).argmax()])


def perturbed(support: Support, seed: int | None, position: int) -> FloatArray:
    """Return score + noise of the seed at this position, float32[n]; the scores without a seed."""
    if seed is None:
        return support.scores
    return support.scores + noise_of(row_key(seed, position), _ids(support))


def _ids(support: Support) -> HashArray:
    return all_ids(len(support.scores)) if support.ids is None else support.ids.astype(np.uint32)


class PathSampler(Sampler):
    """Goes from the root to the child that equals its target token, and so on, with the processors' states.

    It computes tokens only along the accepted path, so its cost is that of the accepted rows.

    Every visited node is committed, so one state is enough: it covers the tokens up to the last visited node.
    If requested, `logit_margins` records the lead of each token's score over the second largest, noise included, and
    `logprobs` the log probabilities.
    """

    def __init__(
        self, params: SamplingParams, processors: Sequence[Processor] = (), record_logit_margins: bool = False
    ) -> None:
        self._params = params
        self._processors = processors
        self._seed = params.seed if params.temperature else None
        self._states: list[Any] = []
        self._length = self._prompt_length = 0
        self.logit_margins = [] if record_logit_margins else None
        self.logprobs = None if params.logprobs is None else []
        whole = not (params.top_k or params.top_p < 1 or params.min_p or processors)
        if (
            type(self) is PathSampler
            and whole
            and params.temperature
            and self.logprobs is None
            and self.logit_margins is None
        ):
            self.device_temperature = max(params.temperature, LEAST_TEMPERATURE)

    def resume(self, prompt: Sequence[int]) -> None:
        self._advance(prompt)

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Choose and accept tokens down the tree. If that fails at a node, the outcome has the error."""
        ids, parents = tree.tokens.tolist(), tree.parents.tolist()
        targets = self._guesses(logits, tree, len(tokens))
        path: list[int] = []
        found: list[int] = []
        fresh: Iterable[int] = tokens[self._length :]
        node: int | None = 0
        while node is not None:
            try:
                self._advance(fresh)
                target = self._token(logits[node].copy())
            except UsageError as error:
                return Outcome(targets, tuple(path), NOT_REACHED, tuple(found), self._failure(error))
            targets[node] = target
            found.append(target)
            node = next((n for n in range(node + 1, len(ids)) if parents[n] == node and ids[n] == target), None)
            if node is not None:
                path.append(node)
                fresh = (target,)
        return Outcome(targets, tuple(path), found[-1], tuple(found))

    def _guesses(self, logits: FloatArray, tree: Tree, length: int) -> list[int]:
        """Return the target tokens of pinned nodes without processors, and NOT_REACHED for all others.

        length: number of committed tokens.
        """
        targets = [NOT_REACHED] * len(tree)
        if tree.pinned is not None:
            depths = layout(tree.parents).depths
            for node in np.flatnonzero(tree.pinned).tolist():
                with suppress(UsageError):  # no token can follow it
                    support = support_of(logits[node].copy(), self._params)
                    targets[node] = support.token(choose(support, self._seed, length + int(depths[node])))
        return targets

    def _advance(self, fresh: Iterable[int]) -> None:
        """Move the states past these tokens. The first are the prompt."""
        if not self._length:
            prompt = list(fresh)
            self._length = self._prompt_length = len(prompt)
            self._states = [processor.begin(prompt) for processor in self._processors]
            return
        for token in fresh:
            self._length += 1
            pairs = zip(self._processors, self._states, strict=True)
            self._states = [processor.advance(state, token) for processor, state in pairs]

    def _token(self, row: FloatArray) -> int:
        """Return the token after the tokens of the states, and record what was requested."""
        for processor, state in zip(self._processors, self._states, strict=True):
            row = processor.process(state, row)
        support = support_of(row, self._params)
        place = choose(support, self._seed, self._length)
        self._record(support, place)
        return support.token(place)

    def _record(self, support: Support, place: int) -> None:
        if self.logit_margins is not None:
            self.logit_margins += top_two_margins(perturbed(support, self._seed, self._length)[None])
        if self.logprobs is not None:
            assert self._params.logprobs is not None
            self.logprobs.append(token_logprobs(support, place, self._params.logprobs))

    def _failure(self, error: UsageError) -> UsageError:
        """Return the error with the number of the token at which it happened."""
        return at_token(self._length - self._prompt_length + 1, error)
