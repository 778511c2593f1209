"""curl: the commands of the documentation, and a stream that is cut short."""

from __future__ import annotations

import json
import subprocess
from typing import Any


def curl(*words: str) -> str:
    return subprocess.run(
        ["curl", "-sS", "--max-time", "120", *words], check=True, capture_output=True, text=True
    ).stdout


def post(address: str, *more: str, **fields: Any) -> str:
    return curl(address, "-H", "Content-Type: application/json", "-d", json.dumps(fields), *more)


def test_a_stream_has_the_text_of_the_whole_answer(url: str, model: str, messages: list[dict[str, Any]]) -> None:
    address, asked = f"{url}/v1/chat/completions", {"model": model, "messages": messages, "seed": 5, "max_tokens": 24}
    whole = json.loads(post(address, **asked))
    lines = post(address, "-N", **asked, stream=True).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    deltas = [choice["delta"] for chunk in data for choice in json.loads(chunk)["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]


def test_operators_pages(url: str) -> None:
    assert json.loads(curl(f"{url}/health")) == {"status": "ok"}
    assert json.loads(curl(f"{url}/ready")) == {"status": "ready"}
    assert json.loads(curl(f"{url}/version")).keys() == {"version"}
    assert "redraft:num_requests_running" in curl(f"{url}/metrics")


def test_errors_have_status_and_reason(url: str, model: str) -> None:
    told = post(f"{url}/v1/completions", "-w", "\n%{http_code}", model=model, prompt="a", colour="red")
    body, _, status = told.rpartition("\n")
    assert (status, json.loads(body)["error"]["param"]) == ("400", "colour")


def test_a_body_in_chunks_and_both_versions_of_http(url: str, model: str) -> None:
    asked = {"model": model, "prompt": "A queue is", "max_tokens": 4, "temperature": 0}
    answers = [
        json.loads(post(f"{url}/v1/completions", *how, **asked))["choices"]
        for how in ([], ["-H", "Transfer-Encoding: chunked"], ["--http1.0"], ["-H", "Expect: 100-continue"])
    ]
    assert all(one == answers[0] for one in answers)
