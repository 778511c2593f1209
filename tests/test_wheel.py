"""The wheel: a package missing from the map works in editable mode but is not installed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from redraft.plugins.operators import OPERATORS_LIBRARY, Operators
from tests.conftest import PACKAGES, build_wheel

SUFFIXES = {".py", ".toml", ".typed", ".md", ".jinja", ".json", ".html", ".css", ".js", ".svg"}


def sources(root: Path) -> set[str]:
    """Every Python and data file of the packages, by its name in the wheel."""
    names = {}
    for folder, target in PACKAGES.items():  # a folder inside another comes later and replaces its names
        for path in (root / folder).rglob("*"):
            if path.suffix in SUFFIXES or target.endswith("heldout"):
                names[path] = f"{target}/{path.relative_to(root / folder).as_posix()}"
    return set(names.values())


def run_unpacked(wheel: Path, folder: Path, program: str) -> str:
    """Unpack the wheel into the folder and run a program with it instead of the sources. Returns what it prints."""
    zipfile.ZipFile(wheel).extractall(folder)
    start = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__ + repr(finder)]
sys.path.insert(0, {str(folder)!r})
"""
    result = subprocess.run([sys.executable, "-I", "-c", start + program], capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_has_the_packages_and_nothing_else(root: Path, wheel: Path) -> None:
    """No experiment, and of optimum's namespace our register file only. Without a compiler, it is for any platform."""
    assert wheel.name.endswith("-py3-none-any.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == sources(root)


def test_unpacked_wheel_imports_on_its_own(root: Path, wheel: Path, tmp_path: Path) -> None:
    modules = [name.removesuffix(".py").replace("/", ".") for name in sources(root) if name.endswith(".py")]
    modules = sorted(name.removesuffix(".__init__") for name in modules if not name.endswith(".__main__"))
    program = f"""
import importlib
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
"""
    run_unpacked(wheel, tmp_path, program)


@pytest.mark.slow
def test_a_compiler_puts_the_operators_into_the_wheel(root: Path, operators_library: Operators, tmp_path: Path) -> None:
    """The wheel is for this platform and every Python 3, and runs its own operators. Optimizing would take a minute."""
    compiler, unpacked = tmp_path / "unoptimized", tmp_path / "unpacked"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    build_wheel(tmp_path, str(compiler))
    (wheel,) = tmp_path.glob("*-py3-none-linux_*.whl")
    library = f"redraft/plugins/{OPERATORS_LIBRARY}"
    assert set(zipfile.ZipFile(wheel).namelist()) > {library, *sources(root)}
    program = "from redraft.plugins.operators import *; print(find_operators().path, find_operators().digest)"
    digest = hashlib.sha256(zipfile.ZipFile(wheel).read(library)).hexdigest()
    assert run_unpacked(wheel, unpacked, program) == f"{unpacked / library} {digest}\n"
    assert hashlib.sha256(operators_library.path.read_bytes()).hexdigest() == operators_library.digest
