"""What a gateway and its replicas tell each other. All of it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from redraft.errors import RedraftError
from redraft.runtime.controllers.experience import Gain
from redraft.runtime.generation import StepRecord
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.runtime.requests.request import FinishReason
from redraft.runtime.sampling.truncation import TokenLogprobs


@dataclass(frozen=True)
class Call:
    """A request to a replica: the arguments of `Runtime.submit`, and the gateway's build and version of redraft."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationParams
    build: str
    version: str
    priority: int = 0
    timeout: float | None = None
    first_token_timeout: float | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    session: str | None = None
    keep_trees: bool = False
    written: tuple[int, ...] = ()


class Started(NamedTuple):
    """A replica has taken the request.

    replica: its name.   kernels: of its texts; others compute other ones, unless they are exact.
    """

    replica: str
    kernels: str


class Description(NamedTuple):
    """What all replicas have in common.   slots: requests that one of them runs at once."""

    build: str
    version: str
    kernels: str
    exact: bool
    methods: tuple[str, ...]
    default_method: str
    vocabulary: int
    slots: int


class Refused(NamedTuple):
    """A replica does not take the request: an error of the request, or a full queue."""

    error: RedraftError


class Update(NamedTuple):
    """What a step brought to the request, as `RequestOutput`.

    logprobs: of the tokens, if the request asked for them.
    drafted, accepted: nodes of the step's tree without its root, and those that were accepted; None without a step.
    predicted: drafted tokens of the request's prediction so far that were accepted, and that were rejected.
    waited: seconds that the request waited for a slot.
    rows, cached_tokens: rows in the KV cache, and prompt tokens whose rows an earlier request had computed.
    kv_usage: share of the replica's KV rows that is filled.   gain: as `Runtime.gain`.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: RedraftError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    drafted: int | None = None
    accepted: int = 0
    predicted: tuple[int, int] = (0, 0)
    waited: float = 0.0
    rows: int = 0
    cached_tokens: int = 0
    kv_usage: float = 0.0
    gain: Gain = Gain()
    step: StepRecord | None = None


Answer = Started | Refused | Update
