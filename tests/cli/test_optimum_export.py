"""`optimum-cli export redraft`, from an installed wheel next to optimum."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from tests.test_imports import HEAVY

from redraft.cli import optimum_export
from redraft.cli.build import build

Run = Callable[..., subprocess.CompletedProcess[str]]
HERE = Path(str(metadata.distribution("optimum").locate_file("")))


@pytest.fixture(scope="module")
def optimum_cli(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run optimum-cli in a fresh environment with our wheel and optimum, and the tests' environment for the rest.

    A path in a .pth file makes packages importable without their own .pth files, and so without the editable install.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    for part in HERE.glob("optimum-*.dist-info"):
        shutil.copytree(part, packages / part.name)
    shutil.copytree(HERE / "optimum", packages / "optimum", dirs_exist_ok=True)
    (packages / "others.pth").write_text(f"{HERE}\n")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [python, "-I", "-m", "optimum.commands.optimum_cli", *map(str, arguments)]
        environment = {"COLUMNS": "200", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)

    return run


def test_optimum_lists_and_runs_the_command(optimum_cli: Run) -> None:
    result = optimum_cli("export", "--help")
    assert result.returncode == 0, result.stderr
    assert "redraft" in result.stdout
    result = optimum_cli("export", "redraft", "-m", "none/of/these")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("redraft: error: no model 'none/of/these'")


def test_help_is_that_of_build(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert optimum_export.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: optimum-cli export redraft [OPTIONS] [" in shown
    for name in inspect.signature(build).parameters:
        option = {"out": "out", "as_json": "--json"}.get(name, "--" + name.replace("_", "-"))
        assert option in shown


def test_builds_a_bundle(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bundle"
    options = ["--eval-text=none", "--skip-check", "--max-model-len", "32"]
    assert optimum_export.run(["--model", str(checkpoint), str(out), *options]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{out}: built in ")
    assert "context 32" in shown
    assert (out / "verifier.onnx").is_file()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "Missing option '-m' / '--model'"),
        (["-m", "none", "--no-such-option"], 2, "No such option: --no-such-option"),
        (["-m", "."], 1, "config.json"),
    ],
)
def test_errors_are_those_of_build(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    assert optimum_export.run(arguments) == status
    shown = capsys.readouterr()
    (line,) = (line for line in shown.err.splitlines() if not line.startswith("["))  # without progress
    assert line.startswith("redraft: error: ")
    assert message in line
    assert shown.out == ""


def test_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("redraft.assembly.bundle.build_bundles", interrupted)
    assert optimum_export.run(["-m", str(checkpoint), str(tmp_path), "--eval-text", "none"]) == 130
    assert capsys.readouterr().err.endswith("redraft: error: interrupted\n")


def program(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run optimum-cli of this environment, in which redraft is an editable install, as if `blocked` were missing."""
    source = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
sys.argv = ["optimum-cli", *{arguments!r}]
from optimum.commands.optimum_cli import main
main()
"""
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)


def test_optimum_starts_without_heavy_libraries_and_without_redraft() -> None:
    blocked = [name for name in HEAVY if name != "optimum"]
    result = program((*blocked, "redraft", "typer"), "export", "--help")
    assert result.returncode == 0, result.stderr
    assert "redraft" in result.stdout


def test_a_missing_extra_is_one_line(checkpoint: Path) -> None:
    result = program(("onnxscript",), "export", "redraft", "-m", str(checkpoint), "--eval-text", "none")
    assert result.returncode == 1, result.stderr
    line = "building needs onnxscript, which is not installed; run `pip install 'redraft[export]'`"
    assert result.stderr.splitlines()[-1] == f"redraft: error: {line}"
