"""A device's tokens against the host's: the same, or others at a near-tie of the host's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from redraft.bench.compare import PLAIN, Settings, decode
from redraft.bench.prompts import Prompt
from redraft.bench.statistics import first_difference
from redraft.config import Precision
from redraft.engines import Bundle, open_bundle
from redraft.engines.manifest import Manifest
from redraft.errors import RedraftError, UsageError
from redraft.runtime import Budget, Runtime, SamplingParams
from redraft.runtime.drafters import method_words

NEAR_TIES: Mapping[Precision, float] = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.8}
"""Logit margins of the host that rounding may reverse; the largest logits are about 16. With weights in fewer bits,
every backend rounds differently: their differing texts are reported, without an error.
"""
Texts = dict[str, list[tuple[int, ...]]]
"""Tokens of every prompt by method."""


class WrongTokens(RedraftError):
    """A device writes other tokens than the host, which rounding does not explain."""


def check_reference(manifest: Manifest, reference: Manifest) -> None:
    """Raise UsageError if `reference` is of another model, or cannot run on the host."""
    if reference.backend != "onnxruntime":
        raise UsageError(f"the host runs ONNX Runtime's bundles only, the reference is for {reference.backend}")
    ours, theirs = (
        (dict(each.model.weights) or each.model.source, each.model.random_weights, each.shape.vocabulary)
        for each in (manifest, reference)
    )
    if ours != theirs:
        raise UsageError(
            f"the reference is of another model: expected the weights of {manifest.model.source}, "
            f"found those of {reference.model.source}",
            "build it of the same checkpoint with --backend onnxruntime",
        )


def device_texts(
    runtime: Runtime, manifest: Manifest, prompts: Sequence[Prompt], params: SamplingParams, size: Budget
) -> Texts:  # fmt: skip
    """Return the device's tokens, over trees of one size; nothing for random weights."""
    methods = [] if manifest.model.random_weights else [PLAIN, *method_words(manifest.drafters)[1:]]
    settings = Settings(params, size)
    texts = [prompt.text for prompt in prompts]
    return {method: [decode(runtime, text, method, settings).token_ids for text in texts] for method in methods}


def compared(
    bundle: Bundle, reference: Path | None, prompts: Sequence[Prompt], texts: Texts, params: SamplingParams
) -> dict[str, Any]:
    """Return the places at which a text differs from the host's, with the host's logit margin: a near-tie, or an error.

    The host runs `reference`, or the bundle itself. Raises UsageError if nothing can be compared.
    """
    manifest = bundle.manifest
    if manifest.model.random_weights:
        raise UsageError("random weights: rounding decides every token")
    if manifest.backend != "onnxruntime" and not reference:
        raise UsageError("the host runs ONNX Runtime's bundles only: give one of the same model as --reference")
    path = reference or bundle.path
    precision = open_bundle(path, verify=False).manifest.precision
    with Runtime.open(path, verify=False) as host:
        expected = [host.generate([prompt.text], params, PLAIN, record_logit_margins=True)[0] for prompt in prompts]
    leads = [NEAR_TIES.get(each, np.inf) for each in (manifest.precision, precision)]
    found: dict[str, Any] = {"reference": {"bundle": str(path), "precision": precision}}
    for method, outputs in texts.items():
        differences, wrong = [], []
        for prompt, output, plain in zip(prompts, outputs, expected, strict=True):
            if (place := first_difference(output, plain.token_ids)) is None:
                continue
            gap = (
                plain.logit_margins[place]
                if plain.logit_margins and place < min(len(output), len(plain.logit_margins))
                else None
            )
            differences.append({"prompt": prompt.id, "token": place, "logit_margin": gap})
            if gap is None or gap >= max(leads):
                wrong.append(f"prompt {prompt.id}, token {place}, which led by {gap}")
        found[method] = {"prompts": len(prompts), "differences": differences, "wrong": wrong}
    return found
