"""Lyanna in the runtime: it drafts from predicted hidden states, and resamples unused steps after a verification.

Chen et al., "Make Every Draft Count", §5 and Algorithms 1 and 2; the graphs implement both. A draft's chain has one
step a token. After j accepted tokens the bonus uses step j + 1, and the logits of later steps serve another tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

from redraft import names
from redraft.methods.chains import whole_tree
from redraft.methods.lyanna import UNION
from redraft.methods.lyanna_token_info import lookup
from redraft.names import RESAMPLE
from redraft.runtime.drafters.candidate_noise import AddedLogits
from redraft.runtime.drafters.hidden_states import HiddenStateDrafter
from redraft.runtime.requests.request import Request
from redraft.types import Budget, Tree


class LyannaDrafter(HiddenStateDrafter):
    """Drafts from predicted hidden states, and resamples the unused steps of its last draft."""

    @cached_property
    def _left(self) -> list[int]:
        """Nodes of a resampled tree by the number of used steps."""
        steps, width = self.shape.steps, self.shape.width
        return [min(whole_tree(steps - used, width), self.shape.resample_nodes) for used in range(steps + 1)]

    @property
    def added_logits(self) -> AddedLogits:
        """Token information."""
        return partial(lookup, self._host_tables)

    def remaining(self, seq: Request) -> int:
        left: int = self.shape.steps - seq.drafting[self].used
        return left if self.options.resample and left > self.options.threshold else 0

    def joins(self, seq: Request) -> bool:
        """True with the option `union`, if both trees are on the host and were not drawn.

        Both of a step's draws would use the same random numbers, and the fresh ones would overwrite the distributions
        of the others: rejection sampling would be biased. A device keeps one tree a slot, and merging there would copy.
        """
        return self.options.resample == UNION and self._store is None and not seq.noise.drawn

    def resample(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        return self._over_runs(self._resample, batch, budgets)

    def _resample(self, slots: range, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        """Resample for the sequences in these slots, in one call."""
        call = self._call(RESAMPLE, slots, 0)
        values = call.host_inputs.open()
        first_step, tokens = values[names.FIRST_STEP], values[names.TOKENS]
        drafted = values[names.DRAFTED] if call.stores else None
        nodes = []
        for place, (seq, budget) in enumerate(zip(batch, budgets, strict=True)):
            used = seq.drafting[self].used if budget.nodes else 1
            first_step[place] = used
            tokens[place] = seq.tokens[-1]
            nodes.append(self._left[used])
            if drafted is not None:
                drafted[place] = budget.nodes
        self._noise.set(batch, values, slots.start)
        self._run(RESAMPLE, call.work)
        return self._made(call, slots, batch, budgets, nodes, f"resample {self.name}")


DRAFTER = LyannaDrafter
