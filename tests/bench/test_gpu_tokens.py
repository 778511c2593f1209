"""The bundles that a device's tokens are compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redraft.bench.gpu_tokens import check_reference
from redraft.engines import open_bundle
from redraft.errors import UsageError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"model.safetensors": "1" * 64}}, "the reference is of another model: expected the weights of"),
        ({"random_weights": True}, "the reference is of another model"),
        ({"weights": {}}, "the reference is of another model"),
        ({"source": "elsewhere"}, None),
    ],
)
def test_a_reference_of_another_model_is_refused(bundle: Path, changes: dict[str, Any], message: str | None) -> None:
    """The same weights under another name are the same model."""
    manifest = open_bundle(bundle, verify=False).manifest
    other = replace(manifest, model=replace(manifest.model, **changes))
    if message is None:
        check_reference(manifest, other)
        return
    with pytest.raises(UsageError, match=message):
        check_reference(manifest, other)


def test_a_reference_that_the_host_cannot_run_is_refused(bundle: Path) -> None:
    manifest = open_bundle(bundle, verify=False).manifest
    with pytest.raises(UsageError, match="the reference is for tensorrt"):
        check_reference(manifest, replace(manifest, backend="tensorrt"))
