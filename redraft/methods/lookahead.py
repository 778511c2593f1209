"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): Jacobi iteration of guesses, without a drafter.

Each step verifies a window of guesses next to the drafted n-grams. The options have the names of TensorRT-LLM. The
defaults are small, for CPUs, where each verified token adds 5 to 15 % to the time of a step. On a GPU with idle
arithmetic units, larger ones bring more: the paper has W = 15, N = 5 and G = 15 for a model of 7 B.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft.errors import UsageError
from redraft.methods.base import Method

MOST_NODES = 256
"""Most nodes of a window, and of all n-grams of a step."""


@dataclass(frozen=True)
class LookaheadOptions:
    """Sizes of the window and of the n-grams. The window has (N - 1) W - 1 nodes, the n-grams at most (N - 1) G.

    max_window_size:           W, positions of the window, from the latest token of the text on.
    max_ngram_size:            N, tokens of an n-gram; the first of a verified one is the latest token of the text.
    max_verification_set_size: G, n-grams that a step verifies, and that the pool keeps by first token.
    """

    max_window_size: int = 2
    max_ngram_size: int = 2
    max_verification_set_size: int = 2

    def __post_init__(self) -> None:
        for name, least, reason in (
            ("max_window_size", 1, ""),
            ("max_ngram_size", 2, " (a token and the one after it)"),
            ("max_verification_set_size", 1, ""),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}{reason}, not {getattr(self, name)}")
        for name, what in (("max_window_size", "window"), ("max_verification_set_size", "verification set")):
            if (self.max_ngram_size - 1) * getattr(self, name) > MOST_NODES:
                raise UsageError(
                    f"a {what} of {getattr(self, name)} and n-grams of {self.max_ngram_size} tokens are too large: "
                    f"expected (max_ngram_size - 1) * {name} <= {MOST_NODES}"
                )


METHOD: Method[None] = Method(
    "lookahead",
    "N-grams that the verifier writes itself, by Jacobi iteration of a window of guesses.",
    options=LookaheadOptions,
)
