"""Speculative text generation from an engine bundle: draft, verify, commit. Never needs torch."""

from __future__ import annotations

from redraft.runtime.api import Runtime
from redraft.runtime.generation import Generation, RequestError
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.types import Budget

__all__ = ["Budget", "Generation", "RequestError", "Runtime", "SamplingParams", "SpeculationParams"]
