"""Speculative text generation from an engine bundle: draft, verify, commit. Never needs torch."""

from __future__ import annotations

from redraft.runtime.api import Runtime
from redraft.runtime.generation import Generation, RequestError
from redraft.runtime.llm import LLM
from redraft.runtime.loop.scheduler import QueueFull
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.runtime.submission import Submission
from redraft.types import Budget

__all__ = [
    "LLM", "Budget", "Generation", "QueueFull", "RequestError", "Runtime", "SamplingParams", "SpeculationParams",
    "Submission",
]  # fmt: skip
