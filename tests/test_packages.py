"""Versions of packages that another may stand in for."""

from __future__ import annotations

from importlib import metadata

import pytest

from redraft.packages import package_version


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
