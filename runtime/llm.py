"""`LLM`, with the names of vLLM's offline interface: scripts written for it change one import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from redraft.errors import UsageError
from redraft.runtime.api import GREEDY, Runtime
from redraft.runtime.conversation import Message
from redraft.runtime.generation import Generation
from redraft.runtime.loop.request_maker import Prompt
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.types import Budget

_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. `generation` has all that is known of it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    generation: Generation


@dataclass(frozen=True)
class PromptOutput:
    """The outputs of one prompt, by vLLM's names (its `RequestOutput`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """A runtime behind vLLM's names.

    model:  the folder of a bundle.
    speculative_config: vLLM's keys. `method` is one of the bundle's, or `ngram`; `model` names one of its drafters;
            `num_speculative_tokens` limits a draft's nodes; `prompt_lookup_min` and `prompt_lookup_max` are those of
            the lookup. None takes the bundle's default, with sizes by cost.
    Other options are those of `Runtime.open`. Raises UsageError for an unknown key.
    """

    def __init__(
        self, model: Path | str, speculative_config: Mapping[str, Any] | None = None, max_num_seqs: int = 8,
        **options: Any,
    ) -> None:  # fmt: skip
        config = dict(speculative_config or {})
        if unknown := [key for key in config if key not in _KEYS]:
            raise UsageError(f"speculative_config has no key {unknown[0]!r}", f"choose from {', '.join(_KEYS)}")
        lookup = {key: config[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in config}
        if lookup:
            options["drafter_options"] = {**options.get("drafter_options", {}), "ngram": lookup}
        self.runtime = Runtime.open(model, max_num_seqs=max_num_seqs, **options)
        tokens = config.get("num_speculative_tokens")
        budget = None if tokens is None else Budget(tokens, tokens, tokens)
        controller = None if budget is None else "adaptive"
        self._speculation = SpeculationParams(config.get("model", config.get("method")), None, budget, controller)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the engine."""
        self.runtime.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> list[PromptOutput]:
        """Continue a prompt or a list of prompts. Errors are those of `Runtime.generate`."""
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        asked: list[Any] = [prompts] if single else list(prompts)
        found = self.runtime.generate(asked, sampling_params, self._speculation)
        return [
            PromptOutput(
                str(number), prompt if isinstance(prompt, str) else None, self.runtime.encode(prompt),
                [CompletionOutput(0, one.text, one.token_ids, one.finish_reason, one)],
            )
            for number, (prompt, one) in enumerate(zip(asked, found, strict=True))
        ]  # fmt: skip

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] = GREEDY, **template: Any,
    ) -> list[PromptOutput]:  # fmt: skip
        """Answer a conversation or a list of conversations by the model's chat template."""
        several: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        tokenizer = self.runtime.tokenizer
        prompts = [
            tokenizer.encode(tokenizer.apply_chat_template(one, **template), special_tokens=False) for one in several
        ]
        return self.generate(prompts, sampling_params)
