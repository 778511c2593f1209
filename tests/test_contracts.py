"""The import and type checks must see every folder: both tools silently skip mapped ones if the typed tree is wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("redraft", "assembly", "bench", "cli", "engines", "export", "plugins", "runtime", "train")
FORBIDDEN = (
    ("runtime/planted", "torch"),
    ("runtime/drafters/planted", "onnxruntime"),
    ("runtime/planted_export", "redraft.export"),
    ("engines/planted", "redraft.runtime"),
    ("export/planted", "redraft.engines"),
    ("train/planted", "redraft.runtime"),
    ("bench/planted", "redraft.cli"),
    ("bench/planted_experiment", "experiments.lookups"),
    ("assembly/planted", "redraft.cli"),
    ("runtime/planted_assembly", "redraft.assembly"),
    ("redraft/errors", "redraft.engines"),
    ("cli/planted", "onnxruntime"),
    ("runtime/planted_tensorrt", "redraft.engines.tensorrt.target"),
)
"""Modules, and what they may not import."""


def check(tree: Path, target: str) -> subprocess.CompletedProcess[str]:
    """Run a make target in `tree` with this interpreter's environment instead of an installation."""
    command = ["make", "-C", str(tree), "-o", f"{sys.prefix}/installed", f"VENV={sys.prefix}", target]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    return result


def copy_settings(root: Path, tree: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "circles.toml", "constraints.txt"):
        shutil.copy(root / name, tree)


@pytest.fixture
def tree(root: Path, tmp_path: Path) -> Path:
    """A copy of the sources, in which tests plant errors."""
    for package in PACKAGES:
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    copy_settings(root, tmp_path)
    return tmp_path


def test_forbidden_imports_are_caught(tree: Path) -> None:
    for module, forbidden in FORBIDDEN:
        with (tree / f"{module}.py").open("a") as file:
            file.write(f'"""Planted."""\n\nimport {forbidden}\n')
    shown = check(tree, "check-imports").stdout
    for module, forbidden in FORBIDDEN:
        name = module.removeprefix("redraft/").replace("/", ".")
        imported = forbidden if forbidden.startswith("redraft.") else forbidden.partition(".")[0]
        assert f"redraft.{name} -> {imported}" in shown


def test_a_circle_is_caught(tree: Path) -> None:
    with (tree / "redraft/errors.py").open("a") as file:
        file.write("import redraft.config\n")
    assert "no circles BROKEN" in check(tree, "check-imports").stdout


def test_type_errors_are_caught_in_every_package(root: Path, tmp_path: Path) -> None:
    """The packages are empty but for the errors, which saves a minute."""
    copy_settings(root, tmp_path)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "planted.py").write_text('"""Planted."""\n\nlength: int = "three"\n')
    shown = check(tmp_path, "check-types").stdout
    for package in PACKAGES:
        file = "redraft/planted.py" if package == "redraft" else f"redraft/{package}/planted.py"
        assert f"{file}:3: error: Incompatible types in assignment" in shown
