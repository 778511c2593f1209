"""The state of one request while it runs: its tokens, how far the KV buffers are filled, and when it stops."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from redraft.errors import RedraftError
from redraft.runtime.observe.metrics import Clock, Counters
from redraft.runtime.sampling.noise import NO_NOISE, DraftNoise
from redraft.runtime.sampling.sampler import Sampler
from redraft.runtime.text.tokenizer import Detokenizer
from redraft.runtime.trees.offers import Speculation
from redraft.types import Outcome, Tree

FinishReason = Literal["stop", "length", "error"]


@dataclass(eq=False, slots=True)
class Request:
    """One request.

    tokens:         prompt and committed tokens; the KV of the last is not computed yet.
    prompt_length:  number of prompt tokens.
    limit:          largest length of `tokens`: the prompt and max_tokens, or the context.
    stop_tokens:    end-of-sequence ids; `tokens` includes the one that ends the text.
    text:           the text so far, for streams and stop strings; otherwise None.
    cache_len:      valid rows of this sequence in the KV buffers.
    finish_reason:  None while it runs.   error: why it failed, if that is the reason.
    noise:          of its drafts' candidates, by its sampling parameters.
    speculation:    how it drafts; the cycle sets its default if a request has none.
    drafting:       state of each drafter.   control: state of the controller.
    tenant:         requests of the same tenant may share their outputs; None shares with nobody.
    started, first_token: seconds when it was admitted, and when its first token was committed.
    """

    tokens: list[int]
    prompt_length: int
    limit: int
    stop_tokens: frozenset[int]
    sampler: Sampler
    text: Detokenizer | None = None
    noise: DraftNoise = NO_NOISE
    cache_len: int = 0
    finish_reason: FinishReason | None = None
    error: RedraftError | None = None
    speculation: Speculation = None  # type: ignore[assignment]  # until it is admitted
    drafting: dict[object, Any] = field(default_factory=dict)
    control: Any = None
    tenant: str | None = None
    counters: Counters = field(default_factory=Counters)
    began: Clock = field(default_factory=Clock)
    ended: Clock = field(default_factory=Clock)
    started: float = 0.0
    first_token: float = 0.0

    @property
    def new_tokens(self) -> list[int]:
        """The committed tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - len(self.tokens)

    def begin(self, outcome: Outcome, clock: Clock) -> None:
        """Commit the token after the prompt."""
        self.cache_len = self.prompt_length
        self._append(outcome)
        self.first_token = time.perf_counter()
        self.began = clock.copy()

    def commit(self, tree: Tree, outcome: Outcome) -> None:
        """Add a step's tokens, cut after the first that ends the text. KV rows of root and path are now valid."""
        self.cache_len += 1 + len(outcome.path)
        kept = self._append(outcome)
        self.counters.count(len(tree) - 1, min(kept, len(outcome.path)))

    def _append(self, outcome: Outcome) -> int:
        """Add tokens until one ends the text, or the request fails after them. Returns the number added."""
        for count, token in enumerate(outcome.tokens, 1):
            self.tokens.append(token)
            stopped = token in self.stop_tokens or (self.text is not None and self.text.push(token))
            if stopped:
                self.finish_reason = "stop"
                return count
            if len(self.tokens) >= self.limit:
                self.finish_reason = "length"
                return count
        if outcome.error is not None:
            self.finish_reason, self.error = "error", outcome.error
        return len(outcome.tokens)
