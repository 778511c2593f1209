"""Every drafting method: one row each, in the order in which users see them.

A method is a row of `ROWS` and the modules of its family, which have the family's name in four folders:

    redraft/methods         METHOD     the specification: signatures, state, tables, limits and options
    export/drafters         EXPORTER   the torch modules and their graphs
    runtime/drafters        DRAFTER    drafting in the decoding loop
    train/objectives        TRAINING   the loss, the recipe and the initial weights

They are imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal

from redraft.errors import UsageError
from redraft.methods.base import GraphSpec as GraphSpec
from redraft.methods.base import Method as Method


@dataclass(frozen=True)
class Row:
    """The values of a method that differ within its family.

    family:   name of its modules.   runtime: name of the one in runtime/drafters, if it is another.
    summary:  one sentence for command lines.   paper: where it is defined.
    needs:    `drafter` if a bundle must have a drafter for it; `nothing` if every bundle has the method; `text` if
              every bundle has it, and it drafts together with any drafter, too.
    trained:  False if its drafters are not trained by a command of their own.
    values:   fields of `Method` that differ from the family's METHOD. Options are names of classes next to METHOD.

    The families `feature_tree` and `block` read these:

    form:     fields of the configuration of their drafters, `FeatureConfig` in export/drafters/feature_drafter.py and
              `BlockConfig` in export/drafters/block_drafter.py.
    loss:     defaults of the recipe's table, fields of `FeatureTable` in train/objectives/feature_drafter.py and
              `BlockTable` in train/objectives/block_drafter.py.

    `feature_tree` reads these too:

    static:   True for trees of one form, False for trees by the drafter's own probabilities.
    states:   which hidden states its training takes from a verifier.
    """

    family: str
    summary: str
    paper: str = ""
    needs: Literal["drafter", "nothing", "text"] = "drafter"
    runtime: str = ""
    trained: bool = True
    values: Mapping[str, Any] = field(default_factory=dict)
    static: bool = False
    form: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    states: Literal["last", "low_middle_high"] = "last"


ROWS = {
    "none": Row("unbuilt", "Plain decoding, without speculation.", needs="nothing", runtime="none"),
    "ngram": Row(
        "unbuilt",
        "N-gram lookup in the prompt and the text so far.",
        "Saxena 2023, Prompt Lookup Decoding",
        needs="text",
        runtime="ngram",
        values={"options": "NgramOptions"},
    ),
    "suffix": Row(
        "unbuilt",
        "Suffix trees of the request's text and of a tenant's earlier outputs.",
        "Oliaro et al. 2024, SuffixDecoding (arXiv 2411.04975)",
        needs="text",
        runtime="suffix",
        values={"options": "SuffixOptions"},
    ),
    "lookahead": Row(
        "unbuilt",
        "N-grams that the verifier writes itself, by Jacobi iteration of a window of guesses.",
        "Fu et al. 2024, Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (arXiv 2402.02057)",
        needs="nothing",
        runtime="lookahead",
        values={"options": "LookaheadOptions"},
    ),
    "lyanna": Row(
        "lyanna",
        "Lyanna: a chain of predicted hidden states with token information.",
        "Chen et al., Make Every Draft Count: Hidden State based Speculative Decoding",
    ),
    "mtp": Row(
        "mtp",
        "MTP: the verifier's own multi-token-prediction module, chained.",
        "DeepSeek-V3, section 2.2",
        runtime="hidden_states",
        trained=False,
    ),
    "draft_model": Row(
        "decoder",
        "A smaller decoder with the same tokenizer, which drafts token by token.",
        "Leviathan et al. 2023; Chen et al. 2023 (speculative sampling)",
        values={"build_options": "TreeBuild", "takes_checkpoints": True, "training": "student"},
    ),
    "steered": Row(
        "decoder",
        "SD²: a draft model that the verifier's hidden states steer.",
        "Berdoz, Rheinboldt and Wattenhofer 2025, Steering Pretrained Drafters during Speculative Decoding",
        values={"build_options": "SteeringBuild", "hidden_states": ("1", "0"), "rows": "all"},
        runtime="steered",
    ),
    "eagle": Row(
        "feature_tree",
        "EAGLE: a layer over features and the next token drafts trees of one form.",
        "Li et al. 2024, EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, section 4",
        static=True,
        form={"input_norm": False},
        loss={"noise": 0.1},
    ),
    "eagle2": Row(
        "feature_tree",
        "EAGLE-2: EAGLE's drafter, with trees by its own probabilities.",
        "Li et al. 2024, EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, section 4",
        trained=False,
        form={"input_norm": False},
    ),
    "eagle3": Row(
        "feature_tree",
        "EAGLE-3: low, middle and high hidden states drafted from together.",
        "Li et al. 2025, EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test, "
        "section 3",
        values={"hidden_states": ("0", "1", "last")},
        form={"fusion": "attention", "outputs": "normed", "own_head": True},
        loss={"passes": 4, "step_weight": 0.8, "feature_loss": "none", "features": 0.0, "soft": 1.0},
        states="low_middle_high",
    ),
    "hass": Row(
        "feature_tree",
        "HASS: EAGLE-2 with a drafter that was trained on its own features.",
        "Zhang et al. 2024, Learning Harmonized Representations for Speculative Sampling (arXiv 2408.15766)",
        form={"input_norm": False},
        loss={"passes": 3, "top": 10, "top_weight": 1.0, "noise": 0.1, "detach": True},
    ),
    "fspad": Row(
        "feature_tree",
        "FSPAD: the token samples the feature; token and feature have their own outputs.",
        "Gui et al. 2024, Boosting Lossless Speculative Decoding via Feature Sampling and Partial Alignment "
        "Distillation (arXiv 2408.15562)",
        form={"fusion": "gated_fused", "outputs": "doubled", "input_norm": False},
        loss={"noise": 0.1},
    ),
    "griffin": Row(
        "feature_tree",
        "GRIFFIN: tokens guide the fusion, and training counts aligned tokens alone.",
        "Hu et al. 2025, GRIFFIN: Effective Token Alignment for Faster Speculative Decoding, section 4",
        form={"fusion": "token_guided", "outputs": "doubled", "input_norm": False},
        loss={
            "passes": 3,
            "growing": True,
            "top": 10,
            "top_weight": 0.5,
            "aligned": 3,
            "masks": "earlier",
            "noise": 0.1,
            "detach": True,
        },
    ),
    "medusa": Row(
        "medusa",
        "Medusa: heads on the verifier's last hidden state, and a static tree of their candidates.",
        "Cai et al. 2024, Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, Medusa-1",
    ),
    "multi_head": Row(
        "multi_head",
        "Meta's multi-token prediction: heads of one layer each on the verifier's trunk, and a static tree.",
        "Gloeckle et al. 2024, Better & Faster Large Language Models via Multi-token Prediction, section 2",
        runtime="hidden_states",
    ),
    "dflash": Row(
        "block",
        "DFlash: masks over the verifier's hidden states become a block of tokens in one pass.",
        "Chen et al. 2026, DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036)",
        runtime="feature_tree",
        form={"causal": False, "anchor_predicts": False},
        loss={"hard": 1.0, "decay": 4.0},
    ),
    "dspark": Row(
        "block",
        "DSpark: a block whose tokens know the token before, and a head that estimates their acceptance.",
        "DeepSeek 2026, DSpark (DeepSpec)",
        runtime="feature_tree",
        form={"causal": False, "anchor_predicts": True, "token_rank": 256, "confidence": True},
        loss={"hard": 0.1, "overlap": 0.9, "confidence": 1.0, "decay": 4.0},
    ),
    "jetspec": Row(
        "block",
        "JetSpec: a block whose masks attend to earlier ones alone, learned from the verifier's distribution.",
        "Hu et al. 2026, JetSpec: Breaking the Scaling Ceiling of Speculative Decoding with Parallel Tree Drafting "
        "(arXiv 2606.18394)",
        runtime="feature_tree",
        form={"causal": True, "anchor_predicts": False},
        loss={"soft": 1.0},
    ),
}
"""All methods by their ids, which configurations, recipes and manifests have."""
METHODS = tuple(ROWS)
LOOKUPS = tuple(name for name, row in ROWS.items() if row.needs == "text")
"""Methods that look drafts up in texts, alone or together with a drafter of the bundle."""
NONE, NGRAM = METHODS[0], LOOKUPS[0]
"""Plain decoding, and the default lookup."""
UNBUILT = tuple(name for name, row in ROWS.items() if row.needs != "drafter" and name != NONE)
"""Methods that need no engine, so every bundle has them."""


@cache
def find_method(name: str) -> Method[Any]:
    """Return the specification of the method `name`. Raises UsageError for an unknown one."""
    if name not in ROWS:
        raise UsageError(f"unknown drafting method {name!r}", f"the methods are {', '.join(METHODS)}")
    row = ROWS[name]
    module = import_module(f"{__name__}.{row.family}")
    values = {key: getattr(module, value) if key.endswith("options") else value for key, value in row.values.items()}
    method: Method[Any] = module.METHOD
    return replace(method, id=name, summary=row.summary, **values)


def built_methods() -> tuple[str, ...]:
    """Return the methods that need a drafter in the bundle."""
    return tuple(name for name, row in ROWS.items() if row.needs == "drafter")


def trained_methods() -> tuple[str, ...]:
    """Return the methods whose drafters a command of their own trains."""
    return tuple(name for name in built_methods() if ROWS[name].trained)


def checkpoint_method() -> str:
    """Return the method of a drafter that is a plain checkpoint of a decoder."""
    return next(name for name in METHODS if find_method(name).takes_checkpoints)


def native_method() -> str:
    """Return the method of a drafter inside of the verifier's own checkpoint."""
    return next(name for name in METHODS if find_method(name).native)
