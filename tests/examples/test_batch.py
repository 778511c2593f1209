"""The batch job: killed and started again, it goes on, and answers are those of one request at a time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from redraft.errors import UsageError
from redraft.runtime import Runtime, SamplingParams
from tests.conftest import ROOT
from tests.examples.running import load, open_toys
from tests.runtime.fakes import NO_NUMBERS, mixing_rule
from tests.runtime.server.serving import TEMPLATE, USER

WAIT = 120
LINES: list[dict[str, Any]] = [
    {"id": number, "prompt": "abcdefg"[: number % 7 + 1], "max_tokens": 5 + number, "temperature": 0.5 * (number % 3)}
    for number in range(30)
]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def texts(path: Path) -> dict[Any, str]:
    """Return the answers by id, each of which is there once."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({answer["id"] for answer in answers}) == len(answers)
    return {answer["id"]: answer["text"] for answer in answers}


def alone(runtime: Runtime, line: dict[str, Any]) -> str:
    """Return the text of a line's request without others."""
    params = {name: value for name, value in line.items() if name not in ("id", "prompt")}
    return runtime.generate([line["prompt"]], SamplingParams(**params))[0].text


def test_a_job_in_two_parts_has_the_answers_of_one_request_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, opened = load("batch"), open_toys(monkeypatch)
    prompts, out, answers = write(tmp_path / "in", LINES), tmp_path / "out", module.answers

    def stopped(*arguments: Any) -> Any:
        for number, answer in enumerate(answers(*arguments)):
            if number == 15:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(module, "answers", stopped)
    with pytest.raises(KeyboardInterrupt):
        module.main("engines", str(prompts), str(out))
    first = texts(out)
    assert len(first) == 15
    with out.open("a") as file:
        file.write('{"id": 16, "te')  # killed while it wrote
    monkeypatch.setattr(module, "answers", answers)
    module.main("engines", str(prompts), str(out))
    found = texts(out)
    assert {name: found[name] for name in first} == first
    assert len(opened) == 2
    with Runtime.open("engines") as runtime:
        assert found == {line["id"]: alone(runtime, line) for line in LINES}


def test_a_line_may_be_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = load("batch"), open_toys(monkeypatch)
    assert TEMPLATE.endswith("assistant: ")
    lines = [
        {"id": 1, "messages": [USER], "max_tokens": 9},
        {"id": 2, "prompt": "user: hi\nassistant: ", "max_tokens": 9},
    ]
    module.main("engines", str(write(tmp_path / "in", lines)), str(tmp_path / "out"))
    found = texts(tmp_path / "out")
    assert found[1] == found[2] != ""


def test_a_line_that_fails_has_an_error_and_the_others_have_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("batch")
    open_toys(monkeypatch, lambda tokens: NO_NUMBERS if bytes(tokens).startswith(b"boom") else mixing_rule(tokens))
    wrong = {
        "long": {"prompt": "a" * 9999}, "field": {"prompt": "a", "top": 1}, "none": {}, "fails": {"prompt": "boom"},
        "role": {"messages": [1]}, "value": {"prompt": "a", "top_p": 2},
    }  # fmt: skip
    lines = [{"id": name, **line} for name, line in wrong.items()]
    lines = [line for pair in zip(LINES, lines, strict=False) for line in pair] + LINES[len(lines) :]
    prompts, out = write(tmp_path / "in", lines), tmp_path / "out"
    module.main("engines", str(prompts), str(out))
    found = {answer["id"]: answer for answer in map(json.loads, out.read_text().splitlines())}
    assert found.keys() == {line["id"] for line in lines}
    assert {name for name, answer in found.items() if "error" in answer} == wrong.keys()
    whole = out.read_bytes()
    module.main("engines", str(prompts), str(out))  # no line is left
    assert out.read_bytes() == whole


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    lines = [{"id": 1, "prompt": "a\u2028b\x85c\x0cd"}, {"id": 2, "prompt": "e"}]
    path = tmp_path / "in"
    path.write_bytes("\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode())
    assert load("batch").read_lines(path) == lines


@pytest.mark.parametrize("lines", [[{"prompt": "a"}], [{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}]])
def test_lines_without_ids_of_their_own_are_refused(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="id of its own"):
        load("batch").read_lines(write(tmp_path / "in", lines))


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on(bundle: Path, tmp_path: Path) -> None:
    lines = [{"id": number, "prompt": "the cat", "max_tokens": 40, "seed": number} for number in range(300)]
    lines = [{**line, "temperature": 1.0, "ignore_eos": True} for line in lines]
    prompts, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, str(ROOT / "examples/batch.py"), str(bundle), str(prompts), str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + WAIT
        while not out.exists() or out.read_bytes().count(b"\n") < 20:
            assert process.poll() is None
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
    before = out.read_bytes().count(b"\n")
    assert before < len(lines)
    subprocess.run(command, check=True, timeout=WAIT, stdout=subprocess.DEVNULL)
    found = texts(out)
    with Runtime.open(bundle, threads=1, verify=False) as runtime:
        assert found == {line["id"]: alone(runtime, line) for line in lines}
