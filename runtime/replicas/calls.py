"""What a gateway and its replicas tell each other. All of it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from redraft import __version__, names
from redraft.engines.digests import text_digest
from redraft.engines.manifest import Manifest
from redraft.errors import BackendError, RedraftError
from redraft.runtime.controllers.experience import Gain
from redraft.runtime.generation import StepRecord
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.runtime.requests.request import FinishReason
from redraft.runtime.sampling.truncation import TokenLogprobs


class Identity(NamedTuple):
    """What has to be equal.

    version: of redraft: another one may not understand a call.
    tokens:  digest of the tokenizer and of the limits of token ids: others mean other texts by them.
    texts:   digest of all that decides texts, without drafters: others cannot go on with a text.
    """

    version: str
    tokens: str
    texts: str


def identity_of(manifest: Manifest, kernels: str) -> Identity:
    """Return the identity of a bundle whose texts these kernels compute."""
    files = {graph.file for name, graph in manifest.graphs.items() if name.startswith(names.VERIFIER)}
    files |= {weight.file for weight in manifest.weights}
    tokenizer = manifest.files[names.TOKENIZER_FILE].sha256
    limits = (manifest.max_model_len, manifest.shape.vocabulary, manifest.bos_token_id, manifest.eos_token_ids)
    digests = sorted(manifest.files[file].sha256 for file in files)
    return Identity(
        __version__, text_digest(tokenizer, repr(limits)), text_digest(tokenizer, repr(limits), kernels, *digests)
    )  # fmt: skip


def check_identity(name: str, identity: Identity, version: str, tokens: str) -> None:
    """Raise BackendError if a replica does not understand the calls of a gateway of this version and tokenizer."""
    if identity.version != version:
        raise BackendError(f"replica {name} has redraft {identity.version}, its gateway {version}", "install the same")
    if identity.tokens != tokens:
        raise BackendError(f"replica {name} has another tokenizer than its gateway", "give both the same bundle")


@dataclass(frozen=True)
class Call:
    """A request to a replica: the arguments of `Runtime.submit`, with `version` and `tokens` of the gateway."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationParams
    version: str
    tokens: str
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

    replica: its name.   texts: of its identity.   fingerprint: names its build and its kernels.
    """

    replica: str
    texts: str
    fingerprint: str


class Description(NamedTuple):
    """What a gateway has to know of its replicas.   slots: requests that one of them runs at once."""

    identity: Identity
    fingerprint: str
    methods: tuple[str, ...]
    default_method: str
    vocabulary: int
    slots: int


class Refused(NamedTuple):
    """A replica does not take the request: an error of the request, or a full queue."""

    error: RedraftError


class Gone(NamedTuple):
    """The replica cannot go on with the request, and another one can: its decode loop has died."""


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


Answer = Started | Refused | Gone | Update
