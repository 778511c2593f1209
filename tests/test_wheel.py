"""The wheel: a package missing from the map works in editable mode but is not installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.conftest import PACKAGES

SUFFIXES = {".py", ".toml", ".typed", ".md", ".jinja", ".json", ".html", ".css", ".js", ".svg"}


def sources(root: Path) -> set[str]:
    """Every Python and data file of the packages, by its name in the wheel."""
    names = {}
    for folder, target in PACKAGES.items():  # a folder inside another comes later and replaces its names
        for path in (root / folder).rglob("*"):
            if path.suffix in SUFFIXES or target.endswith("heldout"):
                names[path] = f"{target}/{path.relative_to(root / folder).as_posix()}"
    return set(names.values())


def test_the_wheel_has_the_packages_and_nothing_else(root: Path, wheel: Path) -> None:
    """No experiment, and of optimum's namespace our register file only."""
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == sources(root)


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
