"""The draft graph of heads on the trunk equals the paper's heads, whatever was accepted between its calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from redraft import names
from redraft.engines.calls import Calls
from redraft.engines.lowering import lower_any, lower_chain
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.errors import CheckpointError
from redraft.export.drafters import find_exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter, trunk_state
from redraft.export.drafters.writing import Target
from redraft.methods.chains import draft_inputs, draft_outputs
from redraft.methods.static_tree import StaticTreeBuild
from redraft.train.distillation import ChainAttention
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
    check_tree,
    export_heads,
    write_heads,
)
from .tiny import HIDDEN, VOCABULARY, Verifier
from .trunk_heads import head_logits, random_heads

CONFIG = MultiHeadConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=8, logit_scale=0.6,
    draft_logit_scale=1.3, draft_heads=3, hidden_states=("0",), rank_accuracies=ACCURACIES,
)  # fmt: skip
CAPACITY, GARBAGE = 40, 1e3
SPLITS = ((5, 1, 2, 3, 4), (2, 4, 3, 2, 1), (1, 3, 1, 4, 2))
"""Rows of each sequence in each call: a prompt's, then 1 and all accepted ones, so a rejection at every depth."""


@pytest.fixture(scope="module", params=CASES)
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Exported:
    folder = tmp_path_factory.mktemp("heads")
    made = export_heads("multi_head", random_heads(CONFIG), CONFIG, CASES[request.param], little_verifier, folder)
    assert made.shape.kv_heads == made.shape.steps * CONFIG.kv_heads  # no more layers than the tree has levels
    return made


def calls_of(drafter: Exported, form: str, batch: int) -> Calls:
    """The graph in this form over KV buffers full of garbage."""
    shape = drafter.shape
    record: GraphRecord | None = GraphRecord(graph_file("m", names.DRAFT), draft_inputs(shape), draft_outputs(shape))
    assert record is not None
    if form == "batch":
        record = lower_any(drafter.folder, record, "m.draft.batch")
    elif form == "single":
        record = lower_chain(drafter.folder, record, "m.draft.single")
    assert record is not None
    calls = Calls(OnnxRuntimeProgram(session_of(drafter.folder / record.file), record))
    for cache in (names.key_cache(0), names.value_cache(0)):
        calls.bind(cache, np.full((batch, shape.kv_heads, CAPACITY, shape.head_dim), GARBAGE, np.float32))
    if shape.draft_vocabulary < VOCABULARY:
        calls.bind(names.DRAFT_VOCABULARY, drafter.vocabulary)
    return calls


@pytest.mark.parametrize(
    ("form", "samplings"),
    [
        ("portable", (GREEDY,)),
        ("portable", (GREEDY, NOISY, DRAWS)),
        ("batch", (GREEDY, NOISY, DRAWS)),
        ("single", (DRAWS,)),
    ],
    ids=["one", "three", "batch of three", "single"],
)  # fmt: skip
def test_drafts_are_the_papers_heads_after_any_acceptance(exported, form, samplings) -> None:
    """Calls catch up on several rows, padded with garbage that later calls must overwrite in the KV."""
    shape, batch = exported.shape, len(samplings)
    module, calls = random_heads(CONFIG), calls_of(exported, form, batch)
    generator = torch.Generator().manual_seed(4)
    trunk = torch.randn(batch, max(map(sum, SPLITS)), HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCABULARY, (batch, trunk.shape[1] + 1), generator=generator)
    past = [0] * batch
    for call_number in range(len(SPLITS[0])):
        rows = [SPLITS[slot][call_number] for slot in range(batch)]
        width = max(rows) + 1
        call = calls.prepare(**({} if form == "single" else {"B": batch}), M=width)
        values = {
            names.DRAFT_LOGIT_SCALE: [one.scale for one in samplings],
            names.NOISE_SCALE: [one.temperature for one in samplings],
            names.NOISE_KEYS: [keys_of([one.seed], POSITION, shape.steps, one.stream)[0] for one in samplings],
            names.DRAWN: [int(one.drawn) for one in samplings],
            names.NUM_PENDING: rows, names.CACHE_LEN: past, names.KV_LEN: [max(past) + width],
            names.POSITIONS: [np.arange(start, start + width) for start in past],
            names.FEATURE_ROWS: GARBAGE, names.TOKENS: VOCABULARY - 1,
        }  # fmt: skip
        for name, value in values.items():
            call.inputs[name][...] = value
        for slot, (start, count) in enumerate(zip(past, rows, strict=True)):
            call.inputs[names.FEATURE_ROWS][slot, :count] = trunk[slot, start : start + count]
            call.inputs[names.TOKENS][slot, :count] = tokens[slot, start + 1 : start + count + 1]
        call.run()
        past = [start + count for start, count in zip(past, rows, strict=True)]
        for slot, (end, one) in enumerate(zip(past, samplings, strict=True)):
            heads = [head_logits(module, head, trunk[slot, :end], exported.head) for head in range(shape.steps)]
            check_tree(exported, call.outputs, slot, int(tokens[slot, end]), torch.stack(heads), one)


def test_training_and_graphs_compute_the_same() -> None:
    """A head alone, as training runs it, and all heads in one attention, as graphs do, equal the loop."""
    module = random_heads(CONFIG)
    trunk, places = torch.randn(1, 7, HIDDEN, generator=torch.Generator().manual_seed(5)), torch.arange(7)
    together = module(trunk, places, ChainAttention(CONFIG.together(3), places[None]))
    for head in range(3):
        alone = module.head(head, trunk, places, ChainAttention(CONFIG, places[None]))
        torch.testing.assert_close(together[:, :, head], alone, atol=1e-5, rtol=1e-5)
        for place in (0, 6):
            wanted = head_logits(module, head, trunk[0, : place + 1], torch.eye(HIDDEN) / CONFIG.logit_scale)
            torch.testing.assert_close(alone[0, place], wanted, atol=1e-4, rtol=1e-4)


def refused(opened: DrafterCheckpoint, verifier: Verifier, folder: Path, **options: object) -> str:
    """The one line of an export that must fail."""
    identity, built = Identity.of(verifier.checkpoint), StaticTreeBuild(precision="fp32", **options)
    with pytest.raises(CheckpointError) as error:
        find_exporter("multi_head").trained(Target("m", verifier.export, folder, built), opened, identity)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_drafters_that_do_not_fit_are_refused_in_one_line(little_verifier: Verifier, tmp_path: Path) -> None:
    """Incomplete heads, another verifier, a tree that the heads do not cover, and a state that no graph outputs."""
    opened = write_heads(tmp_path / "drafter", "multi_head", random_heads(CONFIG), CONFIG, little_verifier)
    line = refused(opened, little_verifier, tmp_path, steps=4)
    assert "the drafter has 3 heads, which draft no tree of 4 levels" in line
    other = replace(opened, verifier=replace(opened.verifier, weights=("0" * 64,)))
    assert "was trained for another verifier: expected weights 000000000000" in refused(
        other, little_verifier, tmp_path
    )
    other_state = replace(CONFIG, hidden_states=("1",))
    absent = write_heads(tmp_path / "absent", "multi_head", random_heads(CONFIG), other_state, little_verifier)
    assert "the verifier's graph does not output hidden state '1'" in refused(absent, little_verifier, tmp_path)
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("layers.2.q_proj")}
    save_file(tensors, file)
    assert "missing layers.2.q_proj.weight" in refused(opened, little_verifier, tmp_path)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(CheckpointError, match="draft_heads must be a number from 1 to 16, not 0"):
        replace(CONFIG, draft_heads=0)
    with pytest.raises(CheckpointError, match="rank_accuracies must be shares from 0 to 1"):
        replace(CONFIG, rank_accuracies=((1.5,),))
    for states in ((), ("last",), ("0", "1")):
        with pytest.raises(CheckpointError, match="hidden_states must be the number of one layer"):
            replace(CONFIG, hidden_states=states)
    with pytest.raises(CheckpointError, match="the verifier has one layer, so no trunk before its last layer"):
        trunk_state(1)
    assert trunk_state(12) == "10"


def test_the_final_norm_is_not_trained() -> None:
    """It is the verifier's, which all heads share."""
    module = MultiHeadDrafter(CONFIG)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in module.named_parameters()} - trained == {"norm.weight"}
