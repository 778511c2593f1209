"""Draft graphs of heads equal the heads written from their papers, and a static tree that Python walks node by node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from redraft import names
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.model_config import load_config
from redraft.export.drafters import find_exporter
from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter, trunk_state
from redraft.export.drafters.static_tree import Accuracies, tree_of
from redraft.export.drafters.writing import Target
from redraft.methods.static_tree import StaticTreeBuild
from redraft.train.distillation import ChainAttention

from .draft_calls import NAME, Exported, Sampling, check_drafts, export, falls, in_each_form, of_heads, program, trained
from .tiny import HIDDEN, VOCABULARY, Verifier, make_verifier, randomized, save
from .trunk_heads import head_logits, random_heads

ACCURACIES = ((0.6, 0.2, 0.1), (0.5, 0.25, 0.05), (0.4, 0.1, 0.1))
SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, logit_scale=0.6, draft_logit_scale=1.3, rank_accuracies=ACCURACIES
)
MEDUSA = MedusaConfig(**SIZES, heads=3)
TRUNK = MultiHeadConfig(
    **SIZES, intermediate_size=48, heads=4, kv_heads=2, head_dim=8, draft_heads=3, hidden_states=("0",)
)
Logits = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""A head's number, from 0, features [T, n] and the verifier's head [H, n] -> logits [H]."""


def medusa_logits(module: MedusaHeads) -> Logits:
    """W_2 (h + SiLU(W_1 h + b_1)) of the last row h."""

    def logits(head: int, features: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        rows, hidden = slice(head * HIDDEN, (head + 1) * HIDDEN), features[-1]
        state = hidden + F.silu(module.heads.weight[rows] @ hidden + module.heads.bias[rows])
        return matrix @ (state * MEDUSA.logit_scale)

    return logits


def trunk_logits(module: MultiHeadDrafter) -> Logits:
    return lambda head, features, matrix: head_logits(module, head, features, matrix)


@dataclass(frozen=True)
class Family:
    """A method of heads: its random module, and what that module computes."""

    method: str
    config: Any
    module: Callable[[], Any]
    logits: Callable[[Any], Logits]


FAMILIES = (
    Family("medusa", MEDUSA, lambda: randomized(lambda: MedusaHeads(MEDUSA)), medusa_logits),
    Family("multi_head", TRUNK, lambda: random_heads(TRUNK), trunk_logits),
)
BUILDS = {
    "whole": (StaticTreeBuild(nodes=12, precision="fp32"), 0),
    "pruned": (StaticTreeBuild(nodes=6, steps=2, width=2, draft_vocabulary=8, precision="fp32", head_rank=4), 9),
}
"""Options of a build, and the tokens that the drafter was trained on; 0 for all."""


@pytest.fixture(scope="module", params=[(family, build) for family in FAMILIES for build in BUILDS])
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Family, Exported]:
    family, build = request.param
    options, drafted = BUILDS[build]
    config, folder = replace(family.config, draft_vocab_size=drafted), tmp_path_factory.mktemp("heads")
    made = export(folder, little_verifier, family.method, family.module(), config, options)
    assert made.shape.draft_vocabulary == (options.draft_vocabulary or VOCABULARY)
    if family.method == "multi_head":
        assert made.shape.kv_heads == made.shape.steps * TRUNK.kv_heads  # no more layers than the tree has levels
    return family, made


@in_each_form
def test_a_draft_is_the_static_tree_of_the_heads(
    exported: tuple[Family, Exported], little_verifier: Verifier, form: str, samplings: tuple[Sampling, ...]
) -> None:
    family, made = exported
    if form == "single" and family.method == "medusa":
        assert made.method.graphs[names.DRAFT].chain_steps is None, "without KV, the CPU has no form for one sequence"
        return
    logits, matrix = family.logits(family.module()), little_verifier.shared[1][torch.from_numpy(made.vocabulary)]
    expected = of_heads(made, lambda head, features: logits(head, features, matrix), ACCURACIES)
    drafts = check_drafts(made, program(made, form, len(samplings)), samplings, expected)
    assert all(falls(draft) for draft, one in zip(drafts, samplings * 3, strict=True) if one.drawn)


def test_training_and_graphs_compute_the_same() -> None:
    """A head alone, as training runs it, and all heads in one attention, as graphs do, equal the loop."""
    module = random_heads(TRUNK)
    trunk, places = torch.randn(1, 7, HIDDEN, generator=torch.Generator().manual_seed(5)), torch.arange(7)
    together = module(trunk, places, ChainAttention(TRUNK.together(3), places[None]))
    for head in range(3):
        alone = module.head(head, trunk, places, ChainAttention(TRUNK, places[None]))
        torch.testing.assert_close(together[:, :, head], alone, atol=1e-5, rtol=1e-5)
        for place in (0, 6):
            wanted = head_logits(module, head, trunk[0, : place + 1], torch.eye(HIDDEN) / TRUNK.logit_scale)
            torch.testing.assert_close(alone[0, place], wanted, atol=1e-4, rtol=1e-4)


def test_medusas_heads_begin_as_the_verifiers_own() -> None:
    """With W and b of zero, each head reads the hidden state itself."""
    hidden = torch.randn(2, HIDDEN)
    assert torch.equal(MedusaHeads(MEDUSA)(hidden), hidden[:, None].expand(-1, 3, -1))


def test_the_trunks_final_norm_is_not_trained() -> None:
    """It is the verifier's, which all heads share."""
    module = MultiHeadDrafter(TRUNK)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in module.named_parameters()} - trained == {"norm.weight"}


def test_random_heads_have_as_many_candidates_as_the_options_need(little_verifier: Verifier, tmp_path: Path) -> None:
    options, exporter = StaticTreeBuild(nodes=14, steps=1, width=14), find_exporter("medusa")
    config: Any = exporter.random_config(
        Target(NAME, little_verifier.export, tmp_path, options), load_config(little_verifier.checkpoint)
    )
    assert tuple(exporter.tree(config, options)) == tuple((rank,) for rank in range(14))


def test_bf16_weights_of_a_drafter_are_its_own_bytes(tmp_path: Path) -> None:
    """The drafter's file has the verifier's file name, so the bundle gives it another."""
    verifier = make_verifier(tmp_path / "verifier", "bfloat16")
    config = replace(MEDUSA, heads=8, rank_accuracies=((0.5,),) * 8)
    made = export(tmp_path, verifier, "medusa", randomized(lambda: MedusaHeads(config)), config, StaticTreeBuild())
    refs = [ref for ref in made.drafter.weights if ref.initializer.startswith(f"{NAME}.")]
    assert {(ref.file, ref.dtype) for ref in refs} == {(f"weights/{NAME}.model.safetensors", "BF16")}
    assert (made.folder / refs[0].file).read_bytes() == (tmp_path / "drafter/model.safetensors").read_bytes()


def refused(module: nn.Module, config: Any, verifier: Verifier, folder: Path, **options: object) -> str:
    """The one line of an export of heads on the trunk that must fail."""
    opened = save(folder / "drafter", verifier.checkpoint, "multi_head", module, config)
    with pytest.raises(CheckpointError) as error:
        trained(opened, verifier, folder, StaticTreeBuild(precision="fp32", **options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_heads_that_do_not_fit_are_refused_in_one_line(little_verifier: Verifier, tmp_path: Path) -> None:
    """A tree that the heads do not cover, a state that no graph outputs, and incomplete heads."""
    module = random_heads(TRUNK)
    line = refused(module, TRUNK, little_verifier, tmp_path, steps=4)
    assert "the drafter has 3 heads, which draft no tree of 4 levels" in line
    line = refused(module, replace(TRUNK, hidden_states=("1",)), little_verifier, tmp_path)
    assert "the verifier's graph does not output hidden state '1'" in line
    line = refused(module.layers, TRUNK, little_verifier, tmp_path)
    assert "missing layers.0.down_proj.weight" in line


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MEDUSA, {"heads": 17}, "heads must be a number from 1 to 16, not 17"),
        (TRUNK, {"draft_heads": 0}, "draft_heads must be a number from 1 to 16, not 0"),
        *((config, {"rank_accuracies": ((1.5,),)}, "must be shares from 0 to 1") for config in (MEDUSA, TRUNK)),
        *((TRUNK, {"hidden_states": states}, "the number of one layer") for states in ((), ("last",), ("0", "1"))),
    ],
)
def test_settings_that_cannot_be(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        replace(config, **changes)


def test_the_trunk_ends_before_the_last_layer() -> None:
    assert trunk_state(12) == "10"
    with pytest.raises(CheckpointError, match="the verifier has one layer, so no trunk before its last layer"):
        trunk_state(1)


def test_a_tree_keeps_to_its_options() -> None:
    """Its order is that of the heads' own accuracies: 0.6 * 0.5 is above the second candidate's 0.2."""
    found = tree_of(3, ACCURACIES, StaticTreeBuild(nodes=20, steps=2, width=2), VOCABULARY)
    assert list(found) == [(0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1)]
    assert list(found.values()) == pytest.approx([0.6, 0.3, 0.2, 0.15, 0.1, 0.05])


@pytest.mark.parametrize(
    ("heads", "accuracies", "options", "line"),
    [
        (3, ACCURACIES, {"steps": 4}, "has 3 heads, which draft no tree of 4 levels; build it with at most steps=3"),
        (3, ACCURACIES, {"width": 4}, "accuracies of 3 candidates of a head, not of 4; .* at most width=3"),
        (
            3,
            ACCURACIES,
            {"draft_vocabulary": 2, "width": 3},
            "cannot have 3 children of 2 tokens; lower width, or raise",
        ),
        (3, (), {}, "the drafter has accuracies of 0 heads, expected those of 3; write it again"),
        (4, ACCURACIES, {}, "the drafter has accuracies of 3 heads, expected those of 4"),
    ],
)
def test_trees_that_the_heads_do_not_cover(
    heads: int, accuracies: Accuracies, options: dict[str, int], line: str
) -> None:
    asked = StaticTreeBuild(**options)
    with pytest.raises((CheckpointError, UsageError), match=line):
        tree_of(heads, accuracies, asked, asked.draft_vocabulary or VOCABULARY)
