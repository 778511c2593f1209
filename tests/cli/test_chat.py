"""`redraft chat`: its answers are those of `generate --chat`, and no line that it cannot obey ends the conversation."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.conftest import Refused
from tests.little import Redraft

from redraft.cli.chat import Chat
from redraft.runtime import Runtime, SamplingParams
from redraft.runtime.conversation import Conversation

LIMIT = ("--max-new-tokens", 6)


@pytest.fixture
def runtime(bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(bundle, verify=False) as opened:
        yield opened


def talk(redraft: Redraft, bundle: Path, *lines: bytes) -> tuple[list[str], list[str]]:
    """Return the lines of the standard output and of the standard error."""
    done = redraft("chat", bundle, *LIMIT, input=b"\n".join(lines))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_answers_follow_the_whole_conversation(redraft: Redraft, bundle: Path, runtime: Runtime) -> None:
    conversation, expected = Conversation(runtime), []
    for message in ("the cat", "the dog"):
        ids = conversation.ask(message)
        expected.append(runtime.generate([ids], SamplingParams(max_tokens=6), "none")[0].text)
        conversation.answer(expected[-1])
    assert expected[0] != expected[1]
    out, _ = talk(redraft, bundle, b"the cat", b"", b"the dog")
    assert "\n".join(out) == "\n".join(expected)


def test_commands(redraft: Redraft, bundle: Path) -> None:
    lines = "/stats\n/method none\nthe cat\n/stats\n/method x\n/what\n/new\n/quit\nthe dog"
    out, err = talk(redraft, bundle, lines.encode())
    assert out[0].startswith("  drafts with none; of none, ngram")
    assert "  of 6 tokens: 6 by the model itself" in out
    assert not any("answers" in line for line in out)
    assert [line.split(";")[0] for line in err] == [
        "redraft: there is no answer yet", "redraft: there is no method 'x'", "redraft: there is no command /what",
    ]  # fmt: skip
    assert len(out) == 5  # nothing answers what follows /quit


def test_messages_that_have_no_answer_do_not_end_the_conversation(redraft: Redraft, bundle: Path) -> None:
    """One that is not UTF-8 and one past the context; neither is part of the conversation."""
    out, err = talk(redraft, bundle, b"\xff", b"the cat " * 60, b"the cat")
    assert err[0] == "redraft: the prompt is not UTF-8 (character 0); convert it first"
    assert "tokens and the context holds 64" in err[1]
    assert err[1].endswith("/new starts over")
    assert len(err) == 2
    assert out == talk(redraft, bundle, b"the cat")[0]


def test_refusals(refused: Refused, bundle: Path, with_template: Any, tmp_path: Path) -> None:
    assert "chat template" in refused("chat", with_template(None), status=2, text="a\n")
    assert "no method 'x'" in refused("chat", bundle, "--method", "x", status=2, text="a\n")
    refused("chat", tmp_path / "none", status=1, text="a\n")


def test_an_interrupt_ends_the_answer_alone(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(runtime, None, SamplingParams(max_tokens=20, ignore_eos=True), "none")
    printed: list[str] = []

    def interrupt(text: str = "", nl: bool = True) -> None:
        if not nl:
            printed.append(text)
            if len(printed) == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(typer, "echo", interrupt)
    assert chat.take("the cat")
    assert len(printed) == 3
    assert chat._conversation._messages[-1] == {"role": "assistant", "content": "".join(printed)}
    assert chat.take("the dog")
    assert len(printed) == 23
