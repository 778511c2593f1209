"""The graphs of a steered draft model: a preset of `decoder_graphs`."""

from __future__ import annotations

from redraft.export.drafters.decoder_graphs import exporter_of
from redraft.methods.steered import METHOD

EXPORTER = exporter_of(METHOD)
