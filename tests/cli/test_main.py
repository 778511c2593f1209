"""The end of any command: statuses, tracebacks only on request; and `--verify`, which several commands have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.little import Redraft

from redraft import engines
from redraft.cli import main
from redraft.cli.console import Finding
from redraft.cli.profile import ProfileRun
from redraft.errors import BundleError
from redraft.runtime import api


def test_help_version_and_an_unknown_command(redraft: Redraft) -> None:
    assert redraft("--version").stdout.startswith("redraft 0.")
    result = redraft()
    assert result.returncode == 2
    assert "Usage: redraft" in result.stdout + result.stderr
    result = redraft("conjure")
    assert result.returncode == 2
    assert result.stderr.startswith("redraft: error: No such command 'conjure'")


def test_defect_is_one_line_and_its_traceback_comes_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a\ndefect")

    monkeypatch.setattr(main, "app", broken)
    monkeypatch.delenv("REDRAFT_DEBUG", raising=False)
    assert main.run([]) == 1
    assert capsys.readouterr().err.startswith("redraft: error: unexpected ZeroDivisionError: a defect; run again with")
    monkeypatch.setenv("REDRAFT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main.run([])


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> list[Finding]:
        raise KeyboardInterrupt

    monkeypatch.setattr("redraft.cli.doctor.examine", interrupted)
    assert main.run(["doctor"]) == 130
    assert capsys.readouterr().err == "redraft: error: interrupted\n"


@pytest.mark.parametrize(("flags", "expected"), [([], None), (["--verify"], True), (["--no-verify"], False)])
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "a", "--engines"],
        ["bench", "--prompts", "prompts.jsonl", "--engines"],
        ["profile", "--prompt", "a", "--engines"],
        ["demo", "--engines"],
        ["doctor", "--engines"],
        ["inspect"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_passes_verify_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], flags: list[str], expected: bool | None
) -> None:
    found = []

    def refuse(path: Path, verify: bool | None = None) -> None:
        found.append((path, verify))
        raise BundleError("refused")

    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"id": "1", "category": "code", "turns": ["a"]}\n')
    monkeypatch.setattr(engines, "open_bundle", refuse)
    monkeypatch.setattr(api, "open_bundle", refuse)
    assert main.run([*command, "folder", *flags]) == 1
    assert found == [(Path("folder"), expected)]


@pytest.mark.parametrize(("verify", "flags"), [(None, []), (True, ["--verify"]), (False, ["--no-verify"])])
def test_a_profile_under_nsight_is_asked_for_the_same_check(verify: bool | None, flags: list[str]) -> None:
    arguments = ProfileRun(Path("folder"), "a", None, 1, None, None, None, verify).arguments(Path("prompt"))
    assert [word for word in arguments if "verify" in word] == flags
