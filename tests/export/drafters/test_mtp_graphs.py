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
from redraft.export.drafters import ExportedDrafter, find_exporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.layer import LayerConfig
from redraft.export.drafters.mtp import MtpDrafter
from redraft.export.drafters.writing import Target
from redraft.methods.mtp import METHOD, MtpBuild

from .draft_calls import check_drafts
from .tiny import HIDDEN, VOCABULARY, Verifier, token_data

STEPS = 3
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
    target = Target("m", little_verifier.export, folder / "graphs", options)
    drafter = find_exporter(METHOD.id).trained(target, opened, identity)
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
    embedding: torch.Tensor, head: torch.Tensor, features: torch.Tensor, tokens: list[int], vocabulary: np.ndarray,
    noise: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Logits [N, H] of the steps, from features [T, n] of T rows and the T + 1 tokens of the text.

    noise: of each step, times its scale, [N, H].
    """
    module = random_module()
    hidden, drafted, chain = features, list(tokens), []
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
        best = int((chain[-1] + torch.from_numpy(noise[step])).argmax())
        drafted.append(int(vocabulary[best]))
        hidden = torch.cat([hidden, state[None]])
    return np.stack(chain)


def test_a_draft_is_the_chain_of_the_module(exported: tuple[Path, ExportedDrafter], little_verifier: Verifier) -> None:
    folder, drafter = exported
    vocabulary = vocabulary_of(folder, drafter)
    stored = load_file(little_verifier.checkpoint.path / "model.safetensors")
    embedding, head = (torch.from_numpy(stored[key]) for key in ("model.embed_tokens.weight", "lm_head.weight"))

    def expected(features: torch.Tensor, tokens: list[int], noise: np.ndarray) -> np.ndarray:
        return expected_chain(embedding, head, features, tokens, vocabulary, noise)

    scales = (CONFIG.draft_logit_scale, 0.7)
    check_drafts(folder, "m", METHOD, drafter.shape, expected, vocabulary, scales)


def test_the_embedded_models_drafter_is_its_own_module(root: Path) -> None:
    """The drafter has the names of a drafter's layer and the verifier's digests."""
    from redraft.export.checkpoint.safetensors import Checkpoint
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
