"""Lyanna's objective with other token information than the drafter's own: of hot tokens, or as engines store it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import UsageError
from redraft.export.drafters.lyanna import LyannaConfig
from redraft.export.drafters.lyanna_token_tree import lookup
from redraft.train.objectives.lyanna import LyannaObjective


class HotObjective(LyannaObjective):
    """Token information between hot tokens alone: the rows and the columns of cold ones are zero (Lyanna, §6.1).

    A row's RMS is taken over the whole vocabulary, as in engines that prune their tables.
    """

    hot: torch.Tensor

    def __init__(
        self, verifier: Any, config: LyannaConfig, hot: NDArray[np.int64], alpha: float = 1.0,
        beta: float = 1.0, step_weight: float = 1.0,
    ) -> None:  # fmt: skip
        """hot: ids of the hot tokens; the rest as of LyannaObjective. Raises UsageError without token information."""
        super().__init__(verifier, config, alpha, beta, step_weight)
        if self.drafter.token_info is None:
            raise UsageError("this drafter has no token information to restrict")
        self.register_buffer("hot", torch.zeros(config.vocab_size), persistent=False)
        self.keep(hot)

    def keep(self, hot: NDArray[np.int64]) -> None:
        """Make these tokens the hot ones."""
        self.hot.zero_()
        self.hot[torch.from_numpy(hot)] = 1.0

    def added(self, distinct: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        masked: torch.Tensor = super().added(distinct) * self.hot[distinct, None] * self.hot
        return masked


class TableObjective(LyannaObjective):
    """Token information read from tables as `methods.lyanna.token_info_tables` lists them. To measure, not to train.

    Tables include the draft logit scale, the logits here do not: it is divided out again.
    """

    def __init__(self, verifier: Any, config: LyannaConfig, tables: Sequence[NDArray[Any]]) -> None:
        super().__init__(verifier, config)
        self._tables = list(tables)

    def added(self, distinct: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        rows = [lookup(self._tables, token) for token in distinct.tolist()]
        return torch.from_numpy(np.stack(rows)) / self.drafter.config.draft_logit_scale
