"""Chooses the bits of each product so that a bundle meets its target on every kind of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from redraft.config import Precision
from redraft.engines.manifest import Quality

if TYPE_CHECKING:
    from redraft.export.checkpoint.sources import AnySource
    from redraft.export.quantization.calibrate import Calibration
    from redraft.export.quantization.product_forms import ProductPlan
    from redraft.export.quantization.product_weights import ProductWeight

TARGETS: Mapping[Precision, float] = {"int8": 0.005, "int4": 0.03}
"""Largest rise of perplexity by precision, as a share, on each kind of text."""
DIVERGENCE = 0.7
"""Largest divergence as a share of the target: perplexity of a text rises by about 1.4 times the divergence."""
SURE = 2.6
"""Standard errors by which a rise must be above its target to count, since few tokens are measured."""
AIM = 0.7
"""Share of what a target allows that a new choice aims for."""
ROUNDS = 3
"""Choices that are built and measured after the first one."""
WORST = 10
"""Products that get more bits at first. Few outliers often cause most of a divergence."""
NEXT = {4: 8, 8: 32}


def misses(quality: Quality, target: float) -> bool:
    """Return True if a kind's divergence is above the target, or its perplexity surely is.

    The divergence is what perplexity rises by on average on texts that the model itself writes. It varies less than
    what perplexity rises by on a given text, which is more.
    """
    return _worst(quality, target) > 1


def _worst(quality: Quality, target: float) -> float:
    """Return by what factor the worst kind is above what the target allows; infinity for NaN."""
    limit, rises = math.log1p(target), _rises(quality)
    divergences = [quality.divergence[kind] / (DIVERGENCE * limit) for kind in rises]
    sure = [rise / limit for kind, rise in rises.items() if not rise - SURE * quality.error[kind] <= limit]
    return math.inf if any(map(math.isnan, [*divergences, *sure])) else max([*divergences, *sure])


def _rises(quality: Quality) -> dict[str, float]:
    """Return the logarithm of what perplexity was multiplied by, by kind."""
    return {k: math.log(value / quality.perplexity_fp32[k]) for k, value in quality.perplexity.items()}


def raised(
    plan: ProductPlan, products: Sequence[ProductWeight], source: AnySource, found: Calibration, quality: Quality,
    target: float,
) -> ProductPlan:  # fmt: skip
    """Return the plan with more bits for some products: the WORST ones at first.

    If these have more bits already, those get them whose errors are largest for their size. What a bundle loses is
    then taken to be proportional to the sum of its products' errors, and AIM of what is allowed is what to expect.
    """
    errors = {weight: _error(plan, weight, source, found) for weight in products}
    free = [weight for weight in errors if plan.fixed.isdisjoint(weight.parameters)]
    gains = {weight: errors[weight][0] - errors[weight][1] for weight in free}
    chosen: list[ProductWeight] = []
    if plan.bits.keys() <= plan.fixed:
        chosen = sorted(free, key=lambda weight: gains[weight], reverse=True)[:WORST]
    else:
        total = sum(now for now, _, _ in errors.values())
        enough = total * (1 - AIM / _worst(quality, target))
        gained = 0.0
        for weight in sorted(free, key=lambda w: gains[w] / math.prod(w.shape(source)), reverse=True):
            if gained >= enough:
                break
            chosen.append(weight)
            gained += gains[weight]
    more = {name: errors[weight][2] for weight in chosen if gains[weight] > 0 for name in weight.parameters}
    return replace(plan, bits={**plan.bits, **more})


def _error(plan: ProductPlan, weight: ProductWeight, source: AnySource, found: Calibration) -> tuple[float, float, int]:
    """Return a product's error now and with more bits, and the number of those bits. Unknown ones have no error."""
    now = later = 0.0
    more = 8
    for part in weight.parts():
        (name,) = part.parameters
        measured = found.errors.get(name, {})
        form = plan.form(part, source, weight.parameters[0] in plan.smoothing, False)
        if not measured or form.bits not in NEXT:
            continue
        bits = 4 if form.bits == 4 and 4 in measured and not form.stored else 8
        more = 32 if form.stored else NEXT[form.bits]
        size = math.prod(part.shape(source))
        now += measured.get(bits, 0.0) * size
        later += (0.0 if more == 32 else measured.get(more, 0.0)) * size
    whole = math.prod(weight.shape(source))
    return now / whole, later / whole, more


def describe_choice(plan: ProductPlan, products: Sequence[ProductWeight], found: Calibration) -> Iterator[str]:
    """Yield what was chosen and why, a sentence each."""
    if plan.smoothing:
        yield (
            f"inputs of {len(plan.smoothing)} of {len(products)} products are smoothed, since their error falls by a "
            "quarter or more"
        )
    for bits in sorted(set(plan.bits.values())):
        names = [name for name, its in plan.bits.items() if its == bits]
        worst = sorted(names, key=lambda n: -max(found.errors.get(n, {}).values(), default=0.0))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = f"{bits} bits" if bits < 32 else "fp32"
        why = "as asked" if set(names) <= plan.fixed else "whose errors are largest for their size"
        yield f"{what} for {', '.join(worst[:3])}{more}, {why}"


def describe_target(precision: Precision, quality: Quality, target: float) -> str:
    """Return a sentence on whether a bundle meets its target."""
    if not misses(quality, target):
        rise = math.expm1(max(_rises(quality).values()))
        if rise > target:
            return (
                f"{precision} is within the error of its target of +{100 * target:g} %: perplexity rises by "
                f"{100 * rise:+.2f} % at most"
            )
        return f"{precision} meets its target of +{100 * target:g} %: perplexity changes by {100 * rise:+.2f} % at most"
    other = "int8" if precision == "int4" else "fp32"
    return f"{precision} misses its target of +{100 * target:g} %: build with --precision {other}, which loses less"
