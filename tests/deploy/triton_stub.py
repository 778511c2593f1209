"""`triton_python_backend_utils` as Triton's Python backend gives it to a model, without a server.

Names, parameters and refusals are those of the backend's own module. What a request was sent is kept in its sender.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    """What the backend raises for a wrong call."""


class TritonError:
    """An error of a response."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message


class Tensor:
    """An input or an output. Texts are objects: the backend gives inputs as bytes."""

    def __init__(self, name: str, values: np.ndarray, /) -> None:
        if not isinstance(name, str) or not isinstance(values, np.ndarray):
            raise TypeError("a tensor has a name and an array")
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class InferenceResponse:
    """Outputs, or an error."""

    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None, parameters: dict | None = None
    ) -> None:
        self._outputs, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class InferenceResponseSender:
    """Takes the responses to one request.   first, closed: set with the first and the last response."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.first, self.closed, self.cancelled = threading.Event(), threading.Event(), threading.Event()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException("a response must be provided when the flags are zero")
        if self.closed.is_set():
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is not None:
            self.responses.append(response)
            self.first.set()
        if flags:
            self.closed.set()

    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()


class InferenceRequest:
    """A request with inputs.   timeout: in microseconds; 0 is none."""

    def __init__(self, inputs: Sequence[Tensor], timeout: int = 0) -> None:
        self._inputs, self._timeout = list(inputs), timeout
        self.sender = InferenceResponseSender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def timeout(self) -> int:
        return self._timeout

    def get_response_sender(self) -> InferenceResponseSender:
        return self.sender

    def is_cancelled(self) -> bool:
        return self.sender.is_cancelled()


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input; None if the request lacks it."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)
