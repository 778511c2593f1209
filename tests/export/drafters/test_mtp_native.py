"""Multi-token-prediction modules inside of verifiers: their graphs compute what each project's sources define.

The references below use transformers' layer classes and the formulas of the sources, not redraft's table of layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters import find_exporter
from redraft.export.drafters.writing import Target
from redraft.methods.mtp import METHOD, MtpBuild

from .draft_calls import DRAWS, GREEDY, NAME, NOISY, Exported, chained, check_drafts, program
from .native_checkpoints import FORMS, LAYERS, Tensors, write_native
from .tiny import EMBEDDING, HEAD, untraced

CLASSES: dict[str, tuple[Any, Any]] = {
    "deepseek": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RotaryEmbedding),
    "mimo": (qwen2.Qwen2DecoderLayer, qwen2.Qwen2RotaryEmbedding),
    "qwen": (qwen3_next.Qwen3NextDecoderLayer, qwen3_next.Qwen3NextRotaryEmbedding),
}


@pytest.fixture(scope="module", params=["deepseek", "mimo", "qwen"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tensors, Exported]:
    """A layout's name, the tensors of a verifier with a module, and the module's graph."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    checkpoint = Checkpoint.open(write_native(folder / "verifier", name))
    reads = ("last",) if FORMS[name].normed else (str(LAYERS - 1),)
    (folder / "graphs").mkdir()
    target = Target(
        NAME, untraced(checkpoint, reads), folder / "graphs", MtpBuild(precision="fp32", steps=3, head_rank=6)
    )
    drafter = find_exporter(METHOD.id).native(target, checkpoint)
    assert drafter.shape.hidden_states == reads
    tensors = load_file(str(checkpoint.path / "model.safetensors"))
    return name, tensors, Exported.of(folder / "graphs", METHOD, drafter)


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
        """Return the state for the head and the state to feed back, [T, n] each."""
        embeddings, hidden = self.norm(embeddings, self.embedding_norm), self.norm(hidden, self.hidden_norm)
        pair = (hidden, embeddings) if self.form.hidden_first else (embeddings, hidden)
        x = F.linear(torch.cat(pair, -1), self.projection)[None]
        rows = x.shape[1]
        mask, positions = torch.full((rows, rows), -torch.inf).triu(1)[None, None], torch.arange(rows)[None]
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions))
        out = (out[0] if isinstance(out, tuple) else out)[0]
        normed = self.norm(out, self.last_norm)
        return normed, normed if self.form.normed else out


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


def test_a_draft_is_the_chain_of_the_module(native: tuple[str, Tensors, Exported]) -> None:
    """The graph equals the module, computed again over all rows for every token."""
    name, tensors, made = native
    expected = chained(made, Reference(name, tensors), tensors[EMBEDDING], tensors[HEAD])
    check_drafts(made, program(made, "portable", 3), (GREEDY, NOISY, DRAWS), expected)


def test_weights_are_the_checkpoints_own_bytes(native: tuple[str, Tensors, Exported]) -> None:
    """In the checkpoint's type, the module's tensors are not written again. The head's factors are new."""
    own = {ref.initializer: ref.file for ref in native[2].drafter.weights if ref.initializer.startswith(f"{NAME}.")}
    new = {f"{NAME}.head.left", f"{NAME}.head.right"}
    assert {file for name, file in own.items() if name not in new} == {f"weights/{NAME}.model.safetensors"}
    assert {own[name] for name in new} == {f"weights/{NAME}.safetensors"}


def test_the_reference_agrees_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `MtpModel` reads the same names, and predicts the same token after the next from real hidden states."""
    folder = write_native(tmp_path / "it", "deepseek")
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
        normed, _ = Reference("deepseek", tensors)(features[0], tensors[EMBEDDING][text[0, 1:]])
    torch.testing.assert_close(tensors[HEAD] @ normed[-1], logits[0, 0], atol=1e-4, rtol=0)
