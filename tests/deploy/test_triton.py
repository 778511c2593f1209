"""Triton's model answers as the runtime does: whole, in pieces, with errors, and until it is cancelled."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from redraft.runtime import Runtime, SamplingParams, Submission
from tests.conftest import ROOT
from tests.deploy import triton_stub
from tests.deploy.triton_stub import InferenceRequest, InferenceResponse, Tensor, TritonError
from tests.runtime.fakes import fix_costs
from tests.runtime.server.serving import WAIT, Gate, toy

FOLDER = ROOT / "deploy/triton/redraft"
OUTPUTS = ("text_output", "finish_reason", "usage")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The model's file, loaded as Triton loads it."""
    fix_costs(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_stub)
    spec = importlib.util.spec_from_file_location("model", FOLDER / "1/model.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def arguments(folder: Path) -> dict[str, str]:
    """Return what Triton gives a model, with the parameters of config.pbtxt."""
    text = (FOLDER / "config.pbtxt").read_text()
    given = re.findall(r'key: "(\w+)" value \{ string_value: "(\w+)" \}', text)
    parameters = {name: {"string_value": value} for name, value in given}
    return {
        "model_config": json.dumps({"name": "redraft", "parameters": parameters}),
        "model_repository": str(folder), "model_version": "1", "model_name": "redraft",
    }  # fmt: skip


class Triton:
    """A model instance, and the event loop in which Triton runs its coroutines."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def ask(self, timeout: int = 0, **inputs: object) -> InferenceRequest:
        """Begin a request, whose texts are bytes as Triton gives them."""
        tensors = []
        for name, value in inputs.items():
            if not isinstance(value, bool):
                value = (value if isinstance(value, str) else json.dumps(value)).encode()
            kind = np.bool_ if isinstance(value, bool) else np.object_
            tensors.append(Tensor(name, np.array([value], kind)))
        request = InferenceRequest(tensors, timeout)
        asyncio.run_coroutine_threadsafe(self.model.execute([request]), self.loop)
        return request

    def answer(self, timeout: int = 0, **inputs: object) -> list[InferenceResponse]:
        """Return all responses to a request."""
        return ended(self.ask(timeout, **inputs))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT)
        self.loop.close()
        self.model.finalize()


def ended(request: InferenceRequest) -> list[InferenceResponse]:
    """Return all responses to a request, when it has ended."""
    assert request.sender.closed.wait(WAIT)
    return request.sender.responses


def texts(response: InferenceResponse) -> dict[str, str]:
    """Return the outputs of a response, whose names, types and shapes are those of config.pbtxt."""
    assert not response.has_error(), response.error().message()
    found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    assert tuple(found) == OUTPUTS
    assert all(array.dtype == np.object_ and array.shape == (1,) for array in found.values())
    return {name: array[0].decode() for name, array in found.items()}


def error_of(responses: list[InferenceResponse]) -> TritonError:
    (response,) = responses
    assert response.has_error()
    return response.error()


@contextmanager
def served(module: ModuleType, monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Iterator[Triton]:
    opened: list[tuple[Path, dict[str, Any]]] = []

    def opening(path: Path, **options: Any) -> Runtime:
        opened.append((path, options))
        return runtime

    monkeypatch.setattr(Runtime, "open", opening)
    model = module.TritonPythonModel()
    model.initialize(arguments(Path("/models/redraft")))
    path, options = opened[0]
    assert path == Path("/models/redraft/1/engines")
    assert options == {"max_num_seqs": 8, "max_waiting": 256, "device": None}
    triton = Triton(model)
    try:
        yield triton
    finally:
        triton.close()


@pytest.fixture
def triton(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    with toy() as runtime, served(module, monkeypatch, runtime) as found:
        yield found


def test_an_answer_and_the_pieces_of_a_stream_are_the_text_of_the_runtime(triton: Triton) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=7, stop=("ee",))
    with toy() as alone:
        (expected,) = alone.generate(["hello"], params)
    given = {"max_tokens": 40, "temperature": 0.8, "seed": 7, "stop": ["ee"]}
    asked = [triton.ask(text_input="hello", sampling_parameters=given, stream=stream) for stream in (False, True)]
    (whole,), pieces = (list(map(texts, ended(one))) for one in asked)
    assert (whole["text_output"], whole["finish_reason"]) == (expected.text, expected.finish_reason)
    assert len(pieces) > 2
    assert "".join(piece["text_output"] for piece in pieces) == expected.text
    assert all(piece["text_output"] and not piece["finish_reason"] + piece["usage"] for piece in pieces[:-1])
    for last in (whole, pieces[-1]):
        figures = json.loads(last["usage"])
        assert (figures["prompt_tokens"], figures["completion_tokens"]) == (5, len(expected.token_ids))
        assert figures["redraft"]["seed"] == 7


def test_messages_go_through_the_chat_template(triton: Triton) -> None:
    given = {"max_tokens": 12, "logit_bias": {"97": 5}}
    (chat,) = map(texts, triton.answer(messages=[{"role": "user", "content": "hi"}], sampling_parameters=given))
    (same,) = map(texts, triton.answer(text_input="user: hi\nassistant: ", sampling_parameters=given))
    assert chat["text_output"] == same["text_output"] != ""


def test_without_a_seed_each_request_draws_one_that_repeats_it(triton: Triton) -> None:
    given = {"max_tokens": 40, "temperature": 1.5}
    first, second = (texts(triton.answer(text_input="hello", sampling_parameters=given)[0]) for _ in range(2))
    seeds = [json.loads(one["usage"])["redraft"]["seed"] for one in (first, second)]
    assert seeds[0] != seeds[1]
    (again,) = map(texts, triton.answer(text_input="hello", sampling_parameters={**given, "seed": seeds[0]}))
    assert again["text_output"] == first["text_output"] != second["text_output"]


def test_requests_choose_how_they_draft(triton: Triton) -> None:
    given = {"max_tokens": 30, "method": "ngram"}
    plain, drafted, predicted = (
        texts(triton.answer(text_input="hello", sampling_parameters=one)[0])
        for one in ({**given, "method": "none"}, given, {**given, "prediction": "abcdeabcde"})
    )
    assert plain["text_output"] == drafted["text_output"] == predicted["text_output"]
    steps, drafts = (json.loads(one["usage"])["redraft"] for one in (plain, predicted))
    assert steps["drafted"] == 0 < drafts["drafted"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "give one of text_input and messages"),
        ({"text_input": "a", "messages": []}, "give one of text_input and messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages\\[0\\].role"),
        ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters is not JSON"),
        ({"text_input": "a", "sampling_parameters": []}, "sampling_parameters must be an object"),
        ({"text_input": "a", "sampling_parameters": {"top": 1}}, "top is unknown"),
        ({"text_input": "a", "sampling_parameters": {"logprobs": 1}}, "logprobs is unknown"),
        ({"text_input": "a", "sampling_parameters": {"top_p": 2}}, "top_p must be"),
        ({"text_input": "a", "sampling_parameters": {"method": "magic"}}, "magic"),
        ({"text_input": "a", "sampling_parameters": {"logit_bias": {"x": 1}}}, "logit_bias must"),
        ({"text_input": "a", "sampling_parameters": {"logit_bias": {"1": "x"}}}, "logit_bias"),
        ({"text_input": "a" * 300}, "300"),
    ],
)
def test_a_wrong_request_gets_an_error_that_names_the_fault(triton: Triton, inputs: Any, message: str) -> None:
    error = error_of(triton.answer(**inputs))
    assert error.code() == TritonError.INVALID_ARG
    assert re.search(message, error.message())
    assert texts(triton.answer(text_input="hello")[0])["finish_reason"] == "length"


def test_a_cancelled_request_ends_with_an_error(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, aborted, abort = Gate(20), threading.Event(), Submission.abort

    def noted(submission: Submission) -> None:
        abort(submission)
        aborted.set()

    monkeypatch.setattr(Submission, "abort", noted)
    with toy(gate) as runtime, served(module, monkeypatch, runtime) as triton:
        request = triton.ask(text_input="hello", sampling_parameters={"max_tokens": 150}, stream=True)
        assert gate.reached.wait(WAIT)
        request.sender.cancelled.set()
        assert aborted.wait(WAIT)
        gate.opened.set()
        last = ended(request)[-1]
        assert last.error().code() == TritonError.CANCELLED


def test_a_full_queue_and_a_time_limit_are_told(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(20)
    with toy(gate, max_num_seqs=1, max_waiting=0) as runtime, served(module, monkeypatch, runtime) as triton:
        (limited,) = triton.answer(timeout=1, text_input="hello", sampling_parameters={"max_tokens": 100})
        assert texts(limited)["finish_reason"] == "timeout"
        running = triton.ask(text_input="hello", sampling_parameters={"max_tokens": 100})
        assert gate.reached.wait(WAIT)
        assert triton.model.is_ready()
        refused = error_of(triton.answer(text_input="hello"))
        gate.opened.set()
        assert refused.code() == TritonError.UNAVAILABLE
        ended(running)


def test_a_fault_of_the_model_is_an_internal_error(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tokens: list[int]) -> int:
        raise RuntimeError("no memory")

    with toy(broken) as runtime, served(module, monkeypatch, runtime) as triton:
        error = error_of(triton.answer(text_input="hello"))
        assert error.code() == TritonError.INTERNAL
        assert "no memory" in error.message()


def test_it_is_not_ready_after_its_runtime_has_closed(triton: Triton) -> None:
    assert triton.model.is_ready()
    triton.model.finalize()
    assert not triton.model.is_ready()


@pytest.mark.slow
def test_it_opens_a_bundle(module: ModuleType, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/engines").symlink_to(bundle)
    model = module.TritonPythonModel()
    model.initialize(arguments(tmp_path))
    triton = Triton(model)
    try:
        (answer,) = map(texts, triton.answer(text_input="the cat", sampling_parameters={"max_tokens": 5}))
    finally:
        triton.close()
    with Runtime.open(bundle, threads=1, verify=False, max_num_seqs=8) as runtime:
        (expected,) = runtime.generate(["the cat"], SamplingParams(max_tokens=5))
    assert answer["text_output"] == expected.text
