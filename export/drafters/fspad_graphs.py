"""The method's form of `redraft.export.drafters.feature_drafter`, and its exporter."""

from __future__ import annotations

from redraft.export.drafters.feature_graphs import exporter_of
from redraft.methods.fspad import METHOD

FORM = {"fusion": "gated", "outputs": "two", "input_norm": False}
EXPORTER = exporter_of(METHOD, FORM)
