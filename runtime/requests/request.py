"""The state of one request while it runs: its tokens, how far the KV buffers are filled, and when it stops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from redraft.errors import RedraftError, UsageError
from redraft.runtime.observe.metrics import Clock, Counters
from redraft.runtime.sampling.noise import NO_NOISE, DraftNoise
from redraft.runtime.sampling.sampler import Sampler
from redraft.runtime.text.tokenizer import Detokenizer
from redraft.runtime.trees.offers import Speculation
from redraft.types import NOT_REACHED, FloatArray, Outcome, Tree

_LOG = logging.getLogger("redraft.runtime")
FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(eq=False, slots=True)
class Request:
    """One request, with all of its state.

    There are no phases: rows of tokens that are not computed yet are computed, in chunks. The last token is the root of
    the next tree. So a request decodes as soon as all rows but the root's are computed.

    tokens:         prompt and committed tokens.
    prompt_length:  number of prompt tokens.
    resumed:        number of committed tokens that it began with (`resume`).
    limit:          largest length of `tokens`: the prompt and max_tokens, or the context.
    stop_tokens:    end-of-sequence ids; `tokens` includes the one that ends the text.
    text:           the text so far, if it has stop strings or keeps special tokens; otherwise None.
    num_computed_tokens: tokens whose rows are in the KV buffers; their rows come first in its slot.
    cached_tokens:  prompt tokens whose rows an earlier request had computed.
    slot:           its slot of the verifier; -1 if it has none.
    finish_reason:  None while it runs.   error: why it failed, if that is the reason.
    noise:          of its drafts' candidates, by its sampling parameters.
    speculation:    how it drafts; the decode loop sets its default if a request has none.
    plain:          how it goes on if its drafter or controller fails.   drafting_error: why it had to.
    drafting:       state of each drafter.   control: state of the controller.
    fingerprint:    of the runtime that works on it; None if it is this process's.
    tenant:         requests of the same tenant may share their outputs.   turn: whose turn it needs to get a slot.
    salt:           only requests of equal salts share KV rows.
    priority:       requests of smaller numbers come first.
    deadline:       seconds of `time.monotonic` at which it ends with the reason `timeout`; None if it may run on.
    first_token_deadline: the same for a request that has no token yet.
    failures:       engine calls for it that failed, one after the other.
    sampled:        True while a step's tokens are chosen and not committed; its sampler cannot choose again.
    record:         called with each step before it is committed.   deliver: called with each output.
    started, admitted, first_token: seconds of `time.perf_counter` when it was added, when it first got a slot, and when
                    its first token was committed; 0 before.
    """

    tokens: list[int]
    prompt_length: int
    limit: int
    stop_tokens: frozenset[int]
    sampler: Sampler
    text: Detokenizer | None = None
    noise: DraftNoise = NO_NOISE
    resumed: int = 0
    num_computed_tokens: int = 0
    cached_tokens: int = 0
    slot: int = -1
    finish_reason: FinishReason | None = None
    error: RedraftError | None = None
    speculation: Speculation = None  # type: ignore[assignment]  # until it is added
    plain: Speculation = None  # type: ignore[assignment]  # as above
    drafting_error: RedraftError | None = None
    drafting: dict[object, Any] = field(default_factory=dict)
    control: Any = None
    fingerprint: str | None = None
    tenant: str | None = None
    turn: str | None = None
    salt: str | None = None
    priority: int = 0
    deadline: float | None = None
    first_token_deadline: float | None = None
    failures: int = 0
    sampled: bool = False
    record: Callable[..., None] | None = None
    deliver: Callable[..., None] | None = None
    counters: Counters = field(default_factory=Counters)
    began: Clock = field(default_factory=Clock)
    ended: Clock = field(default_factory=Clock)
    started: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0

    @property
    def new_tokens(self) -> list[int]:
        """The committed tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - len(self.tokens)

    @property
    def due(self) -> float | None:
        """The deadline that holds now; None if there is none."""
        ends = [self.deadline, self.first_token_deadline if len(self.tokens) == self.prompt_length else None]
        return min([end for end in ends if end is not None], default=None)

    @property
    def missing_rows(self) -> int:
        """Rows to compute before it decodes: those of all tokens but the last, which is a tree's root."""
        return len(self.tokens) - 1 - self.num_computed_tokens

    def resume(self, written: Sequence[int]) -> None:
        """Begin after the tokens that an equal request had when it was interrupted, to go on with its text.

        Raises UsageError if these end the text.
        """
        if written:
            self.sampler.resume(self.tokens)
            self.append(written)
            self.resumed = len(self.new_tokens)
        if self.finish_reason is not None:
            raise UsageError(f"the text ends with the written token {self.resumed}", "there is nothing to resume")

    def verify(self, logits: FloatArray, tree: Tree) -> Outcome:
        """Let the sampler choose. Its outcome has an error if it raises: this request fails, and no other.

        logits: float32[n, V], a row a node of the tree.
        """
        self.sampled = True
        try:
            return self.sampler.verify(logits, tree, self.tokens)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's processor may raise anything
            return Outcome((), (), NOT_REACHED, (), as_redraft_error(error, "sampling failed"))

    def commit(self, tree: Tree, outcome: Outcome) -> int:
        """Add a step's tokens, cut after the first that ends the text. Returns their number.

        KV rows of root and path are now valid.
        """
        self.sampled = False
        if outcome.tokens or not outcome.error:
            self.num_computed_tokens += 1 + len(outcome.path)
        if not self.first_token:
            self.first_token = time.perf_counter()
        kept = self.append(outcome.tokens)
        if outcome.error is not None and self.finish_reason is None:
            self.fail(outcome.error)
        self.counters.count(len(tree) - 1, min(kept, len(outcome.path)))
        return kept

    def fail(self, error: RedraftError) -> None:
        """End the request with an error."""
        self.finish_reason, self.error = "error", error

    def stop_drafting(self, error: Exception) -> None:
        """Go on without drafts. `drafting_error` has the first reason, which is logged too."""
        _LOG.warning("a request goes on without drafts: %s", error, exc_info=error)
        self.drafting_error = self.drafting_error or as_redraft_error(error, "drafting failed")
        self.speculation = self.plain
        self.drafting.clear()

    def append(self, tokens: Sequence[int]) -> int:
        """Add tokens until one ends the text. Returns the number added."""
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            stopped = token in self.stop_tokens or (self.text is not None and self.text.push(token))
            if stopped:
                self.finish_reason = "stop"
                return count
            if len(self.tokens) >= self.limit:
                self.finish_reason = "length"
                return count
        return len(tokens)


def as_redraft_error(error: BaseException, what: str) -> RedraftError:
    """Return `error` as one that callers get: itself if it is one already."""
    if isinstance(error, RedraftError):
        return error
    found = UsageError(f"{what}: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


@contextmanager
def drafting(*requests: Request) -> Iterator[None]:
    """Let requests go on plainly if the block raises, since their drafts' state is then unknown."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a drafter may raise anything; no text depends on it
        for request in requests:
            request.stop_drafting(error)
