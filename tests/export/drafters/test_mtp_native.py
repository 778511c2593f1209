"""Multi-token-prediction modules inside of verifiers: their graphs compute what each project's sources define.

The references below use transformers' layer classes and the formulas of the sources, not redraft's table of layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.loading import load_tensors
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.sources import Source
from redraft.export.drafters import ExportedDrafter, find_exporter
from redraft.export.drafters.writing import Target
from redraft.export.verifier import VerifierExport
from redraft.methods.mtp import METHOD, MtpBuild

from .draft_calls import check_drafts
from .native_checkpoints import FORMS, LAYERS, Form, N, Tensors, V, write_native

STEPS = 3
CLASSES: dict[str, tuple[Any, Any]] = {
    "deepseek": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RotaryEmbedding),
    "glm": (glm.Glm4MoeDecoderLayer, glm.Glm4MoeRotaryEmbedding),
    "mimo": (qwen2.Qwen2DecoderLayer, qwen2.Qwen2RotaryEmbedding),
    "qwen": (qwen3_next.Qwen3NextDecoderLayer, qwen3_next.Qwen3NextRotaryEmbedding),
}


@dataclass(frozen=True)
class Exported:
    """A verifier with its module, and the module's graph."""

    name: str
    checkpoint: Checkpoint
    folder: Path
    drafter: ExportedDrafter

    @property
    def form(self) -> Form:
        return FORMS[self.name]


def untraced(checkpoint: Checkpoint, hidden_states: tuple[str, ...]) -> VerifierExport:
    """The parts of an exported verifier that a drafter's export reads, without the verifier's graph."""
    text = model_config.load_config(checkpoint)
    loaded = load_tensors(checkpoint, Architecture.of(text))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    source = Source(checkpoint, {embedding: (V, N), head: (V, N)}, loaded.parameters)
    return VerifierExport(model_config.verifier_shape(text, None), hidden_states, "", (), embedding, head, source)


@pytest.fixture(scope="module", params=FORMS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    checkpoint = Checkpoint.open(write_native(folder / "verifier", name))
    reads = ("last",) if FORMS[name].normed else (str(LAYERS - 1),)
    (folder / "graphs").mkdir()
    options = MtpBuild(precision="fp32", steps=STEPS)
    target = Target("m", untraced(checkpoint, reads), folder / "graphs", options)
    drafter = find_exporter(METHOD.id).native(target, checkpoint)
    assert drafter.shape.hidden_states == reads
    return Exported(name, checkpoint, folder / "graphs", drafter)


class Reference(nn.Module):
    """A module, written from the sources: transformers' decoder layer between norms and a projection."""

    def __init__(self, name: str, tensors: Tensors) -> None:
        super().__init__()
        self.form = FORMS[name]
        layer_class, rotary_class = CLASSES[name]
        config = CONFIG_MAPPING[self.form.architecture](**self.form.sizes | self.form.block | {"num_hidden_layers": 1})
        config._attn_implementation = config._experts_implementation = "eager"
        self.layer, self.rotary = layer_class(config, 0).eval(), rotary_class(config)
        *parts, prefix = self.form.names(LAYERS)
        self.embedding_norm, self.hidden_norm, self.projection, self.last_norm = (tensors[f"{p}.weight"] for p in parts)
        self.eps = config.rms_norm_eps
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        around = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens", "token_l", "hidden_l", "input_p", "final")
        self.layer.load_state_dict(fused({key: t for key, t in own.items() if not key.startswith(around)}))

    def norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """RMSNorm; Qwen3-Next's gain is one more than stored."""
        gain = gain + 1 if self.form.architecture == "qwen3_next" else gain
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * gain

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state to feed back and the state for the head, [T, n] each."""
        embeddings, hidden = self.norm(embeddings, self.embedding_norm), self.norm(hidden, self.hidden_norm)
        pair = (hidden, embeddings) if self.form.hidden_first else (embeddings, hidden)
        x = F.linear(torch.cat(pair, -1), self.projection)[None]
        rows = x.shape[1]
        mask, positions = torch.full((rows, rows), -torch.inf).triu(1)[None, None], torch.arange(rows)[None]
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions))
        out = (out[0] if isinstance(out, tuple) else out)[0]
        normed = self.norm(out, self.last_norm)
        return (normed if self.form.normed else out), normed


def fused(tensors: Tensors) -> Tensors:
    """Experts as transformers' layers have them: one tensor for all."""
    experts = {name for name in tensors if ".experts." in name}
    if not experts:
        return tensors
    count = 1 + max(int(name.split(".")[2]) for name in experts)

    def of(product: str) -> torch.Tensor:
        return torch.stack([tensors[f"mlp.experts.{number}.{product}.weight"] for number in range(count)])

    kept = {name: t for name, t in tensors.items() if name not in experts}
    gate_up = torch.cat([of("gate_proj"), of("up_proj")], 1)
    return {**kept, "mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": of("down_proj")}


def test_a_draft_is_the_chain_of_the_module(exported: Exported) -> None:
    """The graph equals the module, computed again over all rows for every token."""
    tensors = load_file(str(exported.checkpoint.path / "model.safetensors"))
    reference = Reference(exported.name, tensors)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]

    def expected(features: torch.Tensor, tokens: list[int], noise: np.ndarray) -> np.ndarray:
        hidden, ids, chain = features, tokens[1:], []
        for step in range(STEPS):
            states, normed = reference(hidden, embedding[ids])
            chain.append((head @ normed[-1]).numpy())
            hidden = torch.cat([hidden, states[-1:]])
            ids = [*ids, int((chain[-1] + noise[step]).argmax())]
        return np.stack(chain)

    check_drafts(exported.folder, "m", METHOD, exported.drafter.shape, expected, np.arange(V))


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_the_references_agree_with_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `MtpModel` reads the same names, and predicts the same token after the next from real hidden states."""
    folder = write_native(tmp_path / "it", name)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}\."], raising=False)
    module = MtpModel.from_pretrained(model).eval()
    tensors = load_file(str(folder / "model.safetensors"))
    text = torch.tensor([[5, 9, 3, 3, 17, 8, 20]])
    with torch.no_grad():
        features = model(text, output_hidden_states=True).hidden_states[-1][:, :-1]
        _, logits, _ = module(
            text[:, 1:], features, None, torch.arange(1, 7)[None], MtpCache(config=model.config.get_mtp_config())
        )
        _, normed = Reference(name, tensors)(features[0], tensors["model.embed_tokens.weight"][text[0, 1:]])
    torch.testing.assert_close(tensors["lm_head.weight"] @ normed[-1], logits[0, 0], atol=1e-4, rtol=0)


def test_weights_are_the_checkpoints_own_bytes(exported: Exported) -> None:
    """In the checkpoint's type, the module's tensors are not written again."""
    own = {ref.file for ref in exported.drafter.weights if ref.initializer.startswith("m.")}
    assert own == {"weights/m.model.safetensors"}
