"""The multi-token-prediction module of a verifier as a drafter (DeepSeek-V3, section 2.2, equations 21 to 23).

With f the verifier's hidden state after its final norm, E its embedding and M its head:

    h_1 = Layer(P [RMSNorm(f_t) ; RMSNorm(E(x_{t+1}))])              rows of real features are the keys
    y_i = argmax M h_i,   h_{i+1} = Layer(P [RMSNorm(h_i) ; RMSNorm(E(y_i))])

One call of the draft graph catches up on rows and unrolls the chain of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.drafters import ExportedDrafter
from redraft.export.drafters.draft_graph import TokenChain
from redraft.export.drafters.exporter import DraftExporter
from redraft.export.drafters.layer import Attend, DrafterLayer, Keep, LayerConfig, all_rows, verifier_sizes
from redraft.export.drafters.mtp_modules import NativeModule, require_module
from redraft.export.drafters.mtp_native import export_native
from redraft.export.drafters.writing import Target
from redraft.methods.mtp import MtpShape


class MtpDrafter(nn.Module):
    """The module's own parameters. Embedding and head belong to the verifier."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        n = config.hidden_size
        self.config = config
        self.hidden_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.embedding_norm = nn.RMSNorm(n, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * n, n, bias=False)
        self.layer = DrafterLayer(config)
        self.norm = nn.RMSNorm(n, eps=config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend,
        keep: Keep = all_rows,
    ) -> torch.Tensor:  # fmt: skip
        """Return the next hidden states from states [B, T, n] at `positions` and embeddings of the next tokens."""
        fused = self.projection(torch.cat([self.hidden_norm(hidden), self.embedding_norm(embeddings)], dim=-1))
        out: torch.Tensor = self.norm(self.layer(fused, positions, attend, keep))
        return out

    def readout(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of hidden states: themselves."""
        return hidden


def configuration_of(verifier: Any, vocabulary: int) -> LayerConfig:
    """Return the configuration of a module with the sizes of a verifier of this transformers configuration."""
    return LayerConfig(**verifier_sizes(verifier, vocabulary))


class MtpExporter(DraftExporter[LayerConfig]):
    """The exporter of modules, in a drafter's folder or in the verifier's checkpoint."""

    config, module = LayerConfig, MtpDrafter

    def random_config(self, target: Target, verifier: Any) -> LayerConfig:
        """Return the configuration of a random module."""
        return configuration_of(verifier, target.vocabulary)

    def shape(self, target: Target, config: LayerConfig) -> MtpShape:
        """Return the graph's sizes."""
        steps = target.options.steps
        return MtpShape(**self.sizes(target, config), kv_heads=config.kv_heads, head_dim=config.head_dim, steps=steps)

    def graph(self, target: Target, module: MtpDrafter, shape: MtpShape) -> nn.Module:
        """Return the draft graph's computation."""
        return TokenChain(module, module.config, shape, target.verifier.shape.max_positions)

    def find_native(self, checkpoint: AnyCheckpoint) -> NativeModule:
        """Return the module inside of a checkpoint. Raises CheckpointError if it has none of a known layout."""
        return require_module(checkpoint)

    def native(self, target: Target, checkpoint: AnyCheckpoint) -> ExportedDrafter:
        """Write the module inside of the verifier's own checkpoint. Raises like `mtp_modules.load_module`."""
        return export_native(target, checkpoint, self.method)


EXPORTER = MtpExporter
