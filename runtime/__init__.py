"""Speculative text generation from an engine bundle: draft, verify, commit. Never needs torch."""

from __future__ import annotations

from redraft.runtime.api import Generation, Runtime
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.types import Budget

__all__ = ["Budget", "Generation", "Runtime", "SamplingParams", "SpeculationParams"]
