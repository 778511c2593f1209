"""Batches of documents with the verifier's states, which a folder keeps: runs with the same batches compute them once.

facts.json    the verifier's digests, the type of its products, the digest of the documents, the hidden states
shards/NNNN/  a step's tokens [B, L] and states, as of `redraft.train.text_shards`, but with rows
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redraft.errors import DataError, TrainingError
from redraft.train.batches import Batch, Plan
from redraft.train.config import Recipe
from redraft.train.states import States
from redraft.train.text_shards import HIDDEN, TOP, Shards

FACTS = "facts.json"


class KeptStates:
    """A plan whose batches have states."""

    def __init__(
        self, plan: Plan, folder: Path, facts: Mapping[str, Any], hidden_states: Sequence[str],
        compute: Callable[[Batch], States],
    ) -> None:  # fmt: skip
        """facts: of the verifier and its texts, plain values.   compute: returns the states of a batch.

        Raises TrainingError if the folder keeps states of other facts.
        """
        self._plan, self._folder, self._compute = plan, folder, compute
        self._names = tuple(HIDDEN + name for name in hidden_states)
        self._shards = Shards(folder)
        path, now = folder / FACTS, json.loads(json.dumps({**facts, "hidden_states": list(hidden_states)}))
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if changed := next((name for name in now if before.get(name) != now[name]), None):
                raise TrainingError(
                    f"{folder} keeps states of a run that differs in its {changed}", "remove it, or give another --out"
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")

    def batch(self, step: int, recipe: Recipe) -> Batch:
        """Return the batch of `step`. Raises DataError if the folder keeps another batch of this step."""
        batch = self._plan.batch(step, recipe)
        states = self._kept(step, batch)
        if states is None:
            computed = self._compute(batch)
            arrays = {"tokens": batch.tokens.numpy(), **computed.to_numpy()}
            if not self._shards.fits(sum(array.nbytes for array in arrays.values())):
                return Batch(batch.tokens, batch.kinds, batch.starts, batch.ends, computed)
            self._shards.add(step, arrays)
            states = self._kept(step, batch)  # as the next run has them: in half precision
        return Batch(batch.tokens, batch.kinds, batch.starts, batch.ends, states)

    def _kept(self, step: int, batch: Batch) -> States | None:
        shard = self._shards.get(step)
        if shard is None:
            return None
        if not np.array_equal(shard.array("tokens"), batch.tokens.numpy()):
            raise DataError(f"{self._folder} keeps other texts for step {step}", "remove it; the run computes it again")
        found = {name: torch.from_numpy(np.array(shard.array(name))) for name in (*self._names, *TOP)}
        hidden = {name.removeprefix(HIDDEN): found[name] for name in self._names}
        return States(hidden, found["top_ids"].long(), found["top_logits"].float(), found["log_sum"])
