"""A draft model's graph drafts what transformers' own model continues with, in every form that the CPU runs.

A steered one's graphs compute what the trained module does, and belong to one verifier and one student.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from redraft import names
from redraft.engines.calls import Calls
from redraft.engines.lowering import lower_batch, lower_single
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters import ExportedDrafter, find_exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.decoder_drafter import DraftModel, configuration_of, sizes_of
from redraft.export.drafters.published import read_states
from redraft.export.drafters.writing import Target
from redraft.export.verifier import VerifierExport
from redraft.methods.chains import DRAWN_LOG_PROB
from redraft.methods.decoder import SteeringBuild, TreeBuild, draft_inputs, draft_outputs, steer_inputs, steer_outputs
from redraft.signatures import VerifierShape
from tests.engines.sessions import session_of
from tests.export.models import config_of, write_checkpoint
from tests.noise import keys_of, noise_rows

from .draft_calls import NAME, Arrays, trained
from .tiny import HIDDEN, VOCABULARY, Verifier, counts, randomized

ROWS, TOKENS, TEXT_LIMIT = 64, 97, 96
TEXTS = ([5, 9, 3, 77, 12, 8, 41, 6, 20, 11], [1, 2, 60, 61, 7, 33])
FORMS = ("portable", "batch", "single")
STATES = ("last", "0")
"""The hidden states of the tiny verifier's graph."""
EXPORTER, STEERED = find_exporter("draft_model"), find_exporter("steered")
OF_97 = VerifierExport(VerifierShape(1, 1, 1, 1, TOKENS, TEXT_LIMIT), (), "", (), "", "", None)  # type: ignore[arg-type]
"""A verifier of which a plain checkpoint shares nothing."""


def calls_of(folder: Path, record: GraphRecord) -> Calls:
    return Calls(OnnxRuntimeProgram(session_of(folder / record.file), record))


class Drafting:
    """The draft graph in one of its forms, over some slots. `is_there` is False if the form does not exist."""

    def __init__(self, folder: Path, drafter: ExportedDrafter, form: str, slots: int) -> None:
        shape = drafter.shape
        record: GraphRecord | None = GraphRecord(
            graph_file(NAME, names.DRAFT), draft_inputs(shape), draft_outputs(shape)
        )
        if form == "batch":
            record = lower_batch(folder, record, f"{NAME}.draft.batch")
        elif form == "single":
            record = lower_single(folder, record, False, f"{NAME}.draft.single", chains=shape.width == 1)
        self.is_there = record is not None
        if record is None:
            return
        self.calls, self.slots = calls_of(folder, record), slots
        for layer in range(shape.layers):
            for cache_name in (names.key_cache(layer), names.value_cache(layer)):
                self.calls.bind(cache_name, np.full((slots, shape.kv_heads, ROWS, shape.head_dim), 3.0, np.float32))
        for ref in drafter.tables:
            table = np.fromfile(folder / ref.file, np.int64, ref.shape[0], offset=ref.offset)
            self.calls.bind(ref.initializer, table)

    def run(self, starts: list[int], rows: list[list[int]], every: bool = False, **others: Any) -> Arrays:
        """Compute these rows after the first ones of each slot. Shorter rows are padded.

        every: return outputs of every row, not of the last ones only.   others: inputs, by the names in `names`.
        """
        width, batch = max(map(len, rows)), {"B": self.slots} if "B" in self.calls.inputs[0].shape else {}
        last = [len(tokens) - 1 for tokens in rows]
        values = {
            names.TOKEN_IDS: [tokens + [0] * (width - len(tokens)) for tokens in rows],
            names.POSITIONS: [range(start, start + width) for start in starts],
            names.TREE_MASK: np.tri(width, dtype=np.bool_), names.CACHE_LEN: starts,
            names.OUTPUT_ROWS: np.arange(width) if every else np.array(last)[:, None],
            names.KV_LEN: max(starts) + width, names.NOISE_SCALE: 0, names.DRAFT_LOGIT_SCALE: 1, names.NOISE_KEYS: 1,
            names.DRAWN: 0, **{getattr(names, name): value for name, value in others.items()},
        }  # fmt: skip
        call = self.calls.prepare(**batch, T=width, R=width if every else 1)
        for name, value in values.items():
            call.inputs[name][...] = value
        call.run()
        return {name: output.copy() for name, output in call.outputs.items()}


# Plain checkpoints.


class Plain(NamedTuple):
    """A plain checkpoint: transformers' model, the folder of its graph, and the export."""

    model: torch.nn.Module
    folder: Path
    drafter: ExportedDrafter


def export_plain(folder: Path, architecture: str, options: TreeBuild, **sizes: Any) -> Plain:
    checkpoint, out = write_checkpoint(folder / "model", architecture, **sizes), folder / "graphs"
    out.mkdir()
    drafter = EXPORTER.checkpoint(Target(NAME, OF_97, out, options), Checkpoint.open(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    return Plain(model.eval().requires_grad_(False), out, drafter)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Plain]:
    """Exports a checkpoint of an architecture once. Texts pass mistral's limit."""

    @cache
    def get(architecture: str) -> Plain:
        limit, width = (8, 1) if architecture == "mistral" else (128, 3 if architecture == "qwen2" else 1)
        options = TreeBuild(precision="fp32", width=width, steps=8)
        return export_plain(tmp_path_factory.mktemp(architecture), architecture, options, max_position_embeddings=limit)

    return get


def greedy(model: torch.nn.Module, text: list[int], steps: int) -> tuple[list[int], list[float]]:
    """transformers' continuation of a text, all of it computed again for each token, and the log probabilities."""
    tokens, log_probs = list(text), []
    for _ in range(steps):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        tokens.append(int(logits.argmax()))
        log_probs.append(float(logits.log_softmax(-1).max()))
    return tokens[len(text) :], log_probs


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "gemma2"])
@pytest.mark.parametrize("form", FORMS)
def test_a_draft_is_the_models_own_continuation(plain: Callable[[str], Plain], architecture: str, form: str) -> None:
    """Two texts of different lengths catch up in two calls, the second padded, and draft past a window of 8 tokens."""
    model, folder, exported = plain(architecture)
    texts = TEXTS if form != "single" else TEXTS[:1]
    graph = Drafting(folder, exported, form, len(texts))
    if not graph.is_there:
        assert (architecture, form) == ("gemma2", "single"), "only the cap on its scores does not fit the kernel"
        return
    graph.run([0] * len(texts), [text[:4] for text in texts])
    found = graph.run([4] * len(texts), [text[4:] for text in texts])
    expected = [greedy(model, text, 6) for text in texts]
    for step in range(6):
        for slot, (tokens, log_probs) in enumerate(expected):
            assert found[names.CANDIDATES][slot, 0, 0] == tokens[step]
            np.testing.assert_allclose(found[names.CANDIDATE_LOG_PROBS][slot, 0, 0], log_probs[step], atol=2e-4)
        rows = [[tokens[step]] for tokens, _ in expected]
        found = graph.run([len(text) + step for text in texts], rows)


def test_candidates_are_the_best_under_noise(plain: Callable[[str], Plain]) -> None:
    """Each slot has its own noise and scale. Drawn candidates have the log probabilities of their ranks."""
    model, folder, exported = plain("qwen2")
    graph, texts = Drafting(folder, exported, "portable", 2), [TEXTS[0][:6], TEXTS[1]]
    temperatures, scales = np.array([0.0, 1.7], np.float32), np.array([1.3, 0.6], np.float32)
    noise = dict(NOISE_SCALE=temperatures, DRAFT_LOGIT_SCALE=scales, NOISE_KEYS=keys_of((3, 4), 50, 1))
    found = graph.run([0, 0], texts, **noise)
    for slot, text in enumerate(texts):
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float().numpy()
        np.testing.assert_allclose(found[names.LOGITS][slot, 0], logits, atol=1e-4)
        added = noise_rows((3, 4)[slot], 50, 1, np.arange(TOKENS))[0]
        z = torch.from_numpy((logits + temperatures[slot] * added) * scales[slot])
        best = z.log_softmax(-1).topk(3)
        assert found[names.CANDIDATES][slot, 0].tolist() == best.indices.tolist()
        np.testing.assert_allclose(found[names.CANDIDATE_LOG_PROBS][slot, 0], best.values.numpy(), atol=2e-4)
    drawn = graph.run([0, 0], texts, DRAWN=1, **noise)
    assert drawn[names.CANDIDATES].tolist() == found[names.CANDIDATES].tolist()
    assert drawn[names.CANDIDATE_LOG_PROBS][0, 0].tolist() == [rank * DRAWN_LOG_PROB for rank in (1, 2, 3)]


@pytest.mark.parametrize("tokens", [90, 104])
def test_a_vocabulary_of_another_size(tokens: int, tmp_path: Path) -> None:
    """Only ids of both vocabularies are drafted. The last row of a smaller embedding stands for unknown ids."""
    options = TreeBuild(precision="fp32")
    model, folder, exported = export_plain(tmp_path, "llama", options, vocab_size=tokens, num_hidden_layers=1)
    assert (exported.shape.vocabulary, exported.shape.draft_vocabulary) == (TOKENS, min(tokens, TOKENS))
    assert len(exported.tables) == (tokens < TOKENS)
    texts = [[5, 95, 3, last] for last in range(TOKENS)]
    found = Drafting(folder, exported, "portable", TOKENS).run([0] * TOKENS, texts)
    logits = model(input_ids=torch.tensor(texts).clamp(max=tokens - 1), use_cache=False).logits[:, -1]
    np.testing.assert_allclose(found[names.LOGITS][:, 0], logits[:, :TOKENS].numpy(), atol=1e-4)
    assert found[names.CANDIDATES][:, 0, 0].tolist() == logits[:, :TOKENS].argmax(-1).tolist()
    beyond = int((logits.argmax(-1) >= TOKENS).sum())
    assert (beyond > 0) == (tokens > TOKENS), "some drafts must be of ids that the verifier lacks"


def test_a_checkpoint_that_does_not_fit_the_verifier(tmp_path: Path) -> None:
    """A table of positions ends. LongRoPE would rotate earlier keys anew."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "short", "gpt2", max_position_embeddings=64))
    with pytest.raises(CheckpointError, match="its texts have at most 64 tokens, the verifier's have 96"):
        EXPORTER.checkpoint(Target("d", OF_97, tmp_path, TreeBuild()), checkpoint)
    with pytest.raises(UsageError, match="draft_vocabulary needs counts of tokens"):
        EXPORTER.checkpoint(Target("d", OF_97, tmp_path, TreeBuild(draft_vocabulary=10)), checkpoint)
    with pytest.raises(UsageError, match="head_rank is for the verifier's head, not for a plain checkpoint's"):
        EXPORTER.checkpoint(Target("d", OF_97, tmp_path, TreeBuild(head_rank=10)), checkpoint)
    factors = [1.0] * 6
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": factors, "long_factor": factors}
    long = config_of("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    with pytest.raises(UnsupportedModelError, match="drafter d: phi3 changes its rotary embedding in texts of more"):
        sizes_of("d", long, 96)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (TreeBuild, {"steps": 25}, "steps must be a number from 1 to 24"),
        (TreeBuild, {"width": 9}, "width must be a number from 1 to 8"),
        (TreeBuild, {"width": 8}, "a tree of 24 levels of 8 nodes is too large"),
        (SteeringBuild, {"steps": 25}, "steps must be a number from 1 to 24, not 25"),
    ],
)
def test_options_that_no_graph_takes(build: Callable[..., object], options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(**options)


# Students, plain and steered.


def student_of(
    folder: Path, verifier: Verifier, drafted: int = 0, states: tuple[str, ...] = STATES, seed: int = 5, **form: Any
) -> DraftModel:
    """Write a student's folder in 8 bits. Returns the student with its stored numbers.

    drafted: tokens of its draft vocabulary, every second one from 3 on; 0 for all.   states: that steer it.
    form: fields of its configuration.
    """
    config = replace(configuration_of(load_config(verifier.checkpoint), VOCABULARY, (0, 1), drafted, states), **form)
    student, tokens = randomized(lambda: DraftModel(config), seed, 0.2), torch.arange(3, 3 + 2 * drafted, 2)
    identity, method = Identity.of(verifier.checkpoint), "steered" if states else "draft_model"
    save_drafter(folder, method, config, identity, student, counts(), {}, tokens if drafted else None, storage="int8")
    DrafterCheckpoint.open(folder).load(student)
    return student


def export_student(folder: Path, verifier: Verifier, options: Any) -> tuple[Path, ExportedDrafter]:
    """The graphs of the student in `folder`/student, and their folder."""
    out = Path(shutil.copytree(verifier.folder, folder / "graphs"))
    return out, trained(DrafterCheckpoint.open(folder / "student"), verifier, out, options)


def own_weights(drafter: ExportedDrafter) -> set[str]:
    return {ref.initializer.removeprefix(f"{NAME}.") for ref in drafter.weights}


def test_a_student_has_its_verifiers_embedding_and_rows_of_its_head(little_verifier: Verifier, tmp_path: Path) -> None:
    student = student_of(tmp_path / "student", little_verifier, drafted=9, states=())
    folder, built = export_student(tmp_path, little_verifier, TreeBuild(precision="fp32"))
    assert own_weights(built) == {*student.state_dict(), "head"}
    embedding, head = little_verifier.shared
    vocabulary, texts = torch.arange(3, 21, 2), [[5, 9, 3, 27, 12, 8], [1, 2, 60, 41]]
    found = Drafting(folder, built, "portable", 2).run([0, 0], texts)
    for slot, text in enumerate(texts):
        with torch.no_grad():
            logits = head[vocabulary] @ student(F.embedding(torch.tensor([text]), embedding))[0, -1]
        np.testing.assert_allclose(found[names.LOGITS][slot, 0], logits.numpy(), atol=1e-4)
        assert found[names.CANDIDATES][slot, 0, 0] == int(vocabulary[logits.argmax()])


MECHANISMS = {("up", False): 48, ("up", True): 48, ("after", True): HIDDEN, ("conditional", True): HIDDEN}
"""Mechanisms, with a norm of g or without, and the numbers of a layer that `steer` computes."""


@pytest.fixture(scope="module", params=MECHANISMS, ids=lambda param: f"{param[0]}-{param[1]}")
def steered(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[DraftModel, Path, ExportedDrafter]:
    folder, (mechanism, norm) = tmp_path_factory.mktemp("steered"), request.param
    student = student_of(folder / "student", little_verifier, steering=mechanism, steering_norm=norm)
    return student, *export_student(folder, little_verifier, SteeringBuild(precision="fp32"))


@pytest.mark.parametrize("form", FORMS)
def test_graphs_compute_the_steered_modules_rows(
    steered: tuple[DraftModel, Path, ExportedDrafter], little_verifier: Verifier, form: str
) -> None:
    """Rows of two sequences from positions 0 and 3, each with the hidden states of its own earlier position."""
    (student, folder, built), rows = steered, 7
    shape, size = built.shape, MECHANISMS[student.config.steering, student.config.steering_norm]
    assert (shape.hidden_states, shape.steering, shape.steps, shape.width, shape.nodes) == (STATES, 2 * size, 8, 1, 9)
    assert own_weights(built) == set(student.state_dict())
    assert len(built.weights) == len(student.state_dict()), "each weight is in one of the two graphs"
    slots, starts, last = (1, [3], [6]) if form == "single" else (2, [0, 3], [4, 6])
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(slots, rows, 2 * HIDDEN, generator=generator)
    positions = torch.tensor([list(range(start, start + rows)) for start in starts])
    record = GraphRecord(graph_file(NAME, names.STEER), steer_inputs(shape), steer_outputs(shape))
    call = calls_of(folder, record).prepare(B=slots, T=rows)
    call.inputs["features"][...], call.inputs["features.1"][...] = features.split(HIDDEN, -1)
    call.inputs[names.POSITIONS][...], call.inputs[names.OUTPUT_ROWS][...] = positions, np.array(last)[:, None]
    call.run()
    assert student.steering is not None
    with torch.no_grad():
        biases = student.steering(features, positions)
    np.testing.assert_allclose(call.outputs[names.STEERING], biases, atol=1e-5)
    assert np.array_equal(call.outputs[names.STEERING_LAST][:, 0], call.outputs[names.STEERING][range(slots), last])
    assert [bool(first.any()) for first in biases[:, 0]] == [start > 0 for start in starts]

    tokens = torch.randint(0, VOCABULARY, (slots, rows), generator=generator)
    graph = Drafting(folder, built, form, slots)
    found = graph.run([0] * slots, tokens.tolist(), every=True, STEERING=biases)
    embedding, head = little_verifier.shared
    with torch.no_grad():
        hidden = student(F.embedding(tokens, embedding), biases)
    np.testing.assert_allclose(found[names.LOGITS], hidden @ head.T, atol=2e-4)


def test_a_drafter_with_random_weights_has_some_layers_and_the_methods_hidden_states(
    little_verifier: Verifier, tmp_path: Path
) -> None:
    """By default its products have 8 bits, those of steering too."""
    out = Path(shutil.copytree(little_verifier.folder, tmp_path / "graphs"))
    states = STEERED.method.hidden_states
    verifier, options = replace(little_verifier.export, hidden_states=states), SteeringBuild(None, 20, steps=3)
    built = STEERED.random(Target(NAME, verifier, out, options), load_config(little_verifier.checkpoint))
    assert (built.precision, built.shape.hidden_states, built.shape.layers) == ("int8", states, 2)
    assert (built.shape.draft_vocabulary, built.shape.nodes, built.shape.steering) == (20, 4, 2 * 48)
    assert {f"steering.{name}.weight.codes" for name in ("vector", "bias")} <= own_weights(built)


def test_steering_belongs_to_its_verifier_and_its_student(little_verifier: Verifier, tmp_path: Path) -> None:
    """Each wrong pair is one line: another verifier, another method, no steering, weights of another student."""
    identity = Identity.of(little_verifier.checkpoint)
    for name, seed in (("mine", 5), ("other", 6)):
        student_of(tmp_path / name, little_verifier, seed=seed)

    def line(name: str, found: Identity = identity, method: str = "steered") -> str:
        exporter, options = (STEERED, SteeringBuild()) if method == "steered" else (EXPORTER, TreeBuild())
        target, opened = (
            Target(NAME, little_verifier.export, tmp_path, options),
            DrafterCheckpoint.open(tmp_path / name),
        )
        with pytest.raises(CheckpointError) as caught:
            exporter.trained(target, opened, found)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    other = Identity(("0" * 64,), identity.tokenizer)
    assert "was trained for another verifier: expected weights" in line("mine", other)
    assert "redraft train steered --verifier DIR" in line("mine", other)
    assert "has steering, which draft_model does not read" in line("mine", method="draft_model")
    own, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("mine", "other"))
    mixed = {name: (theirs if name.startswith("steering.") else own)[name] for name in own}
    save_file(mixed, tmp_path / "mine" / "model.safetensors")
    assert "these are another drafter's weights: expected " in line("mine")
    give_states(tmp_path / "other", [])
    assert "is a drafter of steered: it has no steering" in line("other")
    give_states(tmp_path / "other", ["last", "7"])
    assert "the verifier's graph does not output hidden state '7'" in line("other")


def give_states(folder: Path, states: object) -> None:
    """Change the hidden states in the configuration of a drafter's folder."""
    values = json.loads((folder / "config.json").read_text())
    values["config"]["hidden_states"] = states
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("named", [5, "21", [2, 1], {"2": 1}])
def test_hidden_states_that_are_no_list_of_names(named: object, little_verifier: Verifier, tmp_path: Path) -> None:
    student_of(tmp_path, little_verifier)
    give_states(tmp_path, named)
    with pytest.raises(CheckpointError, match="hidden_states must be a list of names, not"):
        read_states(tmp_path, little_verifier.checkpoint)
