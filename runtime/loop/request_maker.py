"""Requests, made of prompts and parameters, with every check of what a caller gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import index
from types import NoneType
from typing import Any

from redraft.errors import UsageError
from redraft.runtime.drafters.synthetic import Acceptance, SyntheticAcceptance
from redraft.runtime.loop.speculation import Pause, SpeculationFactory
from redraft.runtime.params import Grammar, SamplingParams, SpeculationParams
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling import make_sampler
from redraft.runtime.sampling.constraints import Constraint, guided_tokenizer
from redraft.runtime.sampling.noise import NO_NOISE, draft_noise
from redraft.runtime.sampling.sampler import Sampler
from redraft.runtime.text.tokenizer import Detokenizer, Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids that are used unchanged."""
Parameters = tuple[SamplingParams, SpeculationParams]
"""The parameters of one prompt."""
_GRAMMARS = 8
"""Compiled grammars that are kept."""


def parameters_of(params: Any, speculation: Any, count: int) -> list[Parameters]:
    """Return the parameters of each prompt, from one value for all or a list of each kind.

    Raises UsageError for other types and lengths.
    """
    sampling = _each(params, (SamplingParams,), count)
    asked = _each(speculation, (str, SpeculationParams, NoneType), count)
    speculating = [one if isinstance(one, SpeculationParams) else SpeculationParams(one) for one in asked]
    return list(zip(sampling, speculating, strict=True))


def _each(values: Any, kinds: tuple[type[Any], ...], count: int) -> list[Any]:
    found = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values] * count
    wrong = next((value for value in found if not isinstance(value, kinds)), None)
    if wrong is not None:
        expected = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise UsageError(f"expected {expected}, one for all prompts or a list, found {type(wrong).__name__}")
    if len(found) != count:
        raise UsageError(f"found {len(found)} parameters for {count} prompts", "give one for all, or one each")
    return found


@dataclass
class RequestMaker:
    """Makes requests. It refuses texts that the model's vocabulary or context cannot hold.

    stop_tokens: the model's end-of-sequence ids.
    """

    tokenizer: Tokenizer
    vocabulary: int
    max_model_len: int
    stop_tokens: frozenset[int]
    speculation: SpeculationFactory

    def make(
        self, prompts: Iterable[Prompt], parameters: Sequence[Parameters], forced: Acceptance | None,
        record_logit_margins: bool, pause: Pause, written: Sequence[int] = (),
    ) -> list[Request]:  # fmt: skip
        """Return a request for each prompt. Raises UsageError, BundleError and BackendError.

        pause: as in `SpeculationFactory.create`.   written: tokens that each request has already.
        """
        if written:
            self._check_vocabulary(written, "written text")
        keys = [(how, params.constraint is not None) for params, how in parameters]
        speculations = {key: self.speculation.create(*key, forced, pause) for key in dict.fromkeys(keys)}
        requests = []
        for prompt, (params, how), key in zip(prompts, parameters, keys, strict=True):
            request = self._request(self.encode(prompt), params, forced, record_logit_margins)
            request.resume(written)
            request.speculation, request.tenant = speculations[key], how.tenant
            if how.prediction is not None:
                self.speculation.predicted.predict(request, self._encode_prediction(how.prediction))
            requests.append(request)
        return requests

    def _request(
        self, ids: list[int], params: SamplingParams, forced: Acceptance | None, record_logit_margins: bool
    ) -> Request:
        """Return a request without its speculation. Raises UsageError."""
        stop_tokens = frozenset() if params.ignore_eos else self.stop_tokens
        params.check_vocabulary(self.vocabulary, stop_tokens)
        if params.min_tokens > self.max_model_len - len(ids):
            raise UsageError(
                f"min_tokens is {params.min_tokens}, and after {len(ids)} tokens of the prompt the context holds "
                f"{self.max_model_len - len(ids)} more",
                "lower min_tokens, or shorten the prompt",
            )
        constraint = None if params.constraint is None else self._compiled(params.constraint)
        if constraint is not None:
            constraint.check_first(params.forbidden(stop_tokens), self.vocabulary)
        sampler, noise = make_sampler(params, stop_tokens, record_logit_margins, constraint), draft_noise(params)
        if forced is not None:
            sampler, noise = SyntheticAcceptance(forced, params.seed), NO_NOISE
            params, stop_tokens = replace(params, stop=()), frozenset()
        request = bare_request(self.tokenizer, ids, params, self.max_model_len, stop_tokens, sampler)
        request.noise = noise
        if constraint is not None:
            self.speculation.forced.constrain(request, constraint)
        return request

    @cached_property
    def _compiled(self) -> Callable[[Grammar], Constraint]:
        """Compiles a grammar, unless it is one of the latest. Choices of a prompt share theirs. Raises UsageError."""
        guided = self._guided
        return lru_cache(maxsize=_GRAMMARS)(lambda grammar: Constraint(grammar, guided))

    @cached_property
    def _guided(self) -> Any:
        """The tokenizer in the form of constraints. Raises UsageError if they are not possible."""
        return guided_tokenizer(self.tokenizer.tokenizer, self.vocabulary, sorted(self.stop_tokens))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises UsageError as `Runtime.encode` does."""
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = _ids(prompt) or self.tokenizer.encode("")
        self._check_vocabulary(ids, "prompt")
        if len(ids) >= self.max_model_len:
            raise UsageError(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_model_len}, a new token included",
                "shorten the prompt",
            )
        return ids

    def _encode_prediction(self, prediction: Prompt) -> list[int]:
        """Return the token ids of a predicted output, without a BOS token. Raises UsageError."""
        if isinstance(prediction, str):
            self._check_length(prediction, "prediction")
            ids = self.tokenizer.encode(prediction, False, "prediction") if prediction else []
        else:
            ids = list(prediction)
        if ids:
            self._check_vocabulary(ids, "prediction")
        if len(ids) > self.max_model_len:
            raise UsageError(
                f"the prediction has {len(ids)} tokens and the context holds {self.max_model_len}",
                "shorten the prediction",
            )
        return ids

    def _check_length(self, text: str, name: str) -> None:
        """Raise UsageError, before encoding, for a text that is too long for the context with any tokens."""
        if len(text) > self.max_model_len * self.tokenizer.longest_token:
            raise UsageError(
                f"the {name} has {len(text)} characters and the context holds {self.max_model_len} tokens",
                f"shorten the {name}",
            )

    def _check_vocabulary(self, ids: Sequence[int], name: str) -> None:
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise UsageError(
                f"the {name} has token ids from {min(ids)} to {max(ids)}, the model knows 0 to {self.vocabulary - 1}",
                "use the tokenizer that belongs to the model",
            )


def bare_request(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, max_model_len: int, stop_tokens: frozenset[int],
    sampler: Sampler,
) -> Request:  # fmt: skip
    """Return a request that does not know yet how it speculates."""
    return Request(
        tokens=ids,
        prompt_length=len(ids),
        limit=min(len(ids) + params.max_tokens, max_model_len),
        stop_tokens=stop_tokens,
        sampler=sampler,
        text=reader_of(tokenizer, ids, params) if params.stop or params.kept_tokens else None,
    )


def reader_of(tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> Detokenizer:
    """Return what reads the text after a prompt."""
    return Detokenizer(tokenizer, prompt, params.stop, params.min_tokens, params.kept_tokens)


def _ids(prompt: Sequence[int]) -> list[int]:
    """Return the token ids. Raises UsageError for any other value."""
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [index(token) for token in prompt]
    except TypeError:
        raise UsageError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}") from None
