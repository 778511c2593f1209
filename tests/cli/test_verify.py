"""`--verify`: every command that opens a bundle passes it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft import engines
from redraft.cli import main
from redraft.cli.profile import ProfileRun
from redraft.errors import BundleError
from redraft.runtime import api


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
