"""Figures of a bundle's quality, and the choice of bits that they lead to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from redraft.assembly import quality
from redraft.assembly.precisions import WORST, describe_choice, describe_target, misses, raised
from redraft.assembly.quality import Compared, Scorer, Texts
from redraft.engines import open_bundle
from redraft.engines.manifest import Quality
from redraft.errors import UsageError
from redraft.export.quantization.calibrate import Calibration
from redraft.export.quantization.product_forms import ProductPlan
from redraft.export.quantization.product_weights import ProductWeight

VOCABULARY, TOKENS = 7, 5


def probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(-1, keepdims=True)


def test_figures_are_those_of_their_definitions() -> None:
    generator = np.random.default_rng(0)
    exact, own = (generator.normal(size=(TOKENS, VOCABULARY)).astype(np.float32) for _ in range(2))
    targets = generator.integers(0, VOCABULARY, TOKENS - 1)
    found = Compared.joined(
        [Compared.of(own[:3], exact[:3], targets[:3]), Compared.of(own[3:], exact[3:], targets[3:])]
    )
    p, q = probabilities(exact), probabilities(own)
    losses = {name: -np.log(values[np.arange(TOKENS - 1), targets]) for name, values in (("p", p), ("q", q))}
    assert found.losses == pytest.approx(losses["q"], rel=1e-5)
    assert found.losses_fp32 == pytest.approx(losses["p"], rel=1e-5)
    assert found.error == pytest.approx(np.std(losses["q"] - losses["p"]) / math.sqrt(TOKENS - 1), rel=1e-4)
    assert found.divergences == pytest.approx((p * np.log(p / q)).sum(-1), abs=1e-6)
    assert found.same.tolist() == (exact.argmax(-1) == own.argmax(-1)).tolist()


def test_logits_of_a_text_are_those_of_transformers(
    checkpoint: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is computed in chunks, over buffers that keep what came before."""
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(quality, "CHUNK_TOKENS", 8)
    tokens = np.random.default_rng(0).integers(3, 32, 50).tolist()
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(checkpoint).eval()(torch.tensor([tokens])).logits[0].numpy()
    chunks = [chunk.copy() for chunk in Scorer(open_bundle(bundle), threads=1).logits(tokens)]
    assert [len(chunk) for chunk in chunks] == [8] * 6 + [2]
    assert np.concatenate(chunks) == pytest.approx(expected, abs=1e-4)


def test_texts_have_one_length_and_calibration_other_tokens() -> None:
    encoded = {"code": [1, *range(100, 150)], "prose": [1, *range(200, 220)]}
    texts = Texts.of(encoded, 12, 64)
    assert texts.measured == {"code": [1, *range(100, 105)], "prose": [1, *range(200, 205)]}
    assert texts.calibration == [1, 105, 106, 107, 205, 206]
    with pytest.raises(UsageError, match="the text of kind short has 2 tokens, too few to measure"):
        Texts.of({"short": [1, 2], **encoded}, 1000, 64)
    shortest = Texts.of(encoded, 1000, 9)
    assert {len(ids) for ids in (*shortest.measured.values(), shortest.calibration)} == {9}


QUALITY = Quality({"code": 2.0}, {"code": 2.0}, {"code": 0.001}, {"code": 1.0}, {"code": 0.001}, 100)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, False),
        ({"divergence": {"code": 0.004}}, True),
        ({"divergence": {"code": math.nan}}, True),
        ({"perplexity": {"code": 2.0 * 1.008}}, True),
        ({"perplexity": {"code": 2.0 * 1.008}, "error": {"code": 0.01}}, False),  # few tokens may tell this by chance
    ],
)
def test_a_target_is_missed_by_divergence_or_surely_by_perplexity(changed: dict[str, object], missed: bool) -> None:
    quality = replace(QUALITY, **changed)  # type: ignore[arg-type]
    assert misses(quality, 0.005) is missed
    assert ("misses its target of +0.5 %: build with --precision fp32" in describe_target("int8", quality, 0.005)) is (
        missed
    )


def test_what_is_said_of_a_target_agrees_with_the_figures() -> None:
    above = replace(QUALITY, perplexity={"code": 2.0 * 1.008}, error={"code": 0.01})
    assert describe_target("int8", above, 0.005) == (
        "int8 is within the error of its target of +0.5 %: perplexity rises by +0.80 % at most"
    )
    below = replace(QUALITY, perplexity={"code": 2.0 * 1.002})
    assert (
        describe_target("int8", below, 0.005)
        == "int8 meets its target of +0.5 %: perplexity changes by +0.20 % at most"
    )


class Weights:
    """A source of weights without grids, all [size, 64]."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.parameters = {name: (size, 64) for name, size in sizes.items()}

    def grid(self, name: str) -> None:
        return None


def test_the_worst_products_get_more_bits_first_and_then_what_the_target_needs() -> None:
    sizes = {f"w{number:02}": 32 * (number % 2 + 1) for number in range(20)}
    errors = {name: {4: 0.01 * (number + 1), 8: 0.0} for number, name in enumerate(sizes)}
    products, source, found = [ProductWeight((name,)) for name in sizes], Weights(sizes), Calibration(errors)
    quality = replace(QUALITY, divergence={"code": 0.04})
    plan = ProductPlan("int4", {"w19": 4}, frozenset({"w19"}))
    first = raised(plan, products, source, found, quality, 0.03)  # type: ignore[arg-type]
    assert first.bits == {"w19": 4, **{f"w{number:02}": 8 for number in range(19 - WORST, 19)}}
    second = raised(first, products, source, found, quality, 0.03)  # type: ignore[arg-type]
    more = second.bits.keys() - first.bits.keys()
    assert more
    assert min(errors[name][4] / sizes[name] for name in more) >= max(
        errors[name][4] / sizes[name] for name in sizes.keys() - second.bits.keys()
    )
    rises = replace(QUALITY, perplexity={"code": 2.0 * 1.06})  # the divergence alone would be small enough
    assert raised(first, products, source, found, rises, 0.03).bits.keys() > first.bits.keys()  # type: ignore[arg-type]
    (asked, worst) = describe_choice(second, products, found)
    assert asked == "4 bits for w19, as asked"
    assert worst.startswith("8 bits for w18, w17, w16 and")
