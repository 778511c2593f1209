"""Versions of packages that another may replace, and the packages that errors and docs/building.md name."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from redraft.engines.tensorrt.target import PACKAGE, TENSORRT
from redraft.packages import extra_of, gpu_requirement, package_version


@pytest.mark.parametrize(
    ("installed", "name", "expected"),
    [
        ({"onnxruntime": "1.2"}, "onnxruntime", "1.2"),
        ({"onnxruntime-gpu": "1.3"}, "onnxruntime", "1.3"),
        ({"onnxruntime": "1.2", "onnxruntime-gpu": "1.3"}, "onnxruntime", "1.2"),
        ({}, "onnxruntime", None),
        ({"numpy-gpu": "1"}, "numpy", None),
    ],
)
def test_a_build_for_a_gpu_stands_in(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], name: str, expected: str | None
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(metadata, "version", version)
    assert package_version(name) == expected


@pytest.mark.parametrize(
    ("module", "extra"),
    [("torch", "export"), ("onnx_ir.passes", "export"), ("matplotlib", "bench"), ("numpy", None), ("nothing", None)],
)
def test_a_missing_module_is_in_an_extra(module: str, extra: str | None) -> None:
    assert extra_of(module) == extra


def test_the_documentation_and_errors_name_the_same_packages(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pin = next(line.partition("==")[2] for line in project["dependencies"] if line.startswith("onnxruntime=="))
    page = (root / "docs/building.md").read_text(encoding="utf-8")
    for asked in (PACKAGE, gpu_requirement("onnxruntime", pin)):
        assert f"pip install '{asked}'" in page
    assert PACKAGE in TENSORRT.install
