"""The draft graph of drafters that predict features equals trees grown in Python, each path computed alone in torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter, Fusion, Guide, Outputs
from redraft.export.drafters.feature_tree import FeatureTreeExporter
from redraft.export.drafters.layer import DrafterLayer
from redraft.export.drafters.level_tree import LevelTree, rank_log_probs
from redraft.export.drafters.writing import Target
from redraft.methods import ROWS, find_method
from redraft.methods.feature_tree import FeatureTreeBuild

from .draft_calls import (
    NAME,
    Draft,
    Expected,
    Exported,
    Sampling,
    chained,
    check_drafts,
    export,
    in_each_form,
    program,
    trained,
)
from .tiny import HIDDEN, VOCABULARY, Verifier, randomized, save

METHOD = find_method("eagle2")
STEPS = 3
SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=16, logit_scale=0.6,
    draft_logit_scale=1.3,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """How a drafter is built, and whether its trees are static. drafted: tokens of its graph."""

    config: FeatureConfig
    options: FeatureTreeBuild
    static: bool = False
    drafted: int = VOCABULARY


def form(fusion: Fusion, outputs: Outputs, **changes: Any) -> FeatureConfig:
    return FeatureConfig(**SIZES, fusion=fusion, outputs=outputs, **changes)


def build(**options: Any) -> FeatureTreeBuild:
    return FeatureTreeBuild(precision="fp32", steps=options.pop("steps", STEPS), **options)


CASES = {
    "linear": Case(form("linear", "one", input_norm=False), build(head_rank=5), static=True),
    "gated": Case(
        form("gated_fused", "doubled", draft_vocab_size=9, input_norm=False),
        build(steps=2, nodes=8, draft_vocabulary=7),
        drafted=7,
    ),
    "chain": Case(form("token_guided", "normed_back", fusion_size=24), build(width=1, draft_vocabulary=20), drafted=20),
    "attention": Case(
        form(
            "attention", "normed", draft_vocab_size=11, feature_norms=True, joint_norm=True, own_head=True,
            hidden_states=("0", "last"),
        ),
        build(width=2),
        static=True,
        drafted=11,
    ),
}  # fmt: skip
"""Every kind of outputs. A tree of two steps has one level to attend for, one of three has two. Other forms differ in
the formulas of their modules only."""


def random_module(config: FeatureConfig, std: float = 0.15) -> FeatureDrafter:
    return randomized(lambda: FeatureDrafter(config), std=std)


def exporter_of(form: dict[str, Any], static: bool = False) -> FeatureTreeExporter:
    """The exporter of a method whose drafters have this form."""
    return FeatureTreeExporter(METHOD, replace(ROWS[METHOD.id], form=form, static=static))


@pytest.fixture(scope="module", params=CASES)
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Exported, FeatureConfig]:
    """A trained drafter's graph, and its configuration."""
    case = CASES[request.param]
    exporter = exporter_of({"fusion": case.config.fusion, "outputs": case.config.outputs}, case.static)
    folder, module = tmp_path_factory.mktemp("form"), random_module(case.config)
    made = export(folder, little_verifier, METHOD.id, module, case.config, case.options, exporter)
    assert (made.shape.static, len(made.vocabulary)) == (case.static, case.drafted)
    return made, case.config


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of rows that see the rows before them, with the heads of `SIZES`."""
    heads = [
        x.unflatten(-1, (SIZES[count], SIZES["head_dim"])).transpose(1, 2)
        for x, count in ((q, "heads"), (k, "kv_heads"), (v, "kv_heads"))
    ]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)


def expected_of(exported: Exported, config: FeatureConfig, verifier: Verifier) -> Expected:
    """Drafts of the module."""
    module, (embedding, head) = random_module(config), verifier.shared

    def step(rows: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = module(rows[None], embeddings[None], torch.arange(len(rows))[None], causal)
        return predicted.token[0] * config.logit_scale, predicted.feature[0]

    drafts = chained(exported, step, embedding, head if module.head is None else module.head.weight)

    def expected(features: torch.Tensor, tokens: list[int], sampling: Sampling) -> Draft:
        return drafts(module.inputs(features[None])[0], tokens, sampling)

    return expected


@in_each_form
def test_a_draft_is_the_tree_of_the_modules_paths(
    exported: tuple[Exported, FeatureConfig], little_verifier: Verifier, form: str, samplings: tuple[Sampling, ...]
) -> None:
    """A node's path sees no other path."""
    made, config = exported
    check_drafts(made, program(made, form, len(samplings)), samplings, expected_of(made, config, little_verifier))


def _half(layer: DrafterLayer, rows: slice) -> DrafterLayer:
    """A layer with one output: these rows of the one with two."""
    one = DrafterLayer(layer.config, layer.q_proj.in_features, layer.input_norm is not None)
    state = layer.state_dict()
    one.load_state_dict({**state, "down_proj.weight": state["down_proj.weight"][rows]})
    return one


HALVES = (lambda layer: _half(layer, slice(HIDDEN)), lambda layer: _half(layer, slice(HIDDEN, None)))
GUIDES: tuple[tuple[Guide, ...], ...] = (("fused", "feature"), ("fused", "fused"), ("fused",), ("token",))


@pytest.mark.parametrize(
    ("fusion", "outputs", "guides"),
    [
        *((fusion, outputs, ("fused", "token")) for fusion in get_args(Fusion) for outputs in get_args(Outputs)),
        *((fusion, "doubled", guides) for fusion in ("token_guided", "token_guided_narrow") for guides in GUIDES),
    ],
)
def test_a_module_computes_its_formulas(fusion: Fusion, outputs: Outputs, guides: tuple[Guide, ...]) -> None:
    """A row's fusion and its outputs, around the layer that all drafters share."""
    module = random_module(form(fusion, outputs, feature_norms=True, fusion_size=24, guides=guides))
    w = {name: parameter for name, parameter in module.named_parameters() if not name.startswith("layer.")}
    features, embeddings = torch.randn(2, 1, 5, HIDDEN, generator=torch.Generator().manual_seed(6))

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def silu(x: torch.Tensor) -> torch.Tensor:
        return x / (1 + (-x).exp())

    rows = norm(features, w["feature_norms.0.weight"])
    if fusion == "attention":
        normed = (embeddings, w["fusion.embedding_norm.weight"]), (rows, w["fusion.feature_norm.weight"])
        read, residual = torch.cat([norm(*one) for one in normed], dim=-1), rows
    else:
        read = torch.zeros_like(rows)
        if "fused" in guides:
            read = torch.cat([rows, embeddings], dim=-1) @ w["fusion.projection.weight"].T + w["fusion.projection.bias"]
        if fusion.startswith("gated"):
            sampled = norm(read, w["fusion.norm.weight"])
            gate, up = silu(embeddings @ w["fusion.gate.weight"].T), sampled @ w["fusion.up.weight"].T
            read = read + (gate * up) @ w["fusion.down.weight"].T
        if fusion.startswith("token_guided"):
            inputs = {"fused": read, "token": embeddings, "feature": rows}
            z = torch.cat([norm(inputs[name], w[f"fusion.norms.{name}.weight"]) for name in guides], dim=-1)
            z = silu(z @ w["fusion.up.weight"].T + w["fusion.up.bias"]) if fusion == "token_guided" else z
            read = z @ w["fusion.down.weight"].T + w["fusion.down.bias"] + read
        residual = read
    positions = torch.arange(5)[None]
    out = module.layer(read, positions, causal, residual=residual)
    expected = {
        "doubled": lambda: [half(module.layer)(read, positions, causal, residual=residual) for half in HALVES],
        "one": lambda: (out, out),
        "normed": lambda: (norm(out, w["norm.weight"]), out),
        "normed_back": lambda: (norm(out, w["norm.weight"]),) * 2,
    }[outputs]()
    found = module(module.inputs(features), embeddings, positions, causal)
    for made, value in zip(found, expected, strict=True):
        torch.testing.assert_close(made, value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("guides", [(), ("fused", "layer")])
def test_unknown_guides_are_refused(guides: Any) -> None:
    with pytest.raises(CheckpointError, match="guides must be some of fused, token, feature"):
        form("token_guided", "doubled", guides=guides)


def test_a_tree_is_no_wider_than_the_draft_vocabulary(little_verifier: Verifier, tmp_path: Path) -> None:
    """Its nodes are those of a whole tree of the smaller width."""
    target = Target(NAME, little_verifier.export, tmp_path, build(steps=2, width=3, draft_vocabulary=2))
    exporter = exporter_of({})
    config = exporter.random_config(target, AutoConfig.from_pretrained(str(little_verifier.checkpoint.path)))
    shape = exporter.shape(target, config)
    assert (shape.width, shape.nodes) == (2, 5)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            form("linear", "one", own_head=True),
            build(draft_vocabulary=9),
            f"a head of its own for {VOCABULARY} tokens; leave out draft_vocabulary",
        ),
        (form("gated_fused", "one"), build(), "is no drafter of eagle2: it has a fusion 'gated_fused' and one output"),
        (
            form("linear", "one", own_head=True),
            build(head_rank=9),
            "head_rank is for the verifier's head, not for a head that was trained with the drafter; leave it out",
        ),
        (form("linear", "one", hidden_states=("1", "last")), build(), "does not output hidden state '1'"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    little_verifier: Verifier, tmp_path: Path, config: FeatureConfig, options: FeatureTreeBuild, message: str
) -> None:
    opened = save(tmp_path / "drafter", little_verifier.checkpoint, "eagle", random_module(config), config)
    with pytest.raises((CheckpointError, UsageError), match=message):
        trained(opened, little_verifier, tmp_path, options, exporter_of({"fusion": "linear"}))


def test_a_drafter_of_another_family_is_refused(little_verifier: Verifier, tmp_path: Path) -> None:
    drafter = DrafterCheckpoint(tmp_path, "mtp", {"hidden_size": HIDDEN}, Identity((), ""))
    with pytest.raises(CheckpointError, match="is a drafter of mtp, which eagle2 cannot use; leave out method=eagle2"):
        trained(drafter, little_verifier, tmp_path, build(), exporter_of({}))


def test_a_parent_is_above_its_children_however_sure_the_drafter_is() -> None:
    """Joint log probabilities of -18 and more, whose children have a probability of 1 in float32."""
    tree = LevelTree(3, torch.zeros(2, dtype=torch.long), rank_log_probs(3))
    generator = torch.Generator().manual_seed(0)
    rows = 1
    for level in range(4):
        logits = torch.full((2, rows, VOCABULARY), -40.0)
        best = torch.randint(0, VOCABULARY, (2, rows, 1), generator=generator)
        logits.scatter_(2, best, 0.0).scatter_(2, (best + 1) % VOCABULARY, -18.0)
        tree.grow(logits)
        if level < 3:
            tree.best()
            rows = 3
    _, parents, log_probs = tree.whole(torch.zeros(2, 1, dtype=torch.long), 13, [])
    for slot in range(2):
        for node, parent in enumerate(parents[slot].tolist()):
            assert parent < node
            assert node == 0 or log_probs[slot, node] < log_probs[slot, parent]
    assert int((log_probs < -16).sum()) > 6
