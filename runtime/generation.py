"""The result of a request, and its text as it is written: each token with the part of the step that it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from redraft.errors import RedraftError, UsageError
from redraft.runtime.drafters.synthetic import LABEL
from redraft.runtime.observe.metrics import Metrics, summarise
from redraft.runtime.requests.batch import RequestStep
from redraft.runtime.requests.request import FinishReason, Request
from redraft.runtime.sampling.truncation import TokenLogprobs
from redraft.runtime.text.tokenizer import Detokenizer, Tokenizer
from redraft.runtime.trees.offers import Plan
from redraft.runtime.trees.tree import shared_nodes
from redraft.types import OfferKind, Outcome, Tree


@dataclass(frozen=True)
class Generation:
    """One finished request.

    token_ids:     the new tokens, with the end-of-sequence token if one ended them. `text` leaves special tokens out
                   that the request does not keep, and ends before a stop string and before an unfinished character.
    logit_margins: lead of each token's logit over the second largest, if the caller asked for it. Above temperature 0,
                   of its logit over temperature with noise.
    logprobs:      log probability of each token, if the request asked for them (`redraft.runtime.sampling.truncation`).
    These two and the metrics are of the tokens after those that a resumed request had.
    cached_tokens: prompt tokens whose rows an earlier request had computed.
    error:         why the request failed after these tokens, with the finish reason `error`.
    drafting_error: why it went on without drafts, if its drafter failed. Its text is the same.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    metrics: Metrics
    logit_margins: tuple[float, ...] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: RedraftError | None = None
    cached_tokens: int = 0
    drafting_error: RedraftError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object. It has `logprobs` only if the request asked for them."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            **({} if self.logprobs is None else {"logprobs": [token.to_json() for token in self.logprobs]}),
            "finish_reason": self.finish_reason,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)},
            "metrics": self.metrics.to_json(),
        }


def generation_of(request: Request, tokenizer: Tokenizer, synthetic: bool = False) -> Generation:
    """Return the result of a request that has ended. synthetic: True if its acceptance was forced."""
    tokens, text = request.new_tokens, request.text
    if text is None:
        text = Detokenizer(tokenizer, request.tokens[: request.prompt_length])
        for token in tokens:
            text.push(token)
    assert request.finish_reason is not None
    waited = max(request.first_token - request.started, 0.0)
    made = len(tokens) - request.resumed
    began = request.began if made else request.ended  # nothing was decoded
    logit_margins, logprobs = request.sampler.logit_margins, request.sampler.logprobs
    return Generation(
        text=LABEL + text.text if synthetic else text.text,
        token_ids=tuple(tokens),
        finish_reason=request.finish_reason,
        prompt_tokens=request.prompt_length,
        metrics=summarise(request.counters, began, request.ended, made, waited, synthetic),
        logit_margins=None if logit_margins is None else tuple(logit_margins[:made]),
        logprobs=None if logprobs is None else tuple(logprobs[:made]),
        error=request.error,
        cached_tokens=request.cached_tokens,
        drafting_error=request.drafting_error,
    )


class RequestError(UsageError):
    """Some requests failed while they ran. `generations` has the results of all: the others ended normally."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        failed = [(number, one.error) for number, one in enumerate(generations, 1) if one.error is not None]
        number, error = failed[0]
        name = f"prompt {number}, " if len(generations) > 1 else ""
        others = f" (and {len(failed) - 1} more prompts failed)" if len(failed) > 1 else ""
        super().__init__(f"{name}{error.message}{others}", error.hint)
        self.generations = tuple(generations)


class Origin(StrEnum):
    """The source of a token: the verifier itself, or an accepted draft of known text or of a drafter.

    RESAMPLED: a drafter's tree from unused hidden states of its last draft, instead of a new draft.
    """

    VERIFIER = "verifier"
    LOOKUP = "lookup"
    DRAFTER = "drafter"
    RESAMPLED = "resampled"


class Piece(NamedTuple):
    """New text of one token; empty if the token only begins a character, or may begin a stop string."""

    text: str
    origin: Origin


class StepRecord(NamedTuple):
    """What to tell of a step: its tree, and what became of it. It holds no engine.

    tokens, parents, log_probs: of the tree's nodes, as `redraft.types.Tree`.   nodes: origins of all but the root.
    path, bonus: of the outcome.   made: number of its tokens.   drafters: ids of those that drafted in the step.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]
    nodes: tuple[Origin, ...]
    path: tuple[int, ...]
    bonus: int
    made: int
    drafters: tuple[str, ...]

    @property
    def origins(self) -> list[Origin]:
        """The origin of each of the step's tokens."""
        return _of_tokens(self.nodes, self.path, self.made)


def recorded(step: RequestStep | StepRecord | None) -> StepRecord | None:
    """Return the record of a step; None if its verification failed. A tree on a device must have been kept."""
    if not isinstance(step, RequestStep) or step.outcome is None:
        return step if isinstance(step, StepRecord) else None
    tree, outcome = step.tree, step.outcome
    return StepRecord(
        tuple(tree.tokens.tolist()), tuple(tree.parents.tolist()), tuple(tree.log_probs.tolist()),
        tuple(node_origins(step)), outcome.path, outcome.bonus, len(outcome.tokens),
        tuple(sorted({offer.key.drafter for offer in step.plan.make})),
    )  # fmt: skip


def origins(step: RequestStep | StepRecord) -> list[Origin]:
    """Return the origin of each of a step's tokens."""
    if isinstance(step, StepRecord):
        return step.origins
    if step.outcome is None:
        return []
    return _of_tokens(node_origins(step), step.outcome.path, len(step.outcome.tokens))


def _of_tokens(nodes: Sequence[Origin], path: Sequence[int], made: int) -> list[Origin]:
    """Return the origins of a step's tokens: those of the accepted nodes, then the verifier's own."""
    drafted = [nodes[node - 1] for node in path]
    return [*drafted, *[Origin.VERIFIER] * (made - len(drafted))]


def node_origins(step: RequestStep) -> list[Origin]:
    """Return the origin of each node of a step's tree after its root.

    A drafted node that the lookup had too counts for the lookup, as in `redraft.runtime.observe.trace`, and then a
    resampled one that a new draft had too for the resampling. A tree on a device is all a drafter's.
    """
    plan, tree = step.plan, step.tree
    if not plan.make:
        return [Origin.LOOKUP] * (len(tree) - 1)
    found = [Origin.RESAMPLED if plan.kind is OfferKind.RESAMPLE else Origin.DRAFTER] * (len(tree) - 1)
    if tree.on_device:
        return found
    resampled = [made for offer, made in step.made if offer.key.kind is OfferKind.RESAMPLE]
    parts = [(made, Origin.RESAMPLED) for made in resampled if plan.kind is OfferKind.UNION]
    for part, origin in (*parts, (plan.found, Origin.LOOKUP)):
        for node in shared_nodes(tree, part):
            found[node - 1] = origin
    return found


def keep_tree(request: Request, plan: Plan, tree: Tree, outcome: Outcome) -> None:
    """Copy a tree that is on a device, where later steps overwrite it. To be set as `Request.record`."""
    if tree.on_device:
        for name in ("tokens", "parents", "log_probs"):
            getattr(tree, name)  # it stays copied
