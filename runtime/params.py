"""The parameters of a request, validated on construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from operator import index

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.controllers import ADAPTIVE, FIXED, parse_controller
from redraft.runtime.controllers.rules import LengthRule
from redraft.types import Budget, FloatArray

LogitsProcessor = Callable[[Sequence[int], FloatArray], FloatArray]
"""A function of all tokens up to a position, prompt included, and of the logits [V] there. It returns new logits [V].

The sampler calls it for every node of a draft tree, with the tokens of the node's own path.
"""

_NUMBERS = {"max_tokens": Integral, "temperature": Real, "top_k": Integral, "top_p": Real, "seed": Integral}
_CALLED = {Integral: "a whole number", Real: "a number"}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one prompt's continuation.

    max_tokens:  new tokens at most.
    stop:        strings that end the text, which is cut before them.
    ignore_eos:  True to continue past end-of-sequence tokens.
    temperature: 0 is greedy.
    top_k:       keep the k likeliest tokens; 0 keeps all.
    top_p:       keep the likeliest tokens of this total probability.
    seed:        key of every random number of the request.
    logits_processors: functions that change the logits before a token is chosen, in this order.
    """

    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not isinstance(self.logits_processors, list | tuple) or not all(map(callable, self.logits_processors)):
            raise UsageError("logits_processors must be a list of functions of token ids and logits")
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        for name, kind in _NUMBERS.items():
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"{name} must be {_CALLED[kind]}, not {getattr(self, name)!r}")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if "" in self.stop:
            raise UsageError("a stop string must not be empty")
        if not self.temperature >= 0:
            raise UsageError(f"temperature must be 0 or above, not {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (all) or above, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")


@dataclass(frozen=True)
class SpeculationParams:
    """Parameters of one prompt's speculation. They do not change the text.

    method:     `none`, `ngram`, the id of one of the bundle's drafters, or `ngram+ID`; None is the bundle's default.
                `none` accepts no prediction and ignores budget and controller.
    prediction: text or token ids that the answer will repeat in part, as a further source of drafts.
    tenant:     key of requests that may draft from each other's outputs, if the method's option keeps outputs;
                None shares with nobody.
    budget:     of a step. The controller `fixed` uses all of it, others at most this much.
    controller: how tree sizes are chosen: `adaptive`, `fixed`, or a rule for the length of drafts, with options after
                commas, such as `gammatune,delta=1` (`redraft.runtime.controllers`). None is `fixed` if `budget` is set,
                else `adaptive`.
    """

    method: str | None = None
    prediction: str | Sequence[int] | None = None
    budget: Budget | None = None
    controller: str | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        if self.method is not None and (not isinstance(self.method, str) or not self.method):
            raise UsageError(f"method must be a word, not {self.method!r}")
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", _token_ids(self.prediction))
        if self.tenant is not None:
            check_tenant(self.tenant)
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise UsageError(f"budget must be a Budget, not {self.budget!r}")
        if self.controller is not None and not isinstance(self.controller, str):
            raise UsageError(f"controller must be a text, not {self.controller!r}")
        if self._controller == (FIXED, None) and self.budget is None:
            raise UsageError("the controller fixed needs a budget", "give a budget, or a length such as fixed,gamma=5")

    @property
    def adapts(self) -> bool:
        """True if the adaptive controller chooses the size of trees."""
        return self._controller[0] == ADAPTIVE

    @property
    def rule(self) -> LengthRule | None:
        """The rule for the length of drafts; None if the size comes from costs, or is the budget's."""
        return self._controller[1]

    @property
    def _controller(self) -> tuple[str, LengthRule | None]:
        """The controller's name and rule. Raises UsageError for one that is unknown."""
        return parse_controller(self.controller or (ADAPTIVE if self.budget is None else FIXED))


def check_tenant(tenant: object) -> None:
    """Raise UsageError for a tenant's key that is not a text, or is empty."""
    if not isinstance(tenant, str) or not tenant:
        raise UsageError(f"a tenant's key must be a text that is not empty, not {tenant!r}")


def _token_ids(prediction: object) -> tuple[int, ...]:
    """Return a prediction's token ids. Raises UsageError for any value but a list of whole numbers."""
    if isinstance(prediction, bytes | bytearray) or not isinstance(prediction, Sequence | np.ndarray):
        found = type(prediction).__name__
        raise UsageError(f"a prediction is a text or a list of token ids, not {found}")
    ids = []
    for token in prediction:
        try:
            ids.append(index(token))
        except TypeError:
            raise UsageError(f"a prediction's token ids are whole numbers, not {token!r}") from None
    return tuple(ids)
