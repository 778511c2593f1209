"""Projections that predict one of the verifier's hidden states, fitted by least squares to some texts.

A drafter that begins with the verifier's last layer needs such inputs from its first step on: a hidden state after the
final norm differs in scale and directions from what this layer was trained for. One that begins without a working layer
needs the next feature itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as Names
from typing import Any

import torch
from torch import nn

from redraft.names import LAST_HIDDEN_STATE
from redraft.train.batches import Batch
from redraft.train.states import run_verifier

_ROWS_A_COLUMN, _FEWEST, _MOST_ROWS = 50, 19, 58_000
"""Rows of text for every input of a projection, fewer from so many in all on: the verifier computes them."""
_RIDGE = 1e-3
"""Part of the mean square of inputs that is added to every square."""

Inputs = Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]
"""Hidden states [L, n] by name and the tokens i64[L] that follow them -> a projection's inputs [L, I]."""


@torch.no_grad()
def fit_projections(
    projections: Sequence[tuple[nn.Linear, Inputs]], verifier: Any, batches: Iterable[Batch],
    target: str, known: Sequence[str] = (LAST_HIDDEN_STATE,),
) -> None:  # fmt: skip
    """Fill the weights of projections that predict a hidden state at a position from what is known before it.

    target: the hidden state.   known: those of the position before that the inputs read.
    As many of `batches` as needed are read. The verifier computes those without kept hidden states.
    """
    columns = max(projection.in_features for projection, _ in projections)
    needed = min(columns * _ROWS_A_COLUMN, max(columns * _FEWEST, _MOST_ROWS))
    sums = [_Sums(projection) for projection, _ in projections]
    rows = 0
    for batch in batches:
        if rows >= needed:
            break
        batch = batch.to(verifier.device)
        hidden = hidden_states_of(verifier, batch, {*known, target})
        for row, end in enumerate(batch.ends.tolist()):
            before = {name: hidden[name][row, : end - 1].float() for name in known}
            targets = hidden[target][row, 1:end].float()
            for own, (_, inputs) in zip(sums, projections, strict=True):
                own.add(inputs(before, batch.tokens[row, 1:end]).float(), targets)
            rows += end - 1
    for own, (projection, _) in zip(sums, projections, strict=True):
        projection.weight.copy_(own.solve())


def hidden_states_of(verifier: Any, batch: Batch, names: Names[str]) -> Mapping[str, torch.Tensor]:
    """Return hidden states [B, L, n] by name: those that are kept with the batch, if it has all."""
    if batch.states is not None and names <= batch.states.hidden.keys():
        return batch.states.hidden
    return run_verifier(verifier, batch.tokens, tuple(sorted(names)), every_logit=False)[0]


class _Sums:
    """Products of inputs with inputs [I, I] and with targets [I, n], over all rows. Sums in fp32 would be imprecise."""

    def __init__(self, projection: nn.Linear) -> None:
        width, device = projection.in_features, projection.weight.device
        self._squares = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._products = torch.zeros(width, projection.out_features, dtype=torch.float64, device=device)

    def add(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        inputs = inputs.double()
        self._squares.addmm_(inputs.mT, inputs)
        self._products.addmm_(inputs.mT, targets.double())

    def solve(self) -> torch.Tensor:
        """Return the weight [n, I]. It is called once."""
        diagonal = self._squares.diagonal()
        diagonal.add_(_RIDGE * diagonal.mean())
        weight: torch.Tensor = torch.linalg.solve(self._squares, self._products).mT.float()
        return weight
