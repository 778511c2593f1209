"""Specifications of methods without engines: plain decoding, lookups in texts, and lookahead decoding.

Suffix decoding (Oliaro et al., arXiv 2411.04975) has the options of vLLM with their defaults, but keeps earlier outputs
only if the caller asks for it.

Lookahead decoding (Fu et al. 2024, arXiv 2402.02057) has the names of TensorRT-LLM's options. Each step verifies a
window of guesses next to the drafted n-grams. The defaults are small, for CPUs, where each verified token adds 5 to
15 % to the time of a step. On a GPU with idle arithmetic units, larger ones bring more: the paper has W = 15, N = 5 and
G = 15 for a model of 7 B.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from redraft.errors import UsageError
from redraft.methods.base import Method

LONGEST_MATCH = 16
"""Longest context looked up, in tokens."""
DEEPEST = 256
"""Deepest suffix tree, in tokens."""
MOST_NODES = 256
"""Most nodes of a window, and of all n-grams of a step."""
METHOD: Method[None] = Method()


@dataclass(frozen=True)
class NgramOptions:
    """`prompt_lookup_min` and `prompt_lookup_max`: lengths in tokens of the shortest and longest context looked up."""

    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= LONGEST_MATCH:
            raise UsageError(
                f"prompt_lookup_min {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max}: "
                f"expected 1 <= min <= max <= {LONGEST_MATCH}"
            )


@dataclass(frozen=True)
class SuffixOptions:
    """Options of the suffix tree of a request, and of the store of earlier outputs.

    suffix_decoding_max_tree_depth:  longest context and continuation together, in tokens, at most 256.
    suffix_decoding_max_spec_factor: tokens drafted at most for each token of the context.
    suffix_decoding_min_token_prob:  a token is drafted if its path was taken at least this often, by counts.
    suffix_decoding_max_cached_requests: earlier outputs that the store keeps for all tenants; 0 keeps none.
    suffix_decoding_max_cached_tokens:   their tokens, about 150 bytes each, at most 350 if outputs recur. The
                                         oldest outputs go first.
    """

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_cached_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        for name, holds, words in (
            ("max_tree_depth", 2 <= self.suffix_decoding_max_tree_depth <= DEEPEST, f"from 2 to {DEEPEST}"),
            ("max_spec_factor", 0 < self.suffix_decoding_max_spec_factor < inf, "above 0"),
            ("min_token_prob", 0 <= self.suffix_decoding_min_token_prob <= 1, "from 0 to 1"),
            ("max_cached_requests", self.suffix_decoding_max_cached_requests >= 0, "0 (no store) or above"),
        ):
            option = f"suffix_decoding_{name}"
            if not holds:
                raise UsageError(f"{option} must be {words}, not {getattr(self, option)}")
        if self.suffix_decoding_max_cached_tokens < self.suffix_decoding_max_tree_depth:
            raise UsageError(
                f"suffix_decoding_max_cached_tokens must be at least suffix_decoding_max_tree_depth "
                f"({self.suffix_decoding_max_tree_depth}), not {self.suffix_decoding_max_cached_tokens}",
                "turn the store off with suffix_decoding_max_cached_requests=0",
            )


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
