"""Table 1 of Lyanna's paper: conditional acceptance by step, with and without token information and first token.

Measured on greedy texts of the verifier, over every position. Each variant's drafter is written to OUT/NAME/drafter, to
build bundles for the part `traces`, which measures in decoding.
"""

from __future__ import annotations

import argparse
from typing import Any

from experiments.lyanna.training import FULL, mean_of_kinds, open_texts, percents, publish_variant, train_variant
from redraft.bench.environment import environment
from redraft.train.acceptance import WIDTH

VARIANTS: dict[str, dict[str, bool]] = {
    FULL: {},
    "without-token-info": {"token_info": False},
    "without-first-token": {"first_token": False},
}
RULES = {"top": "likeliest token", "wide": f"among the {WIDTH} likeliest"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train the variants equally; return the acceptance of each by kind, and the mean of kinds."""
    texts = open_texts(options)
    variants = {}
    for name, changes in VARIANTS.items():
        measured, objective = train_variant(texts, name, **changes)
        publish_variant(texts, name, objective)
        last = measured[-1]
        means = {rule: mean_of_kinds(last["acceptance"], rule) for rule in RULES}
        variants[name] = {"steps": last["step"], "kinds": last["acceptance"], "mean": means}
    return {"environment": environment(options.threads), "recipe": texts.recipe.to_dict(), "variants": variants}


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return a table for each rule: rows by kind and variant, columns by step."""
    variants = result["variants"]
    depths = len(variants[FULL]["mean"]["top"])
    shown = {}
    for rule, words in RULES.items():
        rows = [["kind", "variant", *(f"step {depth}" for depth in range(1, depths + 1)), "drafts"]]
        for name, figures in variants.items():
            rows += [
                [kind, name, *percents(found[rule]), str(found["starts"][0])]
                for kind, found in figures["kinds"].items()
            ]
            rows.append(["mean", name, *percents(figures["mean"][rule]), ""])
        rows[1:] = sorted(rows[1:], key=lambda row: (row[0] == "mean", row[0]))
        shown[f"conditional acceptance, {words}, after {variants[FULL]['steps']} steps of training"] = rows
    return shown
