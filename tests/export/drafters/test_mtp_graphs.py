"""The draft graph of a multi-token-prediction module equals the chain that torch computes again for every token."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file

from redraft import names
from redraft.engines.calls import Calls
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.export.drafters import ExportedDrafter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.layer import LayerConfig
from redraft.export.drafters.mtp import MtpDrafter
from redraft.export.drafters.mtp_graphs import export_mtp
from redraft.methods.mtp import METHOD, MtpBuild, draft_inputs, draft_outputs
from tests.engines.sessions import session_of
from tests.noise import keys_of, noise_rows

from .tiny import HIDDEN, VOCABULARY, Verifier, token_data

STEPS, CAPACITY = 3, 40
CONFIG = LayerConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=8, logit_scale=0.6,
    draft_logit_scale=1.3,
)  # fmt: skip


DRAFTED = replace(CONFIG, draft_vocab_size=9)


def random_module() -> MtpDrafter:
    torch.manual_seed(3)
    module = MtpDrafter(CONFIG).eval().requires_grad_(False)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return module.bfloat16().float()


@pytest.fixture(scope="module", params=["whole", "pruned", "trained"])
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, ExportedDrafter]:
    """A drafter of all tokens, one that is built for the eight most frequent, and one that was trained on nine."""
    folder, config = tmp_path_factory.mktemp("mtp"), DRAFTED if request.param == "trained" else CONFIG
    identity, data = Identity.of(little_verifier.checkpoint), token_data(config)
    save_drafter(
        folder / "drafter", METHOD.id, config, identity, random_module(), data.counts, {}, data.draft_vocabulary
    )
    shutil.copytree(little_verifier.folder, folder / "graphs")
    opened = DrafterCheckpoint.open(folder / "drafter")
    options = MtpBuild(precision="fp32", steps=STEPS, draft_vocabulary=8 if request.param == "pruned" else None)
    drafter = export_mtp("m", opened, little_verifier.export, identity, folder / "graphs", options)
    assert drafter.shape.draft_vocabulary == {"whole": VOCABULARY, "pruned": 8, "trained": 9}[request.param]
    return folder / "graphs", drafter


def vocabulary_of(folder: Path, drafter: ExportedDrafter) -> np.ndarray:
    """The token of each column of the logits."""
    if not drafter.tables:
        return np.arange(VOCABULARY)
    (ref,) = drafter.tables
    assert (ref.initializer, ref.file) == (names.DRAFT_VOCABULARY, "weights/m.tables.safetensors")
    return np.fromfile(folder / ref.file, np.int64, ref.shape[0], offset=ref.offset)


def expected_chain(
    embedding: torch.Tensor, head: torch.Tensor, features: torch.Tensor, tokens: list[int], scale: float,
    vocabulary: np.ndarray, noise: np.ndarray,
) -> tuple[list[int], list[float], list[np.ndarray]]:  # fmt: skip
    """Tokens, joint log-probabilities and logits, from features [T, n] of T rows and the T + 1 tokens of the text.

    noise: of each step, times its scale, [N, H].
    """
    module = random_module()
    hidden, drafted, log_probs, chain = features, list(tokens), [0.0], []
    for step in range(STEPS):
        positions = torch.arange(len(hidden))[None]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            heads = [
                x.unflatten(-1, (count, CONFIG.head_dim)).transpose(1, 2)
                for x, count in ((q, CONFIG.heads), (k, CONFIG.kv_heads), (v, CONFIG.kv_heads))
            ]
            out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(-2)

        embeddings = F.embedding(torch.tensor(drafted[1:]), embedding)[None]
        state = module(hidden[None], embeddings, positions, attend)[0, -1]
        chain.append((state @ head[torch.from_numpy(vocabulary)].T) * CONFIG.logit_scale)
        logits = (chain[-1] + torch.from_numpy(noise[step])) * scale
        best = int(logits.argmax())
        log_probs.append(log_probs[-1] + float(logits.log_softmax(-1)[best]))
        drafted.append(int(vocabulary[best]))
        hidden = torch.cat([hidden, state[None]])
    return drafted[len(tokens) - 1 :], log_probs, chain


def test_a_draft_is_the_chain_of_the_module(exported: tuple[Path, ExportedDrafter], little_verifier: Verifier) -> None:
    """Two sequences of different lengths catch up in two calls; the second call is padded.

    Each has another draft logit scale, and the second has noise.
    """
    folder, drafter = exported
    vocabulary, scales = vocabulary_of(folder, drafter), (CONFIG.draft_logit_scale, 0.7)
    stored = load_file(little_verifier.checkpoint.path / "model.safetensors")
    embedding, head = (torch.from_numpy(stored[key]) for key in ("model.embed_tokens.weight", "lm_head.weight"))
    shape = drafter.shape
    record = GraphRecord(graph_file("m", names.DRAFT), draft_inputs(shape), draft_outputs(shape))
    calls = Calls(OnnxRuntimeProgram(session_of(folder / record.file), record))
    for cache in (names.key_cache(0), names.value_cache(0)):
        calls.bind(cache, np.full((2, shape.kv_heads, CAPACITY, shape.head_dim), 7.0, np.float32))
    if drafter.tables:
        calls.bind(names.DRAFT_VOCABULARY, vocabulary)
    temperatures = np.array([0, 1.4], np.float32)
    noises = [np.float32(t) * noise_rows(seed, 21, STEPS, vocabulary) for seed, t in enumerate(temperatures)]
    calls.bind(names.DRAFT_LOGIT_SCALE, np.array(scales, np.float32))
    calls.bind(names.NOISE_SCALE, temperatures)
    calls.bind(names.NOISE_KEYS, keys_of((0, 1), 21, STEPS))
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(0, VOCABULARY, (length + 1,), generator=generator).tolist() for length in (9, 6)]
    features = [torch.randn(len(text) - 1, HIDDEN, generator=generator) for text in texts]
    past = [0, 0]
    for rows in ([4, 4], [5, 2]):
        width = max(rows) + 1
        call = calls.prepare(B=2, M=width)
        for slot, count in enumerate(rows):
            start = past[slot]
            call.inputs[names.FEATURE_ROWS][slot] = 99.0
            call.inputs[names.FEATURE_ROWS][slot, :count] = features[slot][start : start + count]
            call.inputs[names.TOKENS][slot, :count] = texts[slot][start + 1 : start + count + 1]
            call.inputs[names.POSITIONS][slot] = np.arange(start, start + width)
            call.inputs[names.NUM_PENDING][slot] = count
            call.inputs[names.CACHE_LEN][slot] = start
            past[slot] += count
        call.inputs[names.KV_LEN][0] = max(call.inputs[names.CACHE_LEN]) + width
        call.run()
        for slot, end in enumerate(past):
            tokens, log_probs, chain = expected_chain(
                embedding, head, features[slot][:end], texts[slot][: end + 1], scales[slot], vocabulary, noises[slot]
            )
            np.testing.assert_allclose(call.outputs[names.CHAIN_LOGITS][slot], np.stack(chain), atol=1e-4)
            assert call.outputs[names.TREE_TOKENS][slot].tolist() == tokens
            assert call.outputs[names.TREE_PARENTS][slot].tolist() == list(range(-1, STEPS))
            np.testing.assert_allclose(call.outputs[names.TREE_LOG_PROBS][slot], log_probs, atol=1e-4)


def test_the_embedded_models_drafter_is_its_own_module(root: Path) -> None:
    """The drafter has the names of a drafter's layer and the verifier's digests."""
    from redraft.export.checkpoint import Checkpoint
    from redraft.export.drafters.layer import renamed

    tiny = root / "assets" / "tiny"
    opened = DrafterCheckpoint.open(tiny / "mtp")
    assert (opened.method, opened.verifier) == (METHOD.id, Identity.of(Checkpoint.open(tiny)))
    module = MtpDrafter(opened.configure(LayerConfig))
    opened.load(module)
    state, stored = module.state_dict(), torch_file(tiny / "mtp.safetensors")
    assert {renamed(name) for name in stored} == set(state)
    for name, tensor in stored.items():
        assert torch.equal(state[renamed(name)], tensor.float())


def torch_file(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file as load

    return load(path)
