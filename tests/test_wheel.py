"""The wheel: a package missing from the map works in editable mode and vanishes from what is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGES = {
    "redraft": "redraft",
    "bench": "redraft/bench",
    "cli": "redraft/cli",
    "engines": "redraft/engines",
    "export": "redraft/export",
    "plugins": "redraft/plugins",
    "runtime": "redraft/runtime",
    "train": "redraft/train",
}


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, since setuptools writes beside them."""
    tree = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(root / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    return next((tree / "out").glob("*.whl"))


def sources(root: Path) -> set[str]:
    """Every Python and data file of the packages, by its name in the wheel."""
    return {
        f"{target}/{path.relative_to(root / folder).as_posix()}"
        for folder, target in PACKAGES.items()
        for path in (root / folder).rglob("*")
        if path.suffix in {".py", ".toml", ".typed", ".md"}
    }


def test_every_source_and_data_file_is_in_the_wheel(root: Path, wheel: Path) -> None:
    assert sources(root) - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_unpacked_wheel_imports_on_its_own(root: Path, wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    modules = [name.removesuffix(".py").replace("/", ".") for name in sources(root) if name.endswith(".py")]
    modules = sorted(name.removesuffix(".__init__") for name in modules if not name.endswith(".__main__"))
    program = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__ + repr(finder)]
sys.path.insert(0, {str(tmp_path)!r})
import importlib
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
"""
    result = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
