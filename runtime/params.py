"""What a request asks for, validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from redraft.errors import UsageError

_NUMBERS = {"max_tokens": Integral, "temperature": Real, "top_k": Integral, "top_p": Real, "seed": Integral}
_CALLED = {Integral: "a whole number", Real: "a number"}


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued.

    max_tokens:  new tokens at most.
    stop:        strings that end the text; the text is cut before them.
    ignore_eos:  go on past end-of-sequence tokens.
    temperature: 0 is greedy.
    top_k:       keep the k likeliest tokens, 0 keeps all.
    top_p:       keep the likeliest tokens of this total probability.
    seed:        key of every random number of the request.
    """

    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
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
