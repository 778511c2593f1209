"""The small run of tests of training."""

from __future__ import annotations

from tests.train.conftest import recipe, run, sources, verifier_folder

__all__ = ["recipe", "run", "sources", "verifier_folder"]
