"""The draft graph of a multi-token-prediction module equals the chain that torch computes again for every token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.layer import LayerConfig, renamed
from redraft.export.drafters.mtp import MtpDrafter
from redraft.methods.mtp import METHOD, MtpBuild

from .draft_calls import Exported, Sampling, chained, check_drafts, export, in_each_form, program
from .tiny import HIDDEN, VOCABULARY, Verifier, randomized

CONFIG = LayerConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=8, logit_scale=0.6,
    draft_logit_scale=1.3,
)  # fmt: skip


def random_module() -> MtpDrafter:
    return randomized(lambda: MtpDrafter(CONFIG))


@pytest.fixture(scope="module", params=[None, 8], ids=["whole", "pruned"])
def exported(
    little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Exported:
    """A drafter of all tokens, and one that was trained on nine and is built for the eight most frequent."""
    config = replace(CONFIG, draft_vocab_size=9 if request.param else 0)
    options, folder = MtpBuild("fp32", request.param, steps=3), tmp_path_factory.mktemp("mtp")
    made = export(folder, little_verifier, METHOD.id, random_module(), config, options)
    assert len(made.vocabulary) == (request.param or VOCABULARY)
    return made


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = [x.unflatten(-1, (-1, CONFIG.head_dim)).transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)


@in_each_form
def test_a_draft_is_the_chain_of_the_module(
    exported: Exported, little_verifier: Verifier, form: str, samplings: tuple[Sampling, ...]
) -> None:
    module = random_module()

    def step(rows: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = module(rows[None], embeddings[None], torch.arange(len(rows))[None], attend)[0]
        return states * CONFIG.logit_scale, states

    expected = chained(exported, step, *little_verifier.shared)
    check_drafts(exported, program(exported, form, len(samplings)), samplings, expected)


def test_the_embedded_models_drafter_is_its_own_module(root: Path) -> None:
    """The drafter has the names of a drafter's layer and the verifier's digests."""
    tiny = root / "assets" / "tiny"
    opened = DrafterCheckpoint.open(tiny / "mtp")
    assert (opened.method, opened.verifier) == (METHOD.id, Identity.of(Checkpoint.open(tiny)))
    module = MtpDrafter(opened.configure(LayerConfig))
    opened.load(module)
    state, stored = module.state_dict(), load_file(tiny / "mtp.safetensors")
    assert {renamed(name) for name in stored} == set(state)
    for name, tensor in stored.items():
        assert torch.equal(state[renamed(name)], tensor.float())
