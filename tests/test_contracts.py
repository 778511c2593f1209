"""The import and type checks must see every folder: both tools silently skip mapped ones if the typed tree is wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("redraft", "assembly", "bench", "cli", "engines", "export", "plugins", "runtime", "train")
TYPE_ERROR = '"""Planted."""\n\nlength: int = "three"\n'


@pytest.fixture
def tree(root: Path, tmp_path: Path) -> Path:
    """A copy of the sources, in which tests plant errors."""
    for package in PACKAGES:
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "circles.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    return tmp_path


def check(tree: Path, target: str, *variables: str) -> subprocess.CompletedProcess[str]:
    """Run a make target in `tree` with this interpreter's environment instead of an installation."""
    environment = f"VENV={sys.prefix}"
    command = ["make", "-C", str(tree), "-o", f"{sys.prefix}/installed", environment, target, *variables]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("runtime/planted.py", "import torch"),
        ("runtime/drafters/planted.py", "import onnxruntime"),
        ("runtime/planted.py", "import redraft.export"),
        ("engines/planted.py", "import redraft.runtime"),
        ("export/planted.py", "import redraft.engines"),
        ("train/planted.py", "import redraft.runtime"),
        ("bench/planted.py", "import redraft.cli"),
        ("bench/planted.py", "import experiments.lookups"),
        ("assembly/planted.py", "import redraft.cli"),
        ("runtime/planted.py", "import redraft.assembly"),
        ("redraft/errors.py", "import redraft.engines"),
        ("cli/planted.py", "import onnxruntime"),
        ("runtime/planted.py", "import redraft.engines.tensorrt.target"),
    ],
)
def test_forbidden_import_is_caught(tree: Path, module: str, forbidden: str) -> None:
    with (tree / module).open("a") as file:
        file.write(f'"""Planted."""\n\n{forbidden}\n')
    result = check(tree, "check-imports")
    assert result.returncode != 0
    assert "BROKEN" in result.stdout
    assert module.removesuffix(".py").replace("/", ".") in result.stdout


def test_a_circle_is_caught(tree: Path) -> None:
    with (tree / "redraft/errors.py").open("a") as file:
        file.write("import redraft.config\n")
    result = check(tree, "check-imports")
    assert result.returncode != 0
    assert "no circles BROKEN" in result.stdout


@pytest.mark.parametrize("package", ["runtime", "engines"])
def test_type_error_is_caught(tree: Path, package: str) -> None:
    (tree / package / "planted.py").write_text(TYPE_ERROR)
    result = check(tree, "check-types", f"CHECK=redraft.{package}.planted")
    assert result.returncode != 0
    assert f"redraft/{package}/planted.py:3: error: Incompatible types in assignment" in result.stdout
