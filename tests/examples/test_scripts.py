"""The plain script and OpenAI's client print what the runtime and the server say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.examples.running import load, open_toys
from tests.runtime.fakes import EOS, know_costs, mixing_rule, plain
from tests.runtime.server.serving import HERMES, TEMPLATE, listening, toy

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def says(tokens: list[int]) -> int:
    """Return the next byte of a model that calls the tool if there is one, and then tells what the tool said."""
    text = bytes(token for token in tokens if token < 256).decode()
    before, _, written = text.rpartition("assistant: ")
    *_, written = written.rpartition("<think></think>")
    answer = "It is warm."
    if "<tool_call>1" in text:
        answer = "It is sunny." if "tool: sunny in Paris" in before else CALL
    return answer.encode()[len(written)] if len(written) < len(answer) else EOS


def test_the_plain_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    open_toys(monkeypatch)
    load("plain").main("engines")
    first, *figures = capsys.readouterr().out.splitlines()
    assert first == bytes(plain(mixing_rule, list(b"def main():"), 48)).decode()
    assert [line.partition(":")[0] for line in figures] == ["plain", "ngram", "prediction"]
    assert figures[0] == "plain: 1.00 tokens a step"


def test_openais_client(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    know_costs(monkeypatch)
    with toy(says, template=HERMES) as runtime, listening(runtime) as (url, _):
        load("openai_client").main(url, "toy")
    whole, figures, *others = capsys.readouterr().out.splitlines()
    assert whole == "whole: It is warm."
    assert figures.startswith("figures: 74 tokens, ")
    assert others == [
        "stream with False: It is warm.",
        "stream with {'method': 'ngram', 'num_speculative_tokens': 4}: It is warm.",
        'tools: weather {"city": "Paris"} -> sunny in Paris',
        "tools: It is sunny.",
    ]


def test_openais_client_with_a_model_that_has_no_tools(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    know_costs(monkeypatch)
    with toy(says, template=TEMPLATE) as runtime, listening(runtime) as (url, _):
        load("openai_client").main(url, "toy")
    assert "tools: tools are not supported with this model" in capsys.readouterr().out


@pytest.mark.slow
def test_the_plain_script_as_a_user_runs_it(bundle: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/plain.py"), str(bundle)]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert "tokens a step" in done.stdout
