"""From the fields of a request to the parameters of the runtime."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

from redraft.errors import UsageError
from redraft.runtime.controllers import ADAPTIVE
from redraft.runtime.params import SEEDS, SamplingParams, SpeculationParams
from redraft.runtime.server.errors import api_error, wrong
from redraft.runtime.server.fields import ChatRequest, CompletionRequest, SampledRequest
from redraft.types import Budget

COMPLETION_TOKENS = 16
"""Most tokens of a completion that says nothing, as in OpenAI's reference."""
MOST_SCHEMA_BYTES = 64 << 10
"""Of a JSON schema. Larger ones may take seconds to compile."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What each prompt of a request asks for.

    choices: continuations of each prompt. The choice of index i in the answer has the seed of `sampling` plus i.
    tells_steps: True if the answer has the source of each token and the draft trees.
    """

    sampling: SamplingParams
    speculation: SpeculationParams
    choices: int = 1
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    session: str | None = None
    tells_steps: bool = False

    def choice(self, index: int) -> SamplingParams:
        """Return the parameters of one choice."""
        return replace(self.sampling, seed=(self.sampling.seed + index) % SEEDS)


def job_of(request: ChatRequest | CompletionRequest, defaults: SamplingParams, max_model_len: int) -> Job:
    """Return what a request asks for. Raises ApiError that names the field that is wrong.

    defaults: the model's sampling parameters, for those that the request lacks.
    """
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.stop is not None:
        given["stop"] = request.stop if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias is not None:
        given["logit_bias"] = _biases(request.logit_bias)
    # A request without a seed has another text each time, as OpenAI's. Its answer tells the seed.
    given["seed"] = secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS
    given |= (
        _of_chat(request, max_model_len)
        if isinstance(request, ChatRequest)
        else {"max_tokens": _or(request.max_tokens, COMPLETION_TOKENS), "logprobs": request.logprobs}
    )
    try:
        sampling = replace(defaults, **given)
    except UsageError as error:
        raise api_error(error) from None
    tenant, tells_steps = request.user, False
    if isinstance(request, ChatRequest) and request.redraft is not None:
        tells_steps = bool(request.redraft.steps)
    if isinstance(request, ChatRequest) and tenant is None:
        tenant = request.safety_identifier
    return Job(
        sampling, _speculation(request), request.n or 1, request.priority or 0, tenant, request.cache_salt,
        request.prompt_cache_key if isinstance(request, ChatRequest) else None, tells_steps,
    )  # fmt: skip


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _of_chat(request: ChatRequest, max_model_len: int) -> dict[str, Any]:
    """Return the parameters that only chats have. Without a limit, an answer may fill the context."""
    most = request.max_completion_tokens
    if None not in (most, request.max_tokens) and most != request.max_tokens:
        raise wrong("max_tokens and max_completion_tokens differ", "max_completion_tokens", "invalid_value")
    if request.top_logprobs is not None and not request.logprobs:
        raise wrong("top_logprobs needs logprobs", "top_logprobs", "invalid_value")
    given: dict[str, Any] = {"max_tokens": _or(most, _or(request.max_tokens, max_model_len))}
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    form = request.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise wrong("the type json_schema goes with a json_schema", "response_format", "invalid_value")
    if form is not None and form.type == "json_object":
        given["json_object"] = True
    if form is not None and form.json_schema is not None:
        given["json_schema"] = _schema(form.json_schema.schema_)
    return given


def _schema(schema: dict[str, Any]) -> str:
    """Return the text of a JSON schema. Raises ApiError if it is too large."""
    text = json.dumps(schema, ensure_ascii=False)
    if (size := len(text.encode())) > MOST_SCHEMA_BYTES:
        message = f"the JSON schema has {size} bytes, at most {MOST_SCHEMA_BYTES} are allowed"
        raise wrong(message, "response_format.json_schema.schema", "invalid_value")
    return text


def _biases(biases: dict[str, float]) -> dict[int, float]:
    if not all(map(_TOKEN_ID.fullmatch, biases)):
        raise wrong("logit_bias must map token ids to numbers", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def _speculation(request: SampledRequest) -> SpeculationParams:
    """Return how a request drafts: as `speculative_config` says, by the bundle's default without it."""
    config = request.speculative_config
    prediction = _prediction(request)
    try:
        if config is False:
            return SpeculationParams("none", prediction)
        if config is None:
            return SpeculationParams(prediction=prediction)
        length = config.num_speculative_tokens
        if length is None:
            return SpeculationParams(config.method, prediction, controller=config.controller)
        budget = Budget(length, length, length)
        return SpeculationParams(config.method, prediction, budget, config.controller or ADAPTIVE)
    except UsageError as error:
        raise wrong(str(error), "speculative_config", "invalid_value") from None


def _prediction(request: SampledRequest) -> str | None:
    """Return the predicted text of a chat; parts follow each other as they are."""
    if not isinstance(request, ChatRequest) or request.prediction is None:
        return None
    content = request.prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)
