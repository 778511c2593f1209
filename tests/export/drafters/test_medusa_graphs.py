"""Medusa's draft graph equals its heads written from the paper, and a static tree that Python walks node by node."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from redraft import names
from redraft.engines.calls import Calls
from redraft.engines.lowering import lower_any
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.errors import CheckpointError
from redraft.export.checkpoint.model_config import load_config
from redraft.export.drafters import find_exporter, graph_file
from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads
from redraft.export.drafters.writing import Target
from redraft.methods.medusa import draft_inputs, draft_outputs
from redraft.methods.static_tree import StaticTreeBuild
from tests.engines.sessions import session_of
from tests.noise import keys_of

from .static_trees import (
    ACCURACIES,
    CASES,
    DRAWS,
    GREEDY,
    NOISY,
    POSITION,
    Exported,
    Sampling,
    check_tree,
    export_heads,
)
from .tiny import HIDDEN, VOCABULARY, Verifier

CONFIG = MedusaConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, logit_scale=0.6, draft_logit_scale=1.3, heads=3,
    rank_accuracies=ACCURACIES,
)  # fmt: skip


def random_heads() -> MedusaHeads:
    """Heads without zeros, so that every weight counts, as they are stored."""
    torch.manual_seed(3)
    module = MedusaHeads(CONFIG).eval().requires_grad_(False)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.bfloat16().float()


@pytest.fixture(scope="module", params=CASES)
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Exported:
    folder = tmp_path_factory.mktemp("heads")
    return export_heads("medusa", random_heads(), CONFIG, CASES[request.param], little_verifier, folder)


def head_logits(drafter: Exported, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of every level after a hidden state [n], head by head: W_2 (h + SiLU(W_1 h + b_1)), [N, H]."""
    module, size = random_heads(), HIDDEN
    found = []
    for head in range(drafter.shape.steps):
        rows = slice(head * size, (head + 1) * size)
        state = hidden + F.silu(module.heads.weight[rows] @ hidden + module.heads.bias[rows])
        found.append(drafter.head @ (state * CONFIG.logit_scale))
    return torch.stack(found)


@pytest.mark.parametrize("form", ["portable", "batch"])
@pytest.mark.parametrize("samplings", [(GREEDY,), (DRAWS,), (GREEDY, NOISY, DRAWS)], ids=["one", "drawn", "three"])
def test_a_draft_is_the_static_tree_of_the_heads(exported: Exported, form: str, samplings: Sequence[Sampling]) -> None:
    """Each sequence reads its own row of the pending ones, and has its own scale and noise."""
    shape, count = exported.shape, len(samplings)
    record: GraphRecord | None = GraphRecord(graph_file("m", names.DRAFT), draft_inputs(shape), draft_outputs(shape))
    if form == "batch":
        record = lower_any(exported.folder, record, "m.draft.batch")
    assert record is not None
    calls = Calls(OnnxRuntimeProgram(session_of(exported.folder / record.file), record))
    if shape.draft_vocabulary < VOCABULARY:
        calls.bind(names.DRAFT_VOCABULARY, exported.vocabulary)
    call = calls.prepare(B=count)
    features = torch.randn(call.inputs[names.PENDING_FEATURES].shape, generator=torch.Generator().manual_seed(4))
    rows, roots = [7, 1, names.MAX_PENDING_FEATURES][:count], [5, 60, 0][:count]
    values = {
        names.PENDING_FEATURES: features.numpy(), names.NUM_PENDING: np.array(rows), names.TOKENS: np.array(roots),
        names.DRAFT_LOGIT_SCALE: np.array([one.scale for one in samplings], np.float32),
        names.NOISE_SCALE: np.array([one.temperature for one in samplings], np.float32),
        names.NOISE_KEYS: np.concatenate([keys_of([one.seed], POSITION, shape.steps, one.stream) for one in samplings]),
        names.DRAWN: np.array([int(one.drawn) for one in samplings]),
    }  # fmt: skip
    for name, array in values.items():
        call.inputs[name][...] = array
    call.run()
    for slot, one in enumerate(samplings):
        logits = head_logits(exported, features[slot, rows[slot] - 1])
        check_tree(exported, call.outputs, slot, roots[slot], logits, one)


def test_heads_begin_as_the_verifiers_own() -> None:
    """With W and b of zero, each head reads the hidden state itself."""
    hidden = torch.randn(2, HIDDEN)
    assert torch.equal(MedusaHeads(CONFIG)(hidden), hidden[:, None].expand(-1, 3, -1))


def test_random_heads_have_as_many_candidates_as_the_options_need(little_verifier: Verifier, tmp_path: Path) -> None:
    shutil.copytree(little_verifier.folder, tmp_path / "graphs")
    configuration = load_config(little_verifier.checkpoint)
    options = StaticTreeBuild(nodes=14, steps=1, width=14, precision="fp32")
    made = find_exporter("medusa").random(
        Target("m", little_verifier.export, tmp_path / "graphs", options), configuration
    )
    assert made.shape.tree == tuple((rank,) for rank in range(14))


def test_settings_that_cannot_be() -> None:
    with pytest.raises(CheckpointError, match="heads must be a number from 1 to 16, not 17"):
        replace(CONFIG, heads=17)
    with pytest.raises(CheckpointError, match="rank_accuracies must be shares from 0 to 1"):
        replace(CONFIG, rank_accuracies=((1.5,),))
