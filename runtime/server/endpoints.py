"""The endpoints that use the model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from anyio import to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from redraft.runtime.server.answers import ChatChoice, Choice, Choices, CompletionChoice
from redraft.runtime.server.errors import refused, wrong
from redraft.runtime.server.explained import ExplainedChoice
from redraft.runtime.server.fields import (
    MOST_CHOICES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Fields,
    SampledRequest,
    TokenizeRequest,
    Tool,
    parse,
)  # fmt: skip
from redraft.runtime.server.http import read_body
from redraft.runtime.server.parameters import Job, job_of
from redraft.runtime.server.prompts import chat_prompt, encode_prompt, fill_in_prompt, template_source
from redraft.runtime.server.reading import ChatReader
from redraft.runtime.server.rendering import Json
from redraft.runtime.server.service import Service
from redraft.runtime.server.streaming import Answer
from redraft.runtime.server.tool_choice import call_rules
from redraft.runtime.server.tool_formats import AnswerFormat, answer_format
from redraft.runtime.server.tool_grammars import with_grammar
from redraft.runtime.submission import Submission

Model = TypeVar("Model", bound=Fields)
_SMALL_BODY = 64 << 10
"""Bytes of a body that is read in the event loop. Larger ones would delay others."""


class StartedChat(NamedTuple):
    """A chat whose choices have been submitted, and the format of their answers."""

    job: Job
    form: AnswerFormat
    submissions: Sequence[Submission]

    def reader(self) -> ChatReader:
        """Return the reader of the first choice."""
        return ChatReader(0, self.submissions[0].request, self.form)


class Endpoints:
    """The endpoints of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._runtime = service.runtime
        self._tokenizer = service.runtime.tokenizer

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        asked = await self._read(request, ChatRequest)
        chat = await self._start_chat(asked)
        kind = ExplainedChoice if chat.job.tells_steps else ChatChoice
        choices = [
            kind(index, submission.request, chat.form, self._service.texts)
            for index, submission in enumerate(chat.submissions)
        ]
        return await self._respond(request, asked, chat.job, chat.submissions, choices)

    async def complete(self, request: Request) -> Response:
        """Continue one or several prompts."""
        asked = await self._read(request, CompletionRequest)
        _check_completion(asked)
        job, prompts = self._job(asked), prompts_of(asked)
        self._service.check_queue(job.choices * len(prompts))
        ids = await to_thread.run_sync(lambda: [self._completion_ids(asked, prompt) for prompt in prompts])
        echoes = [self._echo(prompt) if asked.echo else "" for prompt in prompts]
        submissions = await self._service.submit(ids, job)
        choices = [
            CompletionChoice(index, submission.request, self._service.texts, echoes[index // job.choices])
            for index, submission in enumerate(submissions)
        ]
        return await self._respond(request, asked, job, submissions, choices)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or of a conversation, whose limits are those of requests."""
        asked = await self._read(request, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise wrong("give one of prompt and messages", "prompt")
        return await to_thread.run_sync(self._tokenized, asked)

    async def detokenize(self, request: Request) -> Json:
        """Return the text of token ids."""
        asked = await self._read(request, DetokenizeRequest)
        vocabulary = self._runtime.vocabulary
        if unknown := [token for token in asked.tokens if not 0 <= token < vocabulary]:
            raise wrong(f"the token id {unknown[0]} is not from 0 to {vocabulary - 1}", "tokens", "invalid_value")
        if (count := len(asked.tokens)) > (most := self._runtime.max_model_len):
            raise wrong(f"{count} tokens are more than the context's {most}", "tokens", "context_length_exceeded")
        return {"prompt": await to_thread.run_sync(self._tokenizer.decode, asked.tokens)}

    async def models(self) -> Json:
        """List the served model."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> Json:
        """Describe the served model."""
        self._service.check_model(name)
        return self._model()

    def _model(self) -> Json:
        return {
            "id": self._service.settings.model_name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "redraft",
            "max_model_len": self._runtime.max_model_len,
            "methods": self._runtime.methods,
            "default_method": self._runtime.default_method,
            "caveats": self._runtime.caveats,
        }

    async def _read(self, request: Request, model: type[Model]) -> Model:
        """Return the fields of a request for the served model. Raises ApiError."""
        settings = self._service.settings
        body = await read_body(request, settings)
        arguments = model, body, settings.allow_unknown_fields
        found = parse(*arguments) if len(body) <= _SMALL_BODY else await to_thread.run_sync(parse, *arguments)
        self._service.check_model(getattr(found, "model", None))
        return found

    def _job(self, asked: ChatRequest | CompletionRequest) -> Job:
        if asked.stream_options is not None and not asked.stream:
            raise wrong("stream_options needs stream", "stream_options", "invalid_value")
        job = job_of(asked, self._service.defaults, self._runtime.max_model_len)
        if job.tells_steps and not asked.stream:
            raise wrong("redraft.steps needs stream", "redraft.steps", "invalid_value")
        return job

    async def _start_chat(self, asked: ChatRequest) -> StartedChat:
        """Start all choices of a chat. Raises ApiError."""
        job = self._job(asked)
        self._service.check_queue(job.choices)
        form, rules = self._answer_format(asked, job), call_rules(asked)
        job = replace(job, sampling=replace(job.sampling, kept_tokens=form.kept_tokens(self._tokenizer)))
        text, ids = await to_thread.run_sync(self._chat_prompt, asked)
        form = form.after(text)
        if rules is not None:
            job = await to_thread.run_sync(with_grammar, job, rules, form, self._tokenizer)
        return StartedChat(job, form, await self._service.submit([ids], job))

    def _answer_format(self, asked: ChatRequest, job: Job) -> AnswerFormat:
        """Return the format of the answer. A constraint holds for all of it, which leaves no place for reasoning."""
        tools, free = bool(_tools(asked)), job.sampling.constraint is None
        if tools and not free:
            raise refused("response_format", " with tools")
        form = answer_format(template_source(self._tokenizer, tools), tools, reasoning=free)
        if tools and form.tools is None:
            message = "tools are not supported with this model: its chat template has no known format of tool calls"
            raise wrong(message, "tools", "unsupported_parameter")
        return form

    def _chat_text(self, asked: ChatRequest) -> str:
        return chat_prompt(self._tokenizer, asked.messages, _tools(asked), asked.chat_template_kwargs)

    def _chat_prompt(self, asked: ChatRequest) -> tuple[str, list[int]]:
        text = self._chat_text(asked)
        return text, encode_prompt(self._tokenizer, text, self._service.most_prompt_tokens, False, "messages")

    def _completion_ids(self, asked: CompletionRequest, prompt: str | Sequence[int]) -> list[int]:
        most = self._service.most_prompt_tokens
        if asked.suffix is None:
            return encode_prompt(self._tokenizer, prompt, most, True, "prompt")
        if not isinstance(prompt, str):
            raise refused("suffix", " after token ids")
        ids = fill_in_prompt(self._tokenizer, prompt, asked.suffix)
        return encode_prompt(self._tokenizer, ids, most, False, "prompt")

    def _echo(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _tokenized(self, asked: TokenizeRequest) -> Response:
        most = self._service.most_prompt_tokens
        if asked.messages is None:
            ids = encode_prompt(self._tokenizer, asked.prompt or "", most, asked.add_special_tokens, "prompt")
        else:
            text = chat_prompt(
                self._tokenizer, asked.messages, asked.tools, asked.chat_template_kwargs, asked.add_generation_prompt
            )
            ids = encode_prompt(self._tokenizer, text, most, False, "messages")
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._runtime.max_model_len})

    async def _respond(
        self, request: Request, asked: SampledRequest, job: Job, submissions: Sequence[Submission],
        choices: Sequence[Choice],
    ) -> Response:  # fmt: skip
        is_chat, options = isinstance(asked, ChatRequest), asked.stream_options
        rendering = Choices(
            self._service, submissions, choices, job.choices, job.sampling.seed,
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            kind="chat.completion" if is_chat else "text_completion",
            chunk_kind="chat.completion.chunk" if is_chat else "text_completion",
            include_usage=bool(options and options.include_usage),
        )  # fmt: skip
        return await Answer(self._service, submissions, rendering).respond(request, bool(asked.stream))


def _tools(asked: ChatRequest) -> Sequence[Tool] | None:
    """Return the tools that the model may call."""
    return None if asked.tool_choice == "none" else asked.tools


def prompts_of(asked: CompletionRequest) -> list[str | Sequence[int]]:
    """Return the prompts of a completion. Raises ApiError for none, and for too many choices."""
    prompt = asked.prompt
    several = not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], int))
    prompts: list[str | Sequence[int]] = list(prompt) if several else [prompt]  # type: ignore[arg-type,list-item]
    if not prompts:
        raise wrong("the list of prompts is empty", "prompt", "invalid_value")
    if len(prompts) * (asked.n or 1) > MOST_CHOICES:
        raise wrong(f"a request may have {MOST_CHOICES} choices in all", "prompt", "invalid_value")
    return prompts


def _check_completion(asked: CompletionRequest) -> None:
    """Raise ApiError for fields that do not work together."""
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise refused("best_of", " other than n")
    if asked.echo and asked.logprobs is not None:
        raise refused("logprobs", " with echo")
