"""The graphs of a steered drafter compute what the trained module does, and belong to one verifier and one student."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from redraft import names
from redraft.engines.calls import Calls
from redraft.engines.lowering import lower_batch, lower_single
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.model_config import load_config
from redraft.export.drafters import ExportedDrafter, find_exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.decoder_drafter import DraftModel, configuration_of
from redraft.export.drafters.published import read_states
from redraft.export.drafters.writing import Target
from redraft.methods import find_method
from redraft.methods.decoder import (
    SteeringBuild,
    TreeBuild,
    draft_inputs,
    draft_outputs,
    steer_inputs,
    steer_outputs,
)
from tests.engines.sessions import session_of

from .tiny import HIDDEN, VOCABULARY, Verifier, counts

METHOD, EXPORTER, UNSTEERED = find_method("steered"), find_exporter("steered"), find_exporter("draft_model")
STATES = ("last", "0")
"""The hidden states of the tiny verifier's graph."""
KV_ROWS, ROWS = 48, 7


def student_of(verifier: Verifier, seed: int = 5) -> DraftModel:
    config = configuration_of(load_config(verifier.checkpoint), VOCABULARY, (0, 1), 0, STATES)
    torch.manual_seed(seed)
    student = DraftModel(config).eval().requires_grad_(False)
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return student


def save(folder: Path, verifier: Verifier, seed: int = 5, method: str = METHOD.id) -> DraftModel:
    """Write a student's folder. Returns the student with its stored numbers."""
    student = student_of(verifier, seed)
    save_drafter(
        folder, method, student.config, Identity.of(verifier.checkpoint), student, counts(), {}, storage="int8"
    )
    DrafterCheckpoint.open(folder).load(student)
    return student


@pytest.fixture(scope="module")
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DraftModel, ExportedDrafter]:
    """A student, its graphs, and their folder."""
    folder = tmp_path_factory.mktemp("steered")
    student = save(folder / "student", little_verifier)
    out = Path(shutil.copytree(little_verifier.folder, folder / "graphs"))
    opened, identity = DrafterCheckpoint.open(folder / "student"), Identity.of(little_verifier.checkpoint)
    options = SteeringBuild(precision="fp32")
    return out, student, EXPORTER.trained(Target("d", little_verifier.export, out, options), opened, identity)


def calls_of(folder: Path, record: GraphRecord) -> Calls:
    return Calls(OnnxRuntimeProgram(session_of(folder / record.file), record))


@pytest.mark.parametrize("form", ["portable", "batch", "single"])
def test_graphs_compute_the_training_modules_rows(
    exported: tuple[Path, DraftModel, ExportedDrafter], little_verifier: Verifier, form: str
) -> None:
    """Rows of two sequences from positions 0 and 3, each with the hidden states of its own earlier position."""
    folder, student, built = exported
    shape = built.shape
    assert (shape.hidden_states, shape.steering, shape.steps, shape.width, shape.nodes) == (STATES, 2 * 48, 8, 1, 9)
    slots, starts = (1, [3]) if form == "single" else (2, [0, 3])
    features = torch.randn(slots, ROWS, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([list(range(start, start + ROWS)) for start in starts])
    steer = calls_of(folder, GraphRecord(graph_file("d", names.STEER), steer_inputs(shape), steer_outputs(shape)))
    call = steer.prepare(B=slots, T=ROWS)
    call.inputs["features"][...], call.inputs["features.1"][...] = features.split(HIDDEN, -1)
    call.inputs[names.POSITIONS][...] = positions
    call.inputs[names.OUTPUT_ROWS][...] = [[4], [ROWS - 1]][-slots:]
    call.run()
    assert student.steering is not None
    with torch.no_grad():
        biases = student.steering(features, positions)
    np.testing.assert_allclose(call.outputs[names.STEERING], biases, atol=1e-5)
    last = [row[at] for row, at in zip(call.outputs[names.STEERING], [4, ROWS - 1][-slots:], strict=True)]
    assert np.array_equal(call.outputs[names.STEERING_LAST][:, 0], last)
    if form == "single":
        assert abs(biases).min() > 0
    else:
        assert not call.outputs[names.STEERING][0, 0].any()

    record = GraphRecord(graph_file("d", names.DRAFT), draft_inputs(shape), draft_outputs(shape))
    if form != "portable":
        lower = lower_batch if form == "batch" else lambda *args: lower_single(args[0], args[1], False, args[2], True)
        lowered = lower(folder, record, f"d.draft.{form}")
        assert lowered is not None
        record = lowered
    draft = calls_of(folder, record)
    for layer in range(2):
        for cache in (names.key_cache(layer), names.value_cache(layer)):
            draft.bind(cache, np.zeros((slots, shape.kv_heads, KV_ROWS, shape.head_dim), np.float32))
    draft.bind(names.NOISE_SCALE, np.zeros(slots, np.float32))
    draft.bind(names.DRAFT_LOGIT_SCALE, np.ones(slots, np.float32))
    tokens = torch.randint(0, VOCABULARY, (slots, ROWS), generator=torch.Generator().manual_seed(2))
    call = draft.prepare(T=ROWS, R=ROWS, **({} if form == "single" else {"B": slots}))
    call.inputs[names.TOKEN_IDS][...], call.inputs[names.POSITIONS][...] = tokens, np.arange(ROWS)
    call.inputs[names.TREE_MASK][...], call.inputs[names.CACHE_LEN][...] = np.tri(ROWS, dtype=np.bool_), 0
    call.inputs[names.KV_LEN][...], call.inputs[names.OUTPUT_ROWS][...] = ROWS, np.arange(ROWS)
    call.inputs[names.STEERING][...] = biases
    call.run()
    stored = load_file(little_verifier.checkpoint.path / "model.safetensors")
    with torch.no_grad():
        hidden = student(F.embedding(tokens, stored["model.embed_tokens.weight"]), biases)
    np.testing.assert_allclose(call.outputs[names.LOGITS], hidden @ stored["lm_head.weight"].T, atol=2e-4)


def test_a_drafter_with_random_weights_has_the_methods_hidden_states(little_verifier: Verifier, tmp_path: Path) -> None:
    """By default its products have 8 bits, those of steering too."""
    out = Path(shutil.copytree(little_verifier.folder, tmp_path / "graphs"))
    verifier = replace(little_verifier.export, hidden_states=METHOD.hidden_states)
    options = SteeringBuild(draft_vocabulary=20, steps=3)
    built = EXPORTER.random(Target("d", verifier, out, options), load_config(little_verifier.checkpoint))
    assert (built.precision, built.shape.hidden_states, built.shape.layers) == ("int8", METHOD.hidden_states, 2)
    assert (built.shape.draft_vocabulary, built.shape.nodes, built.shape.steering) == (20, 4, 2 * 48)
    assert {f"d.steering.{name}.weight.codes" for name in ("vector", "bias")} <= {
        ref.initializer for ref in built.weights
    }


def test_steering_belongs_to_its_verifier_and_its_student(little_verifier: Verifier, tmp_path: Path) -> None:
    """Each wrong pair is one line: another verifier, another method, no steering, weights of another student."""
    verifier, identity = little_verifier.export, Identity.of(little_verifier.checkpoint)
    save(tmp_path / "mine", little_verifier)
    save(tmp_path / "other", little_verifier, seed=6)

    def line(folder: Path, found: Identity = identity, method: str = "steered") -> str:
        exporter, options = (EXPORTER, SteeringBuild()) if method == "steered" else (UNSTEERED, TreeBuild())
        with pytest.raises(CheckpointError) as caught:
            exporter.trained(Target("d", verifier, tmp_path, options), DrafterCheckpoint.open(folder), found)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    other = Identity(("0" * 64,), identity.tokenizer)
    assert "was trained for another verifier: expected weights" in line(tmp_path / "mine", other)
    assert "redraft train steered --verifier DIR" in line(tmp_path / "mine", other)
    assert "has steering, which draft_model does not read" in line(tmp_path / "mine", method="draft_model")
    own, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("mine", "other"))
    mixed = {name: (theirs if name.startswith("steering.") else own)[name] for name in own}
    save_file(mixed, tmp_path / "mine" / "model.safetensors")
    assert "these are another drafter's weights: expected " in line(tmp_path / "mine")
    values = json.loads((tmp_path / "other" / "config.json").read_text())
    values["config"]["hidden_states"] = []
    (tmp_path / "other" / "config.json").write_text(json.dumps(values))
    assert "is a drafter of steered: it has no steering" in line(tmp_path / "other")
    values["config"]["hidden_states"] = ["last", "7"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(values))
    assert "the verifier's graph does not output hidden state '7'" in line(tmp_path / "other")


@pytest.mark.parametrize("named", [5, "21", [2, 1], {"2": 1}])
def test_hidden_states_that_are_no_list_of_names(named: object, little_verifier: Verifier, tmp_path: Path) -> None:
    save(tmp_path / "it", little_verifier)
    values = json.loads((tmp_path / "it" / "config.json").read_text())
    values["config"]["hidden_states"] = named
    (tmp_path / "it" / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="hidden_states must be a list of names, not"):
        read_states(tmp_path / "it", little_verifier.checkpoint)


def test_a_chain_is_at_most_as_long_as_any_decoders() -> None:
    with pytest.raises(UsageError, match="steps must be a number from 1 to 24, not 25"):
        SteeringBuild(steps=25)
