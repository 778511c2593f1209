"""A bundle in Triton's Python backend: docs/deploying.md. The requests of all clients share one decode loop."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from redraft.errors import UsageError
from redraft.runtime import QueueFull, RequestError, Runtime, SamplingParams, SpeculationParams, Submission
from redraft.runtime.params import SEEDS
from redraft.runtime.server.messages import template_messages
from redraft.runtime.server.usage import speculation, usage

CANCEL_SECONDS = 0.1
"""Time between two looks whether a client has cancelled its request."""
PROGRESS_SECONDS = 30.0
"""Time without a step after which the model is not ready, while requests wait."""
_SAMPLING = {field.name for field in fields(SamplingParams)} - {"logits_processors", "logprobs"}
_SPECULATION = {"method", "prediction"}


class TritonPythonModel:
    """The model as Triton calls it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle. `args` has texts: the model's configuration as JSON, its folder and its version."""
        given = {name: value["string_value"] for name, value in json.loads(args["model_config"])["parameters"].items()}
        self._runtime = Runtime.open(
            Path(args["model_repository"], args["model_version"], given["engines"]),
            max_num_seqs=int(given["max_num_seqs"]), max_waiting=int(given["max_queued_requests"]),
            device=given.get("device"),
        )  # fmt: skip
        try:
            self._defaults = self._runtime.model_sampling()
        except UsageError:  # the bundle keeps none
            self._defaults = SamplingParams()
        self._runtime.warm()
        gc.collect()
        gc.freeze()

    def is_ready(self) -> bool:
        """Return false if the decode loop has died, or hangs."""
        try:
            self._runtime.check_running()
        except UsageError:
            return False
        health = self._runtime.health
        return not health.requests or health.idle_seconds < PROGRESS_SECONDS

    async def execute(self, requests: list[Any]) -> None:
        """Answer requests. Triton calls this again before it has returned."""
        await asyncio.gather(*map(self._answer, requests))

    def finalize(self) -> None:
        """Release the engines."""
        self._runtime.close()

    async def _answer(self, request: Any) -> None:
        """Send all responses to a request, whatever happens: Triton waits for the last one."""
        sender = request.get_response_sender()
        try:
            last = await self._write(request, sender)
        except Exception as error:  # noqa: BLE001 - the client gets it
            last = pb_utils.InferenceResponse(error=_error(error))
        sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _write(self, request: Any, sender: Any) -> Any:
        """Send the texts of a stream as they come, and return the last response."""
        tensor = pb_utils.get_input_tensor_by_name(request, "stream")
        stream = tensor is not None and bool(tensor.as_numpy()[0])
        submission, seed = await asyncio.to_thread(self._submit, request)
        watching = asyncio.create_task(_abort_if_cancelled(sender, submission))
        unsent = ""
        try:
            async with aclosing(submission.written()) as outputs:
                async for text, output, _ in outputs:
                    unsent += text
                    if stream and unsent and output.finish_reason is None:
                        sender.send(_response(unsent))
                        unsent = ""
        finally:
            watching.cancel()
        generation = submission.result()
        if generation.finish_reason == "abort":
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("the request was cancelled", pb_utils.TritonError.CANCELLED)
            )
        figures = {**usage([submission.request], 1), "redraft": speculation([submission.request], seed)}
        return _response(unsent, str(generation.finish_reason), json.dumps(figures))

    def _submit(self, request: Any) -> tuple[Submission, int]:
        """Start a request, and return its seed too. Raises UsageError for one that is wrong, and QueueFull."""
        given = _json(request, "sampling_parameters", dict) or {}
        if unknown := sorted(given.keys() - _SAMPLING - _SPECULATION):
            raise UsageError(f"sampling_parameters: {unknown[0]} is unknown")
        drafts = SpeculationParams(**{name: given.pop(name) for name in _SPECULATION & given.keys()})
        if isinstance(biases := given.get("logit_bias"), dict):
            try:
                given["logit_bias"] = {int(token): bias for token, bias in biases.items()}  # names in JSON are texts
            except ValueError:
                raise UsageError("logit_bias must map token ids to numbers") from None
        given.setdefault("seed", secrets.randbelow(SEEDS))  # as over HTTP; `usage` tells it
        params, timeout = replace(self._defaults, **given), request.timeout() / 1e6 or None
        return self._runtime.submit(self._prompt(request), params, drafts, timeout=timeout), params.seed

    def _prompt(self, request: Any) -> str | list[int]:
        text, messages = _text(request, "text_input"), _json(request, "messages", list)
        if messages is None and text is not None:
            return text
        if messages is None or text is not None:
            raise UsageError("give one of text_input and messages")
        tokenizer = self._runtime.tokenizer
        prompt = tokenizer.apply_chat_template(template_messages(messages))
        return tokenizer.encode(prompt, special_tokens=False)


async def _abort_if_cancelled(sender: Any, submission: Submission) -> None:
    """End a request whose client has cancelled it."""
    while not sender.is_cancelled():
        await asyncio.sleep(CANCEL_SECONDS)
    submission.abort()


def _text(request: Any, name: str) -> str | None:
    """Return the text of an input; None if the request lacks it. Raises UsageError if it is not UTF-8."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    try:
        return None if tensor is None else bytes(tensor.as_numpy()[0]).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8") from None


def _json(request: Any, name: str, kind: type) -> Any:
    """Return the value of an input that is JSON; None if the request lacks it. Raises UsageError for another type."""
    text = _text(request, name)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, kind):
        raise UsageError(f"{name} must be {'an object' if kind is dict else 'a list'} of JSON")
    return found


def _response(text: str, finish_reason: str = "", usage: str = "") -> Any:
    outputs = {"text_output": text, "finish_reason": finish_reason, "usage": usage}
    return pb_utils.InferenceResponse(
        output_tensors=[
            pb_utils.Tensor(name, np.array([value.encode()], np.object_)) for name, value in outputs.items()
        ]
    )


def _error(error: Exception) -> Any:
    """Return Triton's error for one of the runtime."""
    code = pb_utils.TritonError.INTERNAL
    if isinstance(error, QueueFull):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, UsageError) and not isinstance(error, RequestError):
        code = pb_utils.TritonError.INVALID_ARG
    return pb_utils.TritonError(str(error), code)
