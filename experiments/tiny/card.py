"""The model card of a published verifier: its shape, its training data, and the figures that `evaluate` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.tiny.evaluate import Figures
from experiments.tiny.recipe import VerifierRecipe

FIGURES = "evaluation.json"
_SOURCES = {
    "code": ("Source of the Python standard library, tests and tables left out", "PSF License 2.0"),
    "word_problems": ("GSM8K, training split (OpenAI, 2021), calculator annotations removed", "MIT"),
    "prose": ("English novels and stories of the 19th and early 20th century", "public domain"),
}
_TEMPLATE = Path(__file__).parent / "card_template.md"


def write_card(folder: Path, recipe: VerifierRecipe, data: dict[str, Any], figures: Figures) -> None:
    """Write README.md and evaluation.json into a published folder."""
    (folder / FIGURES).write_text(json.dumps(figures.to_dict(), indent=2) + "\n", encoding="utf-8")
    text = _TEMPLATE.read_text(encoding="utf-8").format(
        **{**recipe.to_dict(), **recipe.to_dict()["model"]},
        parameters=figures.parameters / 1e6,
        mtp_parameters=figures.mtp_parameters / 1e6,
        tokens=recipe.steps * recipe.batch_tokens / 1e6,
        decay_percent=100 * recipe.decay_share,
        new_tokens=figures.new_tokens,
        prompts=min(k.prompts for k in figures.kinds.values()),
        data="\n".join(_data_row(kind, data[kind], recipe) for kind in recipe.weights),
        figures="\n".join(
            f"| {kind} | {k.bits_per_byte:.3f} | {1 / k.tokens_per_byte:.2f} | {k.ended:.0%} | {k.mtp_acceptance:.0%} |"
            for kind, k in ((kind, figures.kinds[kind]) for kind in recipe.weights)
        ),
        without_error=figures.python_without_error,
        parsed=figures.python_parsed,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _data_row(kind: str, facts: dict[str, Any], recipe: VerifierRecipe) -> str:
    source, licence = _SOURCES.get(kind, ("", ""))
    share = recipe.weights[kind] / sum(recipe.weights.values())
    return f"| {kind} | {source} | {licence} | {facts['documents']} | {facts['tokens'] / 1e6:.2f} M | {share:.0%} |"
