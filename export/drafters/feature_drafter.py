"""The torch module of drafters that predict the verifier's next features and read the token one step ahead.

Li et al. 2024 (EAGLE, section 4.1) defined the form. With F_t the feature at position t, x_{t+1} the next token, E the
verifier's embedding and M its head:

    P_{t+1}, R_{t+1} = Layer(Fusion(F_t, E(x_{t+1})))        attending to the rows of earlier positions
    logits of x_{t+2} = M P_{t+1}

A draft feeds R_{t+1} back in place of F_{t+1}, with a drafted token. Methods differ in four choices of `FeatureConfig`:

fusion      `linear`        W [F ; E(x)] + b. EAGLE; HASS.
            `gated_fused`   h = W [F ; E(x)] + b, D (σ(G E(x)) ⊙ U N(h)) + h: the token samples from both in a wide
                            space. FSPAD (Gui et al. 2024, arXiv 2408.15562); its text names no formula, its authors'
                            program has this one.
            `token_guided`  h = W [F ; E(x)] + b, z = U [N(h) ; N(E(x))] + b', D σ(z) + b'' + h. GRIFFIN (Hu et al.),
                            equations 5 to 7. `guides` names the inputs of U; without h among them, the last sum
                            has no h either.
            `token_guided_narrow`  D [N(h) ; N(E(x))] + b'' + h: without U and σ (table 6, ablation 1).
            `attention`     no fusion: the layer's attention reads [N(E(x)) ; N(F)], and F is its residual. EAGLE-3
                            (Li et al. 2025), section 3.1.
outputs     `one`           P = R, the layer's output. EAGLE; HASS.
            `doubled`       SwiGLU has two outputs of n, each with the residual: P and R. FSPAD; GRIFFIN's
                            token-enhanced head (section 4.2), as the programs of their authors have it.
            `normed`        P is the norm of R: the head reads a norm, the next step does not. EAGLE-3.
            `normed_back`   P = R is that norm. EAGLE-3.1's feedback.
features    one of the verifier's hidden states, or several that a product maps to one, with a norm of each if
            `feature_norms` (EAGLE-3.1), or a norm of all if `joint_norm` (speculators).
input_norm  False for a layer without the norm before attention, as EAGLE was published.

σ is SiLU and N is RMSNorm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import nn

from redraft.errors import CheckpointError
from redraft.export.drafters.layer import Attend, DrafterLayer, Keep, LayerConfig, all_rows
from redraft.names import LAST_HIDDEN_STATE

Fusion = Literal["linear", "gated_fused", "token_guided", "token_guided_narrow", "attention"]
Guide = Literal["fused", "token", "feature"]
Outputs = Literal["one", "doubled", "normed", "normed_back"]


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(LayerConfig):
    """Configuration of a drafter: the layer's shape, and the choices of this module's documentation.

    fusion_size:   width of a fusion's wide space; 0 is the layer's `intermediate_size`.
    guides:        inputs of a token-guided fusion's wide space: h, E(x) or F, each with its norm.
    hidden_states: the verifier's hidden states of a feature.
    feature_norms, joint_norm: a norm of each hidden state, and one of all together, before the product.
    own_head:      True if the head is the drafter's, not rows of the verifier's.
    normed_residual: True if the residual of the `attention` fusion is N(F), not F.
    """

    fusion: Fusion = "linear"
    outputs: Outputs = "one"
    input_norm: bool = True
    fusion_size: int = 0
    guides: tuple[Guide, ...] = ("fused", "token")
    hidden_states: tuple[str, ...] = (LAST_HIDDEN_STATE,)
    feature_norms: bool = False
    joint_norm: bool = False
    own_head: bool = False
    normed_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kinds in (("fusion", Fusion), ("outputs", Outputs)):
            if getattr(self, name) not in get_args(kinds):
                known = ", ".join(get_args(kinds))
                raise CheckpointError(f"{name} must be one of {known}, not {getattr(self, name)!r}")
        if not self.guides or not set(self.guides) <= set(get_args(Guide)):
            raise CheckpointError(f"guides must be some of {', '.join(get_args(Guide))}, not {self.guides}")
        if not self.hidden_states or len(set(self.hidden_states)) < len(self.hidden_states):
            raise CheckpointError(f"hidden_states must be different names, at least one, not {self.hidden_states}")
        if self.fusion_size < 0:
            raise CheckpointError(f"fusion_size must be 0 or more, not {self.fusion_size}")

    @property
    def feature_size(self) -> int:
        """Numbers of a row of all hidden states."""
        return self.hidden_size * len(self.hidden_states)


class Predicted(NamedTuple):
    """The outputs of a row, [B, T, n] each: the head's input, and the next step's feature."""

    token: torch.Tensor
    feature: torch.Tensor


def _norm(config: FeatureConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class FeatureDrafter(nn.Module):
    """The trained parameters. The embedding belongs to the verifier, and so does the head unless `own_head`."""

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        n = config.hidden_size
        self.config = config
        several = len(config.hidden_states) > 1
        self.feature_norms = nn.ModuleList(_norm(config) for _ in config.hidden_states if config.feature_norms)
        wide = nn.RMSNorm(config.feature_size, eps=config.rms_norm_eps)
        self.joint_norm = wide if config.joint_norm else None
        self.features = nn.Linear(config.feature_size, n, bias=False) if several else None
        self.fusion = _FUSIONS[config.fusion](config)
        beside = config.fusion == "attention"
        self.layer = DrafterLayer(
            config, 2 * n if beside else n, config.input_norm and not beside,
            outputs=2 if config.outputs == "doubled" else 1,
        )  # fmt: skip
        self.norm = _norm(config) if config.outputs.startswith("normed") else None
        self.head = nn.Linear(n, config.draft_size, bias=False) if config.own_head else None

    def inputs(self, features: torch.Tensor) -> torch.Tensor:
        """Return rows [B, T, n] of the verifier's features [B, T, feature_size], to `forward` them."""
        features = self.normed(features)
        return features if self.features is None else self.features(features)

    def normed(self, features: torch.Tensor) -> torch.Tensor:
        """Return features with their norms, before the product."""
        if self.feature_norms:
            parts = features.chunk(len(self.feature_norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.feature_norms, parts, strict=True)], dim=-1)
        return features if self.joint_norm is None else self.joint_norm(features)

    def forward(
        self, rows: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend,
        keep: Keep = all_rows,
    ) -> Predicted:  # fmt: skip
        """Return the outputs of the rows that `keep` selects.

        rows: [B, T, n] at `positions`, of `inputs` or fed back.   embeddings: [B, T, n] of the next tokens.
        """
        read, residual = self.fusion(rows, embeddings)
        out = self.layer(read, positions, attend, keep, residual)
        if self.layer.outputs == 2:
            n = self.config.hidden_size
            return Predicted(out[..., :n], out[..., n:])
        if self.norm is None:
            return Predicted(out, out)
        normed = self.norm(out)
        return Predicted(normed, normed if self.config.outputs == "normed_back" else out)


Fused = tuple[torch.Tensor, torch.Tensor]
"""The inputs of the layer's attention, and its residual."""


class _Linear(nn.Module):
    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, rows: torch.Tensor, embeddings: torch.Tensor) -> Fused:
        fused = self.projection(torch.cat([rows, embeddings], dim=-1))
        return fused, fused


class _Gated(_Linear):
    def __init__(self, config: FeatureConfig) -> None:
        super().__init__(config)
        n, wide = config.hidden_size, config.fusion_size or config.intermediate_size
        self.norm = _norm(config)
        self.gate = nn.Linear(n, wide, bias=False)
        self.up = nn.Linear(n, wide, bias=False)
        self.down = nn.Linear(wide, n, bias=False)

    def forward(self, rows: torch.Tensor, embeddings: torch.Tensor) -> Fused:
        fused, _ = super().forward(rows, embeddings)
        fused = fused + self.down(F.silu(self.gate(embeddings)) * self.up(self.norm(fused)))
        return fused, fused


class _TokenGuided(nn.Module):
    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        n, wide = config.hidden_size, config.fusion_size or config.intermediate_size
        self.guides = config.guides
        self.projection = nn.Linear(2 * n, n) if "fused" in self.guides else None
        self.norms = nn.ModuleDict({name: _norm(config) for name in dict.fromkeys(self.guides)})
        read = n * len(self.guides)
        narrow = config.fusion == "token_guided_narrow"
        self.up = None if narrow else nn.Linear(read, wide)
        self.down = nn.Linear(read if narrow else wide, n)

    def forward(self, rows: torch.Tensor, embeddings: torch.Tensor) -> Fused:
        inputs = {"feature": rows, "token": embeddings}
        if self.projection is not None:
            inputs["fused"] = self.projection(torch.cat([rows, embeddings], dim=-1))
        z = torch.cat([self.norms[name](inputs[name]) for name in self.guides], dim=-1)
        fused = self.down(z if self.up is None else F.silu(self.up(z)))
        fused = fused + inputs["fused"] if "fused" in inputs else fused
        return fused, fused


class _Beside(nn.Module):
    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.embedding_norm = _norm(config)
        self.feature_norm = _norm(config)
        self.normed_residual = config.normed_residual

    def forward(self, rows: torch.Tensor, embeddings: torch.Tensor) -> Fused:
        normed = self.feature_norm(rows)
        return torch.cat([self.embedding_norm(embeddings), normed], dim=-1), normed if self.normed_residual else rows


_FUSIONS = {
    "linear": _Linear, "gated_fused": _Gated, "token_guided": _TokenGuided, "token_guided_narrow": _TokenGuided,
    "attention": _Beside,
}  # fmt: skip
