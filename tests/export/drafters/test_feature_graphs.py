"""The draft graph of drafters that predict features equals trees grown in Python, each path computed alone in torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig

from redraft import names
from redraft.engines.calls import Calls
from redraft.engines.lowering import lower_any, lower_chain
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters import graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.draft_graph import Sampling as DraftSampling
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter, Fusion, Guide, Outputs
from redraft.export.drafters.feature_tree import FeatureTreeExporter, _Draft
from redraft.export.drafters.level_tree import LevelTree, rank_log_probs
from redraft.export.drafters.writing import Target
from redraft.methods import ROWS, find_method
from redraft.methods.chains import DRAWN_LOG_PROB, draft_inputs, draft_outputs
from redraft.methods.feature_tree import FeatureTreeBuild, FeatureTreeShape
from tests.engines.sessions import session_of
from tests.noise import keys_of, noise_rows

from .static_trees import CERTAIN, DRAWS, GREEDY, NOISY, POSITION, Sampling
from .tiny import CONTEXT, HIDDEN, VOCABULARY, Verifier, token_data

METHOD = find_method("eagle2")
STEPS, CAPACITY = 3, 64
SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=16, logit_scale=0.6,
    draft_logit_scale=1.3,
)  # fmt: skip
STATIC_FORM = [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 2), (1,), (1, 0), (1, 1), (2,)]
"""The best nine paths of three levels by the sums of their ranks, which count from 1. The first of equal sums are kept.
"""


@dataclass(frozen=True)
class Case:
    """A drafter's form, and how it is built. drafted: tokens of the draft vocabulary.   trained: those of training."""

    fusion: Fusion
    outputs: Outputs
    width: int = 3
    steps: int = STEPS
    static: bool = False
    drafted: int = VOCABULARY
    trained: int = 0
    nodes: int | None = None
    input_norm: bool = True
    fusion_size: int = 0
    feature_norms: bool = False
    joint_norm: bool = False
    own_head: bool = False
    states: tuple[str, ...] = ("last",)
    guides: tuple[Guide, ...] = ("fused", "token")

    @property
    def configuration(self) -> FeatureConfig:
        return FeatureConfig(
            **SIZES, fusion=self.fusion, outputs=self.outputs, input_norm=self.input_norm,
            fusion_size=self.fusion_size, draft_vocab_size=self.trained, feature_norms=self.feature_norms,
            joint_norm=self.joint_norm,
            own_head=self.own_head, hidden_states=self.states, guides=self.guides,
        )  # fmt: skip

    @property
    def options(self) -> FeatureTreeBuild:
        return FeatureTreeBuild(
            precision="fp32", steps=self.steps, width=self.width, nodes=self.nodes, draft_vocabulary=self.drafted
        )

    def __str__(self) -> str:
        return " ".join(str(value) for value in vars(self).values())


CASES = [
    Case("linear", "one", static=True, input_norm=False),
    Case("linear", "normed_back", static=True, drafted=8, nodes=17),
    Case("gated", "two", drafted=7, trained=9, nodes=15, input_norm=False),
    Case("token_guided", "one", width=1, static=True, fusion_size=24),
    Case("token_guided", "two", guides=("fused", "feature")),
    Case("token_guided", "two", guides=("token",)),
    Case("attention", "normed", drafted=20, nodes=21),
    Case("attention", "two", steps=2, drafted=8),
    Case(
        "attention",
        "normed",
        width=2,
        drafted=11,
        trained=11,
        feature_norms=True,
        joint_norm=True,
        own_head=True,
        states=("0", "last"),
    ),
]
"""Every fusion and every kind of outputs. A tree of two steps has one level to attend for, one of three has two."""


def random_module(config: FeatureConfig, std: float = 0.15) -> FeatureDrafter:
    """A drafter without zeros and ones, so that every path counts."""
    torch.manual_seed(3)
    module = FeatureDrafter(config).eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        mean = 1.0 if parameter.dim() == 1 and "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=std)
    return module.bfloat16().float()


@dataclass
class Drafter:
    """A drafter's module, its sizes, and weights of its verifier."""

    shape: FeatureTreeShape
    module: FeatureDrafter
    embedding: torch.Tensor
    head: torch.Tensor
    vocabulary: np.ndarray

    @classmethod
    def of(cls, verifier: Verifier, shape: FeatureTreeShape, config: FeatureConfig, vocabulary: np.ndarray) -> Drafter:
        stored = load_file(verifier.checkpoint.path / "model.safetensors")
        weights = (stored[key] for key in ("model.embed_tokens.weight", "lm_head.weight"))
        return cls(shape, random_module(config), *weights, vocabulary)


def exporter_of(form: dict[str, Any], static: bool = False) -> FeatureTreeExporter:
    """The exporter of a method whose drafters have this form."""
    return FeatureTreeExporter(METHOD, replace(ROWS[METHOD.id], form=form, static=static))


@pytest.fixture(scope="module", params=CASES, ids=str)
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, Drafter]:
    """A trained drafter's exported graph in its folder."""
    case, folder = request.param, tmp_path_factory.mktemp("form")
    config, identity = case.configuration, Identity.of(little_verifier.checkpoint)
    data = token_data(config)
    save_drafter(
        folder / "drafter", METHOD.id, config, identity, random_module(config), data.counts, {}, data.draft_vocabulary
    )
    shutil.copytree(little_verifier.folder, folder / "graphs")
    exporter = exporter_of({"fusion": case.fusion, "outputs": case.outputs}, case.static)
    opened = DrafterCheckpoint.open(folder / "drafter")
    made = exporter.trained(Target("f", little_verifier.export, folder / "graphs", case.options), opened, identity)
    assert (made.shape.static, made.shape.width, made.shape.draft_vocabulary) == (case.static, case.width, case.drafted)
    vocabulary = np.arange(VOCABULARY)
    if case.drafted < VOCABULARY:
        (ref,) = made.tables
        vocabulary = np.fromfile(folder / "graphs" / ref.file, np.int64, ref.shape[0], offset=ref.offset)
    return folder / "graphs", Drafter.of(little_verifier, made.shape, config, vocabulary)


class Draft(NamedTuple):
    """One sequence's draft: tokens, parents and log probabilities with the root, and the logits of each level's best.

    ranks: the rank of each node's every token among its siblings.
    """

    tokens: list[int]
    parents: list[int]
    log_probs: list[float]
    chain: list[np.ndarray]
    ranks: list[tuple[int, ...]]


@dataclass(frozen=True)
class Candidate:
    """A drafted node. order: place among all candidates, level by level.   score: what it is kept for."""

    order: int
    path: tuple[int, ...]
    ranks: tuple[int, ...]
    parent: int
    log_prob: float
    score: float


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of rows that see the rows before them, with the heads of `SIZES`."""
    heads = [
        x.unflatten(-1, (SIZES[count], SIZES["head_dim"])).transpose(1, 2)
        for x, count in ((q, "heads"), (k, "kv_heads"), (v, "kv_heads"))
    ]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)


def path_logits(drafter: Drafter, features: torch.Tensor, tokens: list[int], path: tuple[int, ...]) -> np.ndarray:
    """Logits of the token after a text and a path of drafted tokens, computed from nothing but these.

    features: [T, n] of T rows.   tokens: T + 1, the text.
    """
    module, config = drafter.module, drafter.module.config
    rows, read = module.inputs(features[None]), [*tokens[1:], *path]
    for last in range(len(tokens) - 1, len(read) + 1):
        embeddings = F.embedding(torch.tensor(read[:last]), drafter.embedding)[None]
        predicted = module(rows, embeddings, torch.arange(last)[None], causal)
        rows = torch.cat([rows, predicted.feature[:, -1:]], dim=1)
    state = predicted.token[0, -1] * config.logit_scale
    if module.head is not None:
        return module.head(state).numpy()  # type: ignore[no-any-return]
    return (state @ drafter.head[torch.from_numpy(drafter.vocabulary)].T).numpy()


def expected_draft(drafter: Drafter, features: torch.Tensor, tokens: list[int], sampling: Sampling) -> Draft:
    """The draft after a text, by the definition of its tree."""
    shape, width = drafter.shape, drafter.shape.width
    noise = np.float32(sampling.temperature) * noise_rows(
        sampling.seed, POSITION, STEPS, drafter.vocabulary, sampling.stream
    )
    root = Candidate(-1, (), (), -1, 0.0, 0.0)
    level, every, chain = [root], list[Candidate](), list[np.ndarray]()
    for depth in range(shape.steps):
        added = list[Candidate]()
        for node in level:
            logits = path_logits(drafter, features, tokens, node.path)
            if node is level[0]:
                chain.append(logits)
            z = torch.from_numpy((logits + noise[depth]) * sampling.scale)
            log_probs = z.log_softmax(-1)
            for rank, column in enumerate(z.argsort(descending=True)[:width].tolist()):
                log_prob = score = min(float(log_probs[column]), CERTAIN)
                if sampling.drawn:
                    log_prob = score = DRAWN_LOG_PROB if rank == 0 else -1e4
                elif shape.static:
                    score = DRAWN_LOG_PROB * (rank + 1)
                path, ranks = (*node.path, int(drafter.vocabulary[column])), (*node.ranks, rank)
                order, joint = len(every) + len(added), node.log_prob + log_prob
                added.append(Candidate(order, path, ranks, node.order, joint, node.score + score))
        every += added
        level = best(added, width, lambda node: node.score)
    kept = best(every, shape.nodes - 1, lambda node: node.score)
    kept = best(kept, len(kept), lambda node: node.log_prob)
    places = {-1: 0, **{node.order: place for place, node in enumerate(kept, 1)}}
    return Draft(
        [tokens[-1], *(node.path[-1] for node in kept)],
        [-1, *(places[node.parent] for node in kept)],
        [0.0, *(node.log_prob for node in kept)],
        chain,
        [node.ranks for node in kept],
    )


def best(nodes: list[Candidate], count: int, by: Callable[[Candidate], float]) -> list[Candidate]:
    """The nodes with the largest numbers, in their order. Of equal nodes, the first."""
    return sorted(nodes, key=lambda node: (-by(node), node.order))[:count]


Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
"""Inputs of a draft graph but its KV buffers, which it has -> its outputs."""


def program(folder: Path, drafter: Drafter, form: str) -> Run:
    """Return the exported graph in one of its forms, over the slots of its first call."""
    record: GraphRecord | None = portable(drafter)
    assert record is not None
    if form == "batch":
        record = lower_any(folder, record, "f.draft.batch")
    elif form == "single":
        record = lower_chain(folder, record, "f.draft.single")
    assert record is not None
    calls = Calls(OnnxRuntimeProgram(session_of(folder / record.file), record))
    bound = False

    def run(inputs: Arrays) -> Arrays:
        nonlocal bound
        batch, width = inputs[names.TOKENS].shape
        if not bound:
            for cache in (names.key_cache(0), names.value_cache(0)):
                calls.bind(cache, empty_cache(drafter, batch))
            if drafter.shape.draft_vocabulary < VOCABULARY:
                calls.bind(names.DRAFT_VOCABULARY, drafter.vocabulary)
            bound = True
        call = calls.prepare(**({"B": batch} if form != "single" else {}), M=width)
        for name, values in inputs.items():
            call.inputs[name][...] = values
        call.run()
        return {name: values.copy() for name, values in call.outputs.items()}

    return run


def portable(drafter: Drafter) -> GraphRecord:
    return GraphRecord(graph_file("f", names.DRAFT), draft_inputs(drafter.shape), draft_outputs(drafter.shape))


def empty_cache(drafter: Drafter, batch: int) -> np.ndarray:
    """A buffer of rows that no draft may read."""
    return np.full((batch, drafter.shape.kv_heads, CAPACITY, drafter.shape.head_dim), 7.0, np.float32)


def in_torch(drafter: Drafter) -> Run:
    """Return the draft graph before it is exported. It has a module of its own, as it changes it."""
    config, record = drafter.module.config, portable(drafter)
    graph = _Draft(random_module(config), config, drafter.shape, CONTEXT)
    graph.embedding.data, graph.head.data = drafter.embedding, drafter.head[torch.from_numpy(drafter.vocabulary)]
    tables = [torch.from_numpy(drafter.vocabulary)] if drafter.shape.draft_vocabulary < VOCABULARY else []
    caches: list[torch.Tensor] = []

    def run(inputs: Arrays) -> Arrays:
        if not caches:
            caches.extend(torch.from_numpy(empty_cache(drafter, len(inputs[names.TOKENS]))) for _ in range(2))
        rows = (names.FEATURE_ROWS, names.TOKENS, names.POSITIONS, names.NUM_PENDING, names.CACHE_LEN, names.KV_LEN)
        sampling = (names.DRAFT_LOGIT_SCALE, names.NOISE_SCALE, names.NOISE_KEYS, names.DRAWN)
        given = {name: torch.from_numpy(values) for name, values in inputs.items()}
        *made, caches[0], caches[1] = graph(
            *(given[name] for name in rows), *caches, DraftSampling(*(given[name] for name in sampling)), tables
        )
        return {spec.name: value.numpy() for spec, value in zip(record.outputs, made, strict=False)}

    return run


SCALED = Sampling(0.7)
TEXT_ROWS = ([4, 3], [5, 2], [1, 4])
"""Rows of each text that each of two calls computes. The longest is padded too."""


@torch.no_grad()
def check(drafter: Drafter, run: Run, samplings: tuple[Sampling, ...]) -> list[Draft]:
    """Compare two drafts of each text, the second after rows of tokens that were accepted since. Returns the drafts.

    The second overwrites rows of the first draft's nodes.
    """
    generator = torch.Generator().manual_seed(4)
    counts = TEXT_ROWS[: len(samplings)]
    texts = [torch.randint(0, VOCABULARY, (sum(rows) + 1,), generator=generator).tolist() for rows in counts]
    size = drafter.module.config.feature_size
    features = [torch.randn(len(text) - 1, size, generator=generator) for text in texts]
    starts, drafts = [0] * len(texts), list[Draft]()
    for rows in zip(*counts, strict=True):
        found = run(inputs_of(features, texts, starts, rows, samplings, drafter.shape.steps))
        starts = [start + count for start, count in zip(starts, rows, strict=True)]
        for slot, end in enumerate(starts):
            draft = expected_draft(drafter, features[slot][:end], texts[slot][: end + 1], samplings[slot])
            np.testing.assert_allclose(found[names.CHAIN_LOGITS][slot], np.stack(draft.chain), atol=1e-4)
            assert found[names.TREE_TOKENS][slot].tolist() == draft.tokens
            assert found[names.TREE_PARENTS][slot].tolist() == draft.parents
            np.testing.assert_allclose(found[names.TREE_LOG_PROBS][slot], draft.log_probs, atol=1e-4)
            drafts.append(draft)
    return drafts


def inputs_of(
    features: list[torch.Tensor], texts: list[list[int]], starts: list[int], rows: tuple[int, ...],
    samplings: tuple[Sampling, ...], steps: int,
) -> Arrays:  # fmt: skip
    """The inputs for the next rows of each text. Padded rows have values that would be seen."""
    batch, width = len(texts), max(rows) + 1
    read = np.full((batch, width, features[0].shape[1]), 99.0, np.float32)
    tokens = np.zeros((batch, width), np.int64)
    for slot, (start, count) in enumerate(zip(starts, rows, strict=True)):
        read[slot, :count] = features[slot][start : start + count]
        tokens[slot, :count] = texts[slot][start + 1 : start + count + 1]
    states = np.split(read, read.shape[2] // HIDDEN, axis=2)
    return {
        **{names.of_state(names.FEATURE_ROWS, place): state for place, state in enumerate(states)},
        names.TOKENS: tokens,
        names.POSITIONS: np.arange(width) + np.array(starts)[:, None],
        names.NUM_PENDING: np.array(rows),
        names.CACHE_LEN: np.array(starts),
        names.KV_LEN: np.array([max(starts) + width]),
        names.DRAFT_LOGIT_SCALE: np.array([one.scale for one in samplings], np.float32),
        names.NOISE_SCALE: np.array([one.temperature for one in samplings], np.float32),
        names.NOISE_KEYS: np.stack([keys_of([one.seed], POSITION, STEPS, one.stream)[0, :steps] for one in samplings]),
        names.DRAWN: np.array([int(one.drawn) for one in samplings]),
    }


@pytest.mark.parametrize(
    ("form", "samplings"),
    [
        ("portable", (GREEDY,)),
        ("portable", (GREEDY, SCALED, NOISY)),
        ("batch", (SCALED, DRAWS, NOISY)),
        ("single", (GREEDY,)),
        ("single", (DRAWS,)),
    ],
    ids=["portable", "portable of several", "batch", "single", "single of draws"],
)
def test_a_draft_is_the_tree_of_the_modules_paths(
    exported: tuple[Path, Drafter], form: str, samplings: tuple[Sampling, ...]
) -> None:
    """Each sequence has its own number of rows, scale and noise. A node's path sees no other path."""
    folder, drafter = exported
    drafts = check(drafter, program(folder, drafter, form), samplings)
    for draft, drawn in zip(drafts, [one.drawn for one in samplings] * 2, strict=True):
        if drawn:
            steps = drafter.shape.steps
            assert draft.parents[: steps + 1] == list(range(-1, steps))
            assert draft.log_probs[1 : steps + 1] == [DRAWN_LOG_PROB * (step + 1) for step in range(steps)]
        elif drafter.shape.static and drafter.shape.nodes == len(STATIC_FORM) + 1:
            assert sorted(draft.ranks) == STATIC_FORM


@pytest.mark.parametrize("outputs", get_args(Outputs))
@pytest.mark.parametrize("fusion", get_args(Fusion))
@pytest.mark.parametrize("width", [1, 3])
def test_each_form_drafts_its_modules_paths(
    little_verifier: Verifier, fusion: Fusion, outputs: Outputs, width: int
) -> None:
    """The graph as torch computes it, since a trace of each form takes seconds. Its trees have every candidate."""
    case = Case(fusion, outputs, width, nodes=100, input_norm=width == 3, feature_norms=width == 1)
    config = case.configuration
    shape = FeatureTreeShape(
        HIDDEN, VOCABULARY, config.kv_heads, config.head_dim, STEPS, width, case.options.tree_nodes(width), VOCABULARY
    )
    drafter = Drafter.of(little_verifier, shape, config, np.arange(VOCABULARY))
    drafts = check(drafter, in_torch(drafter), (GREEDY, SCALED, NOISY))
    assert all(len(draft.ranks) == width + (STEPS - 1) * width**2 for draft in drafts)


GUIDES: tuple[tuple[Guide, ...], ...] = (("fused", "feature"), ("fused", "fused"), ("fused",), ("token",))


@pytest.mark.parametrize(
    ("fusion", "outputs", "guides"),
    [
        *((fusion, outputs, ("fused", "token")) for fusion in get_args(Fusion) for outputs in get_args(Outputs)),
        *((fusion, "two", guides) for fusion in ("token_guided", "token_guided_narrow") for guides in GUIDES),
    ],
)
def test_a_module_computes_its_formulas(fusion: Fusion, outputs: Outputs, guides: tuple[Guide, ...]) -> None:
    """A row's fusion and its outputs, around the layer that all drafters share."""
    case = Case(fusion, outputs, feature_norms=True, fusion_size=24)
    module = random_module(replace(case, guides=guides).configuration)
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
        if fusion == "gated":
            gate, up = silu(embeddings @ w["fusion.gate.weight"].T), rows @ w["fusion.up.weight"].T
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
        "one": lambda: (out, out),
        "two": lambda: (out @ w["predict.weight"].T, out @ w["regress.weight"].T),
        "normed": lambda: (norm(out, w["norm.weight"]), out),
        "normed_back": lambda: (norm(out, w["norm.weight"]),) * 2,
    }[outputs]()
    found = module(module.inputs(features), embeddings, positions, causal)
    for made, value in zip(found, expected, strict=True):
        torch.testing.assert_close(made, value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("guides", [(), ("fused", "layer")])
def test_unknown_guides_are_refused(guides: Any) -> None:
    with pytest.raises(CheckpointError, match="guides must be some of fused, token, feature"):
        replace(Case("token_guided", "two").configuration, guides=guides)


def test_a_tree_is_no_wider_than_the_draft_vocabulary(little_verifier: Verifier, tmp_path: Path) -> None:
    """Its nodes are those of a whole tree of the smaller width."""
    shutil.copytree(little_verifier.folder, tmp_path / "graphs")
    options = FeatureTreeBuild(precision="fp32", steps=2, width=3, draft_vocabulary=2)
    configuration = little_verifier.checkpoint.path
    target = Target("f", little_verifier.export, tmp_path / "graphs", options)
    made = exporter_of({}).random(target, AutoConfig.from_pretrained(str(configuration)))
    assert (made.shape.width, made.shape.nodes) == (2, 5)


def test_a_head_of_its_own_takes_no_smaller_vocabulary(little_verifier: Verifier, tmp_path: Path) -> None:
    case = Case("linear", "one", own_head=True, drafted=9)
    config, identity = case.configuration, Identity.of(little_verifier.checkpoint)
    data = token_data(config)
    save_drafter(tmp_path / "drafter", METHOD.id, config, identity, random_module(config), data.counts, {})
    opened = DrafterCheckpoint.open(tmp_path / "drafter")
    with pytest.raises(UsageError, match=f"a head of its own for {VOCABULARY} tokens; leave out draft_vocabulary"):
        exporter_of({}).trained(Target("f", little_verifier.export, tmp_path, case.options), opened, identity)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fusion": "gated"}, "is no drafter of eagle2: it has a fusion 'gated' and one output, expected a"),
        ({"states": ("1", "last")}, "does not output hidden state '1'"),
    ],
)
def test_a_drafter_of_another_form_is_refused(
    little_verifier: Verifier, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    case = replace(Case("linear", "one"), **changes)
    config, identity = case.configuration, Identity.of(little_verifier.checkpoint)
    data = token_data(config)
    save_drafter(tmp_path / "drafter", "eagle", config, identity, random_module(config), data.counts, {})
    opened = DrafterCheckpoint.open(tmp_path / "drafter")
    with pytest.raises(CheckpointError, match=message):
        exporter_of({"fusion": "linear"}).trained(
            Target("f", little_verifier.export, tmp_path, case.options), opened, identity
        )


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


def test_a_drafter_of_another_family_is_refused(little_verifier: Verifier, tmp_path: Path) -> None:
    identity = Identity.of(little_verifier.checkpoint)
    drafter = DrafterCheckpoint(tmp_path, "mtp", {"hidden_size": HIDDEN}, identity)
    with pytest.raises(CheckpointError, match="is a drafter of mtp, which eagle2 cannot use; leave out method=eagle2"):
        exporter_of({}).trained(Target("f", little_verifier.export, tmp_path, FeatureTreeBuild()), drafter, identity)
