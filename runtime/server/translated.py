"""The endpoints of APIs whose requests are translated to chats."""

from __future__ import annotations

from collections.abc import Callable

from anyio import to_thread
from fastapi import Request
from fastapi.responses import Response

from redraft.runtime.server.anthropic_answer import MessageRendering
from redraft.runtime.server.anthropic_fields import CountTokensRequest, MessagesRequest
from redraft.runtime.server.anthropic_request import chat_of_messages, prompt_of_messages
from redraft.runtime.server.endpoints import Endpoints, StartedChat
from redraft.runtime.server.fields import ChatRequest
from redraft.runtime.server.prompts import template_source
from redraft.runtime.server.rendering import Json
from redraft.runtime.server.responses_answer import ResponseRendering
from redraft.runtime.server.responses_fields import ResponsesRequest
from redraft.runtime.server.responses_request import chat_of_response
from redraft.runtime.server.streaming import Answer
from redraft.runtime.server.translation import Translation


class TranslatedEndpoints(Endpoints):
    """The endpoints of one service, with those of other APIs."""

    async def respond(self, request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's Responses."""
        asked = await self._read(request, ResponsesRequest)
        chat = await self._start_translated(lambda: chat_of_response(asked))
        rendering = ResponseRendering(asked, chat.job, chat.reader(), self._service)
        return await Answer(self._service, chat.submissions, rendering).respond(request, bool(asked.stream))

    async def message(self, request: Request) -> Response:
        """Answer a conversation in the form of Anthropic's Messages."""
        asked = await self._read(request, MessagesRequest)
        template = template_source(self._tokenizer, bool(asked.tools))
        chat = await self._start_translated(lambda: chat_of_messages(asked, template))
        rendering = MessageRendering(chat.job, chat.reader(), self._service)
        return await Answer(self._service, chat.submissions, rendering).respond(request, bool(asked.stream))

    async def count_tokens(self, request: Request) -> Json:
        """Return the number of tokens of the prompt that a request to `/v1/messages` has, also above its limit."""
        asked = await self._read(request, CountTokensRequest)
        template = template_source(self._tokenizer, bool(asked.tools))
        translation, chat = await self._translated(lambda: prompt_of_messages(asked, template))
        with translation.naming():
            ids = await to_thread.run_sync(lambda: self._tokenizer.encode(self._chat_text(chat), special_tokens=False))
        return {"input_tokens": len(ids)}

    async def _translated(self, translate: Callable[[], Translation]) -> tuple[Translation, ChatRequest]:
        """Translate in another thread, since a request may be large. Raises ApiError with the names of the request."""

        def run() -> tuple[Translation, ChatRequest]:
            translation = translate()
            with translation.naming():
                return translation, translation.chat(self._service.settings.allow_unknown_fields)

        return await to_thread.run_sync(run)

    async def _start_translated(self, translate: Callable[[], Translation]) -> StartedChat:
        """Start a translated chat. Raises ApiError with the names of the request."""
        translation, chat = await self._translated(translate)
        with translation.naming():
            return await self._start_chat(chat)
