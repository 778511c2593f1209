"""Suffix decoding (Oliaro et al., arXiv 2411.04975): drafts from suffix trees. It needs nothing from the bundle.

The options have the names and defaults of vLLM, but earlier outputs are kept only if the caller asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from redraft.errors import UsageError
from redraft.methods.base import Method

DEEPEST = 256


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
        if not 2 <= self.suffix_decoding_max_tree_depth <= DEEPEST:
            raise UsageError(
                f"suffix_decoding_max_tree_depth must be from 2 to {DEEPEST}, not {self.suffix_decoding_max_tree_depth}"
            )
        if not (isfinite(self.suffix_decoding_max_spec_factor) and self.suffix_decoding_max_spec_factor > 0):
            raise UsageError(
                f"suffix_decoding_max_spec_factor must be above 0, not {self.suffix_decoding_max_spec_factor}"
            )
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            raise UsageError(
                f"suffix_decoding_min_token_prob must be from 0 to 1, not {self.suffix_decoding_min_token_prob}"
            )
        if self.suffix_decoding_max_cached_requests < 0:
            raise UsageError(
                f"suffix_decoding_max_cached_requests must be 0 (no store) or above, not "
                f"{self.suffix_decoding_max_cached_requests}"
            )
        if self.suffix_decoding_max_cached_tokens < self.suffix_decoding_max_tree_depth:
            raise UsageError(
                f"suffix_decoding_max_cached_tokens must be at least suffix_decoding_max_tree_depth "
                f"({self.suffix_decoding_max_tree_depth}), not {self.suffix_decoding_max_cached_tokens}",
                "turn the store off with suffix_decoding_max_cached_requests=0",
            )


METHOD: Method[None] = Method(
    "suffix",
    "Suffix trees of the request's text and of a tenant's earlier outputs.",
    options=SuffixOptions,
)
