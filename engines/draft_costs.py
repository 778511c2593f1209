"""Break-even of a drafter that drafts token by token: the cost of a drafted token against its gain.

Leviathan et al. 2023 (arXiv 2211.17192), Theorem 3.8: drafts of g tokens, each accepted with probability a if those
before it were accepted, make decoding (1 - a^(g + 1)) / ((1 - a) (g c + 1)) times as fast. c is the time of a drafted
token over that of a plain step. The paper takes a verification of g + 1 tokens for as long as a plain step. Here it
takes v times as long, which matters on a CPU. The numerator is 1 plus the accepted tokens of a draft. So drafts pay if
the accepted share of their tokens is above c + (v - 1) / g, whatever the probabilities.
"""

from __future__ import annotations

from pathlib import Path

from redraft import names
from redraft.engines.drafters import BuiltDrafter
from redraft.engines.manifest import Manifest
from redraft.engines.sizes import product_bytes

GOOD = 0.8
"""An acceptance to show the speed of: that of a small model of the verifier's own family on code or chat."""


def improvement(accepted: float, length: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Return how many times as fast drafts of `length` tokens are expected to make decoding.

    accepted: probability a.   draft_cost: c.   verify_cost: v.
    """
    return sum(accepted**depth for depth in range(length + 1)) / (length * draft_cost + verify_cost)


def least_accepted(draft_cost: float, length: float = 1.0, verify_cost: float = 1.0) -> float:
    """Return the accepted share of drafted tokens above which drafts of `length` tokens pay; none do from 1 on."""
    return draft_cost + (verify_cost - 1) / length


def bytes_cost(bundle: Path, manifest: Manifest, drafter: BuiltDrafter) -> float | None:
    """Return c as the ratio of bytes that a drafted token and a plain step read; None if drafts are one call."""
    if not any(graph.decoder for graph in drafter.method.graphs.values()):
        return None
    weights = (*manifest.weights, *drafter.record.weights)
    drafted = product_bytes(bundle, drafter.record.graphs[names.DRAFT], weights)
    return drafted / product_bytes(bundle, manifest.graphs[names.VERIFIER], weights)


def describe_cost(draft_cost: float, steps: int) -> str:
    """Return when drafts of at most `steps` tokens pay, in words, by an estimate of c from bytes."""
    read = f"a drafted token reads {draft_cost:.2f} times the bytes of a plain step"
    least = least_accepted(draft_cost)
    if least >= 1:
        return f"{read}: drafting never pays"
    best = max(improvement(GOOD, length, draft_cost) for length in range(1, steps + 1))
    most = f"; {100 * GOOD:.0f} % make decoding at most {best:.2f} times as fast" if best > 1 else ""
    return f"{read}: pays if more than {100 * least:.0f} % are accepted{most}"
