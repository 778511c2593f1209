"""A draft model's graph drafts what transformers' own model continues with, in every form that the CPU runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
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
from redraft.export.drafters.writing import Target
from redraft.export.verifier import VerifierExport
from redraft.methods.chains import DRAWN_LOG_PROB
from redraft.methods.decoder import DecoderShape, TreeBuild, draft_inputs, draft_outputs
from redraft.signatures import VerifierShape
from tests.engines.sessions import session_of
from tests.export.models import config_of, write_checkpoint
from tests.noise import keys_of, noise_rows

from .tiny import VOCABULARY, Verifier, counts

ROWS, TOKENS, TEXT_LIMIT = 64, 97, 96
TEXTS = ([5, 9, 3, 77, 12, 8, 41, 6, 20, 11], [1, 2, 60, 61, 7, 33])
EXPORTER = find_exporter("draft_model")
OF_97 = VerifierExport(VerifierShape(1, 1, 1, 1, TOKENS, TEXT_LIMIT), (), "", (), "", "", None)  # type: ignore[arg-type]
"""A verifier of which a plain checkpoint shares nothing."""


class Drafting:
    """A graph in one of its forms, over two slots."""

    def __init__(self, folder: Path, record: GraphRecord, shape: DecoderShape, slots: int) -> None:
        self.calls = Calls(OnnxRuntimeProgram(session_of(folder / record.file), record))
        self.slots = slots
        for layer in range(shape.layers):
            for cache in (names.key_cache(layer), names.value_cache(layer)):
                self.calls.bind(cache, np.full((slots, shape.kv_heads, ROWS, shape.head_dim), 3.0, np.float32))
        self.set("temperature", np.zeros(slots, np.float32), np.ones(slots, np.float32))

    def set(self, what: str, noise: np.ndarray, scale: np.ndarray) -> None:
        self.calls.bind(names.NOISE_SCALE, noise)
        self.calls.bind(names.DRAFT_LOGIT_SCALE, scale)

    def run(
        self, starts: list[int], rows: list[list[int]], keys: np.ndarray | None = None, drawn: bool = False
    ) -> dict[str, np.ndarray]:
        """Compute these rows after the first ones of each slot. Shorter rows are padded."""
        width = max(map(len, rows))
        batch = {"B": self.slots} if "B" in self.calls.inputs[0].shape else {}
        call = self.calls.prepare(**batch, T=width, R=1)
        for slot, (start, tokens) in enumerate(zip(starts, rows, strict=True)):
            call.inputs[names.TOKEN_IDS][slot] = tokens + [0] * (width - len(tokens))
            call.inputs[names.POSITIONS][slot] = np.arange(start, start + width)
            call.inputs[names.TREE_MASK][slot] = np.tri(width, dtype=np.bool_)
            call.inputs[names.CACHE_LEN][slot] = start
            call.inputs[names.OUTPUT_ROWS][slot] = len(tokens) - 1
        call.inputs[names.KV_LEN][0] = max(starts) + width
        call.inputs[names.NOISE_KEYS][...] = 1 if keys is None else keys
        call.inputs[names.DRAWN][...] = drawn
        call.run()
        return {name: values.copy() for name, values in call.outputs.items()}


def record_of(name: str, shape: DecoderShape) -> GraphRecord:
    return GraphRecord(graph_file(name, names.DRAFT), draft_inputs(shape), draft_outputs(shape))


def greedy(model: torch.nn.Module, text: list[int], steps: int) -> tuple[list[int], list[float]]:
    """transformers' continuation of a text, all of it computed again for each token, and the log probabilities."""
    tokens, log_probs = list(text), []
    for _ in range(steps):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        tokens.append(int(logits.argmax()))
        log_probs.append(float(logits.log_softmax(-1).max()))
    return tokens[len(text) :], log_probs


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "gemma2"])
@pytest.mark.parametrize("form", ["portable", "batch", "single"])
@torch.no_grad()
def test_a_draft_is_the_models_own_continuation(
    plain: dict[str, tuple[Path, Path, ExportedDrafter]], architecture: str, form: str
) -> None:
    """Two texts of different lengths catch up in two calls, the second padded, and draft past a window of 8 tokens."""
    checkpoint, folder, exported = plain[architecture]
    record = record_of("d", exported.shape)
    if form == "batch":
        record = lower_batch(folder, record, "d.draft.batch")
    elif form == "single":
        record = lower_single(folder, record, False, "d.draft.single", chains=exported.shape.width == 1)
    if record is None:
        assert (architecture, form) == ("gemma2", "single"), "only the cap on its scores does not fit the kernel"
        return
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    texts = TEXTS if form != "single" else TEXTS[:1]
    graph = Drafting(folder, record, exported.shape, len(texts))
    first = [text[:4] for text in texts]
    graph.run([0] * len(texts), first)
    found = graph.run([4] * len(texts), [text[4:] for text in texts])
    expected = [greedy(model, text, 6) for text in texts]
    for step in range(6):
        for slot, (tokens, log_probs) in enumerate(expected):
            assert found[names.CANDIDATES][slot, 0, 0] == tokens[step]
            np.testing.assert_allclose(found[names.CANDIDATE_LOG_PROBS][slot, 0, 0], log_probs[step], atol=2e-4)
        rows = [[tokens[step]] for tokens, _ in expected]
        found = graph.run([len(text) + step for text in texts], rows)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, ExportedDrafter]]:
    """Plain checkpoints by architecture: their folders, and the folders of their graphs. Texts pass mistral's limit."""
    found = {}
    for architecture in ("llama", "mistral", "qwen2", "gemma2"):
        folder = tmp_path_factory.mktemp(architecture)
        limit = 8 if architecture == "mistral" else 128
        checkpoint = write_checkpoint(folder / "model", architecture, max_position_embeddings=limit)
        out = folder / "graphs"
        out.mkdir()
        options = TreeBuild(precision="fp32", width=3 if architecture == "qwen2" else 1, steps=8)
        found[architecture] = (
            checkpoint,
            out,
            EXPORTER.checkpoint(Target("d", OF_97, out, options), Checkpoint.open(checkpoint)),
        )
    return found


@torch.no_grad()
def test_candidates_are_the_best_under_noise(plain: dict[str, tuple[Path, Path, ExportedDrafter]]) -> None:
    """Each slot has its own noise and scale. Drawn candidates have the log probabilities of their ranks."""
    checkpoint, folder, exported = plain["qwen2"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    graph = Drafting(folder, record_of("d", exported.shape), exported.shape, 2)
    temperatures, scales = np.array([0.0, 1.7], np.float32), np.array([1.3, 0.6], np.float32)
    graph.set("noise", temperatures, scales)
    texts, keys = [TEXTS[0][:6], TEXTS[1]], keys_of((3, 4), 50, 1)
    found = graph.run([0, 0], texts, keys)
    for slot, text in enumerate(texts):
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float().numpy()
        np.testing.assert_allclose(found[names.LOGITS][slot, 0], logits, atol=1e-4)
        noise = noise_rows((3, 4)[slot], 50, 1, np.arange(TOKENS))[0]
        z = torch.from_numpy((logits + temperatures[slot] * noise) * scales[slot])
        best = z.log_softmax(-1).topk(3)
        assert found[names.CANDIDATES][slot, 0].tolist() == best.indices.tolist()
        np.testing.assert_allclose(found[names.CANDIDATE_LOG_PROBS][slot, 0], best.values.numpy(), atol=2e-4)
    drawn = graph.run([0, 0], texts, keys, drawn=True)
    assert drawn[names.CANDIDATES].tolist() == found[names.CANDIDATES].tolist()
    assert drawn[names.CANDIDATE_LOG_PROBS][0, 0].tolist() == [rank * DRAWN_LOG_PROB for rank in (1, 2, 3)]


@pytest.mark.parametrize("drafted", [0, 9])
@torch.no_grad()
def test_a_student_has_its_verifiers_embedding_and_rows_of_its_head(
    little_verifier: Verifier, tmp_path: Path, drafted: int
) -> None:
    """With all tokens of the verifier, and with nine of them, in 8 bits on disk."""
    config = configuration_of(load_config(little_verifier.checkpoint), VOCABULARY, (1,), drafted)
    torch.manual_seed(5)
    student = DraftModel(config).eval()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    identity = Identity.of(little_verifier.checkpoint)
    tokens = torch.arange(3, 3 + 2 * drafted, 2) if drafted else None
    save_drafter(
        tmp_path / "student", "draft_model", config, identity, student, counts(), {}, tokens, storage="int8"
    )  # fmt: skip
    out = Path(shutil.copytree(little_verifier.folder, tmp_path / "graphs"))
    opened = DrafterCheckpoint.open(tmp_path / "student")
    opened.load(student)
    built = EXPORTER.trained(Target("d", little_verifier.export, out, TreeBuild(precision="fp32")), opened, identity)
    own = {ref.initializer for ref in built.weights}
    assert own == {f"d.{name}" for name in student.state_dict()} | ({"d.head"} if drafted else set())
    stored = load_file(little_verifier.checkpoint.path / "model.safetensors")
    embedding, head = (torch.from_numpy(stored[name]) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    vocabulary = torch.arange(VOCABULARY) if tokens is None else tokens
    graph = Drafting(out, record_of("d", built.shape), built.shape, 2)
    if drafted:
        graph.calls.bind(names.DRAFT_VOCABULARY, vocabulary.numpy())
    texts = [[5, 9, 3, 27, 12, 8], [1, 2, 60, 41]]
    found = graph.run([0, 0], texts)
    for slot, text in enumerate(texts):
        state = student(F.embedding(torch.tensor([text]), embedding))[0, -1]
        logits = head[vocabulary] @ state
        np.testing.assert_allclose(found[names.LOGITS][slot, 0], logits.numpy(), atol=1e-4)
        assert found[names.CANDIDATES][slot, 0, 0] == int(vocabulary[logits.argmax()])


def test_a_random_draft_model_has_a_few_of_its_verifiers_layers(little_verifier: Verifier, tmp_path: Path) -> None:
    out = Path(shutil.copytree(little_verifier.folder, tmp_path / "graphs"))
    config = load_config(little_verifier.checkpoint)
    built = EXPORTER.random(Target("d", little_verifier.export, out, TreeBuild(draft_vocabulary=20, steps=5)), config)
    assert (built.shape.layers, built.shape.draft_vocabulary, built.shape.nodes) == (2, 20, 6)
    assert built.precision == "int8"


@pytest.mark.parametrize("tokens", [90, 104])
@torch.no_grad()
def test_a_vocabulary_of_another_size(tokens: int, tmp_path: Path) -> None:
    """Only ids of both vocabularies are drafted. The last row of a smaller embedding stands for unknown ids."""
    checkpoint = write_checkpoint(tmp_path / "model", "llama", vocab_size=tokens, num_hidden_layers=1)
    exported = EXPORTER.checkpoint(
        Target("d", OF_97, tmp_path, TreeBuild(precision="fp32")), Checkpoint.open(checkpoint)
    )
    assert (exported.shape.vocabulary, exported.shape.draft_vocabulary) == (TOKENS, min(tokens, TOKENS))
    assert len(exported.tables) == (tokens < TOKENS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    lowered = lower_single(tmp_path, record_of("d", exported.shape), False, "d.draft.single", chains=True)
    assert lowered is not None
    beyond = 0
    for record in (record_of("d", exported.shape), lowered):
        graph = Drafting(tmp_path, record, exported.shape, 1)
        if tokens < TOKENS:
            graph.calls.bind(names.DRAFT_VOCABULARY, np.arange(tokens))
        for last in range(TOKENS):
            text = [5, 95, 3, last]
            found = graph.run([0], [text])
            known = torch.tensor([[min(token, tokens - 1) for token in text]])
            logits = model(input_ids=known, use_cache=False).logits[0, -1]
            np.testing.assert_allclose(found[names.LOGITS][0, 0], logits[:TOKENS].numpy(), atol=1e-4)
            assert found[names.CANDIDATES][0, 0, 0] == int(logits[:TOKENS].argmax())
            beyond += int(logits.argmax()) >= TOKENS
    assert (beyond > 0) == (tokens > TOKENS), "some drafts must be of ids that the verifier lacks"


def test_a_checkpoint_that_does_not_fit_the_verifier(tmp_path: Path) -> None:
    """A table of positions ends. LongRoPE would rotate earlier keys anew."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "short", "gpt2", max_position_embeddings=64))
    with pytest.raises(CheckpointError, match="its texts have at most 64 tokens, the verifier's have 96"):
        EXPORTER.checkpoint(Target("d", OF_97, tmp_path, TreeBuild()), checkpoint)
    with pytest.raises(UsageError, match="draft_vocabulary needs counts of tokens"):
        EXPORTER.checkpoint(Target("d", OF_97, tmp_path, TreeBuild(draft_vocabulary=10)), checkpoint)
    factors = [1.0] * 6
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": factors, "long_factor": factors}
    long = config_of("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    with pytest.raises(UnsupportedModelError, match="drafter d: phi3 changes its rotary embedding in texts of more"):
        sizes_of("d", long, 96)


def test_a_student_of_another_verifier(little_verifier: Verifier, tmp_path: Path) -> None:
    config = configuration_of(load_config(little_verifier.checkpoint), VOCABULARY, (0,))
    other = Identity(("0" * 64,), Identity.of(little_verifier.checkpoint).tokenizer)
    save_drafter(tmp_path / "student", "draft_model", config, other, DraftModel(config), counts(), {})
    opened, mine = DrafterCheckpoint.open(tmp_path / "student"), Identity.of(little_verifier.checkpoint)
    with pytest.raises(CheckpointError, match="was trained for another verifier"):
        EXPORTER.trained(Target("d", little_verifier.export, tmp_path, TreeBuild()), opened, mine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 25}, "steps must be a number from 1 to 24"),
        ({"width": 9}, "width must be a number from 1 to 8"),
        ({"width": 8}, "a tree of 24 levels of 8 nodes is too large"),
    ],
)
def test_options_that_no_graph_takes(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TreeBuild(**options)
