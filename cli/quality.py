"""A bundle's quality as lines for users and as a JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redraft.engines.manifest import Manifest

SURE = 1.96
"""Standard errors of a 95 % interval."""


def quality_object(manifest: Manifest) -> dict[str, Any]:
    """Return the quality by kind of text. `rise_error` is half of the 95 % interval of the rise of perplexity."""
    quality = manifest.quality
    if quality is None:
        return {"perplexity": None, "perplexity_fp32": None, "choices": list(manifest.choices)}
    return {
        "perplexity": dict(quality.perplexity),
        "perplexity_fp32": dict(quality.perplexity_fp32),
        "rise_error": {kind: SURE * error for kind, error in quality.error.items()},
        "divergence": dict(quality.divergence),
        "same_tokens": dict(quality.same_tokens),
        "evaluated_tokens": quality.tokens,
        "choices": list(manifest.choices),
    }


def quality_lines(manifest: Manifest) -> Iterator[str]:
    """Yield what was chosen, and the quality of each kind of text."""
    yield from manifest.choices
    quality = manifest.quality
    if quality is None:
        return
    for kind, value in quality.perplexity.items():
        exact = quality.perplexity_fp32[kind]
        if manifest.precisions == "fp32":
            yield f"perplexity on {kind}: {value:.3f}"
            continue
        yield (
            f"perplexity on {kind}: {value:.3f}, fp32 {exact:.3f}, {100 * (value / exact - 1):+.2f} % "
            f"± {100 * SURE * quality.error[kind]:.2f}; divergence {quality.divergence[kind]:.4f}; "
            f"{100 * quality.same_tokens[kind]:.1f} % equal next tokens"
        )
