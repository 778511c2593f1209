"""Lyanna's objective with tables as engines store them: token information in a form, and a draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft import names
from redraft.export.drafters.lyanna import LyannaConfig
from redraft.export.drafters.lyanna_token_tree import lookup
from redraft.train.objectives.lyanna import LyannaObjective


class TableObjective(LyannaObjective):
    """Token information from tables as `methods.lyanna.tables` lists them, by name. To measure, not to train.

    The drafter was trained on the whole vocabulary. Tokens outside of the tables' draft vocabulary have logits of
    minus infinity.
    """

    def __init__(self, verifier: Any, config: LyannaConfig, tables: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(verifier, config)
        self._tables = tables

    def added(self, distinct: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        rows = torch.from_numpy(np.stack([lookup(self._tables, token) for token in distinct.tolist()]))  # [D, H]
        drafted = self._tables.get(names.DRAFT_VOCABULARY)
        if drafted is None:
            return rows
        whole = torch.full((len(rows), self.drafter.config.vocab_size), -torch.inf)
        whole[:, torch.from_numpy(drafted)] = rows
        return whole
