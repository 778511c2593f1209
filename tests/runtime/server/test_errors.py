"""Errors: no answer has a path of the machine."""

from __future__ import annotations

import pytest

from redraft.errors import BackendError
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.server.errors import ApiError, failure_of, without_paths
from tests.runtime.drafts import sequence
from tests.runtime.server.serving import ask, client_of, error_of, toy


def test_no_path_of_the_machine_is_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as runtime:
        client = client_of(runtime)

        def submit(*_: object, **__: object) -> None:
            raise BackendError("/srv/models/x.onnx cannot be read")

        monkeypatch.setattr(runtime, "submit", submit)
        assert error_of(ask(client), 500)["message"] == "… cannot be read"

        def fault(*_: object, **__: object) -> None:
            raise ValueError("/srv/models")

        monkeypatch.setattr(runtime, "submit", fault)
        assert error_of(ask(client), 500)["message"] == "the server failed"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("open '/a/b c': no", "open '… c': no"), ("see ~/x.json.", "see …."), ("./a/b, or", "…, or"),
        ("1/2 and and/or", "1/2 and and/or"), ("'build/engines/demo/x.bin' is", "'…' is"),
        ("in engines/demo/v1: no", "in …: no"),
        ("models/x.onnx.", "…."), ("tokens/s. N/A", "tokens/s. N/A"), ("</s> ends", "</s> ends"), ("/", "/"),
    ],
)  # fmt: skip
def test_paths_are_left_out(text: str, shown: str) -> None:
    assert without_paths(text) == shown
    for status in (500, 503):
        assert ApiError(status, text).body["error"]["message"] == shown


@pytest.mark.parametrize(
    ("tokens", "limits", "code"),
    [(0, (2.0, 1.0), "first_token_timeout"), (0, (1.0, 2.0), "timeout"), (0, (1.0, None), "timeout"),
     (1, (1.0, 1.0), "timeout")],
)  # fmt: skip
def test_a_timeout_names_the_limit_that_was_reached(tokens: int, limits: tuple[float, float | None], code: str) -> None:
    request = sequence()
    request.tokens += [97] * tokens
    request.deadline, request.first_token_deadline = limits
    failure = failure_of(RequestOutput(request, finish_reason="timeout"))
    assert failure is not None
    assert (failure.status, failure.code) == (504, code)
