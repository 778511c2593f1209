"""Lyanna's objective with tables as engines store them: token information in a form, and a draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft import names
from redraft.methods.lyanna_token_info import lookup
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives.lyanna import LyannaObjective


class TableObjective(LyannaObjective):
    """Token information from tables as `methods.lyanna.tables` lists them, by name. To measure, not to train.

    Logits are over the draft vocabulary of the tables, a part of the one that the drafter was trained with.
    """

    def __init__(self, exact: LyannaObjective, tables: Mapping[str, NDArray[Any]]) -> None:
        """exact: the objective of the drafter, which this one shares."""
        config = exact.drafter.config
        drafted = tables.get(names.DRAFT_VOCABULARY)
        vocabulary = DraftColumns.of(None if drafted is None else torch.from_numpy(drafted), config.vocab_size)
        size = 0 if vocabulary.is_whole else len(vocabulary)
        super().__init__(exact.verifier, replace(config, draft_vocab_size=size), vocabulary=vocabulary)
        self.drafter = exact.drafter
        self._tables = tables

    def added(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        distinct, index = tokens.unique(return_inverse=True)
        return torch.from_numpy(np.stack([lookup(self._tables, token) for token in distinct.tolist()]))[index]
