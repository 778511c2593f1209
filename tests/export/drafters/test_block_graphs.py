"""The draft graph of block drafters equals trees grown in Python from the published forward pass, written by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from redraft import names
from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters import find_exporter
from redraft.export.drafters.block_drafter import BlockConfig, BlockDrafter
from redraft.export.drafters.writing import Target
from redraft.methods import ROWS
from redraft.methods.block import BlockBuild

from .block_by_hand import block_states, chance, sizes_of, token_bias
from .draft_calls import (
    NAME,
    Draft,
    Expected,
    Exported,
    Sampling,
    check_drafts,
    export,
    grown,
    in_each_form,
    program,
    trained,
)
from .tiny import HIDDEN, VOCABULARY, Verifier, randomized, save

SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=16, logit_scale=0.6,
    draft_logit_scale=1.3, hidden_states=("0", "last"),
)  # fmt: skip
BOTH_WAYS, AFTER_TOKENS, ONE_WAY = (name for name, row in ROWS.items() if row.family == "block")
"""The methods by their forms: masks that see each other, with the token before, and masks that see earlier ones."""


@dataclass(frozen=True)
class Case:
    """How a drafter is built. drafted: tokens of its graph."""

    method: str
    config: BlockConfig
    options: BlockBuild
    drafted: int = VOCABULARY


def form(method: str, **changes: Any) -> BlockConfig:
    own = {**ROWS[method].form, **({"token_rank": 5} if "token_rank" in ROWS[method].form else {})}
    return BlockConfig(**{**SIZES, "layers": 2, "steps": 3, **own, **changes})


def build(**options: Any) -> BlockBuild:
    return BlockBuild(precision="fp32", **options)


CASES = {
    "both ways": Case(BOTH_WAYS, form(BOTH_WAYS, head_norms=True), build()),
    "one way": Case(
        ONE_WAY, form(ONE_WAY, layers=1, steps=4, draft_vocab_size=20, qkv_bias=True), build(width=2, nodes=9), 20
    ),
    "after tokens": Case(
        AFTER_TOKENS, form(AFTER_TOKENS, draft_vocab_size=20), build(width=2, draft_vocabulary=15), 15
    ),
    "fewer steps": Case(AFTER_TOKENS, form(AFTER_TOKENS, layers=1), build(steps=2, nodes=5, confidence=False)),
    "chain": Case(BOTH_WAYS, form(BOTH_WAYS, layers=1, steps=2), build(width=1, draft_vocabulary=9), 9),
}  # fmt: skip


def random_module(config: BlockConfig, std: float = 0.15) -> BlockDrafter:
    return randomized(lambda: BlockDrafter(config), std=std)


def published(module: BlockDrafter, keep: bool = False) -> dict[str, torch.Tensor]:
    """The module's numbers by their names in the authors' checkpoints.   keep: with gradients."""
    names = {
        "features.": "fc.", "feature_norm": "hidden_norm", "mlp_norm": "post_attention_layernorm",
        "input_norm": "input_layernorm", "gate_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj", "tokens.": "markov_head.markov_w1.", "token_head.": "markov_head.markov_w2.",
        "confidence.": "confidence_head.proj.", **{f"{x}_proj": f"self_attn.{x}_proj" for x in "qkvo"},
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    }  # fmt: skip
    found = {}
    for name, tensor in module.state_dict(keep_vars=keep).items():
        new = next((name.replace(old, new) for old, new in names.items() if old in name), name)
        found[new] = tensor
    return found


def expected_of(made: Exported, options: BlockBuild, module: BlockDrafter, verifier: Verifier) -> Expected:
    """Drafts by hand."""
    config, w, (embedding, head) = module.config, published(module), verifier.shared
    columns = torch.from_numpy(made.vocabulary)
    trained_on = torch.arange(VOCABULARY)
    if config.draft_vocab_size:  # W_2 has rows for the tokens of the training
        trained_on = _trained_vocabulary(config)
    own = torch.searchsorted(trained_on, columns)
    rows, first = config.rows(made.shape.steps), 0 if config.anchor_predicts else 1

    def expected(features: torch.Tensor, tokens: list[int], sampling: Sampling) -> Draft:
        block = torch.cat([embedding[tokens[-1:]], module.mask.expand(rows - 1, -1)])
        states = block_states(w, sizes_of(config), features, block)[first:]

        def before(path: tuple[int, ...]) -> int:
            return path[-1] if path else tokens[-1]

        def logits_after(path: tuple[int, ...]) -> np.ndarray:
            logits = head[columns] @ states[len(path)] * config.logit_scale
            if config.token_rank:
                logits = logits + token_bias(w, before(path))[own]
            return logits.numpy()  # type: ignore[no-any-return]

        def chance_after(path: tuple[int, ...]) -> float:
            return float(chance(w, states[len(path)], before(path)))

        sure = chance_after if config.confidence and options.confidence else None
        return grown(made, logits_after, tokens[-1], sampling, sure)

    return expected


def _trained_vocabulary(config: BlockConfig) -> torch.Tensor:
    from .tiny import token_data

    tokens = token_data(config).draft_vocabulary
    assert tokens is not None
    return tokens


@pytest.fixture(scope="module", params=CASES)
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Exported, Case]:
    """A trained drafter's graph, and how it was built."""
    case = CASES[request.param]
    folder, module = tmp_path_factory.mktemp("block"), random_module(case.config)
    made = export(folder, little_verifier, case.method, module, case.config, case.options)
    assert (made.shape.layers, len(made.vocabulary)) == (case.config.layers, case.drafted)
    return made, case


@in_each_form
def test_a_draft_is_the_tree_of_the_blocks_rows(
    exported: tuple[Exported, Case], little_verifier: Verifier, form: str, samplings: tuple[Sampling, ...]
) -> None:
    """Also after drafts whose rows the next draft overwrites."""
    made, case = exported
    if form == "single" and not case.config.causal:
        assert not made.method.graphs[names.DRAFT].one_way(made.shape), "the CPU's kernel for one sequence is causal"
        return
    expected = expected_of(made, case.options, random_module(case.config), little_verifier)
    check_drafts(made, program(made, form, len(samplings)), samplings, expected)


def test_random_drafters_have_the_form_of_their_method(little_verifier: Verifier, tmp_path: Path) -> None:
    verifier = AutoConfig.from_pretrained(str(little_verifier.checkpoint.path))
    for method in (BOTH_WAYS, AFTER_TOKENS, ONE_WAY):
        target, exporter = Target(NAME, little_verifier.export, tmp_path, build(steps=5)), find_exporter(method)
        config: Any = exporter.random_config(target, verifier)
        assert {name: getattr(config, name) for name in ROWS[method].form} == ROWS[method].form
        assert exporter.shape(target, config).steps == config.steps == 5


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            AFTER_TOKENS,
            build(),
            "it has blocks that attend both ways and predict from masks, expected blocks .* all rows",
        ),
        (
            ONE_WAY,
            build(),
            f"is no drafter of {ONE_WAY}: it has blocks that attend both ways and .* expected .* one way",
        ),
        (BOTH_WAYS, build(steps=4), "trained for blocks of 3 tokens, not 4; build it with at most steps=3"),
        (BOTH_WAYS, build(width=3, draft_vocabulary=2), "a node cannot have 3 children of 2 tokens"),
    ],
)
def test_a_build_that_does_not_fit_is_refused(
    little_verifier: Verifier, tmp_path: Path, method: str, options: BlockBuild, message: str
) -> None:
    config = form(BOTH_WAYS)
    opened = save(tmp_path / "drafter", little_verifier.checkpoint, BOTH_WAYS, random_module(config), config)
    with pytest.raises((CheckpointError, UsageError), match=message):
        trained(opened, little_verifier, tmp_path, options, find_exporter(method))


def test_a_drafter_that_predicts_from_all_rows_is_not_one_of_masks(little_verifier: Verifier, tmp_path: Path) -> None:
    config = form(AFTER_TOKENS)
    opened = save(tmp_path / "drafter", little_verifier.checkpoint, AFTER_TOKENS, random_module(config), config)
    with pytest.raises(CheckpointError, match=r"predict from all rows, expected .* predict from masks"):
        trained(opened, little_verifier, tmp_path, build(), find_exporter(BOTH_WAYS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a number from 1 to 16, not 0"),
        ({"steps": 32}, "steps must be a number from 1 to 31, not 32"),
        ({"token_rank": -1}, "token_rank must be 0 or more, not -1"),
        ({"hidden_states": ("0", "0")}, "hidden_states must be different names"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        replace(form(BOTH_WAYS), **changes)
