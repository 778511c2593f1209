"""The method's form of `redraft.export.drafters.feature_drafter`, and its exporter."""

from __future__ import annotations

from redraft.export.drafters.feature_graphs import exporter_of
from redraft.methods.eagle3 import METHOD

FORM = {"fusion": "attention", "outputs": "normed"}
EXPORTER = exporter_of(METHOD, FORM)
