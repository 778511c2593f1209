"""Random steering of a student, and SD² written from its paper, a row at a time.

The paper: Berdoz et al. 2025, "Steering Pretrained Drafters during Speculative Decoding", equation 2 and appendix A.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig

STATES = ("2", "1", "0")
"""h, m and l: the hidden states after these layers, counted from 0."""


def verifiers_layers(student: DraftModel, verifier: Checkpoint) -> DraftModel:
    """The student with the layers and the final norm of its verifier."""
    whole = AutoModelForCausalLM.from_pretrained(verifier.path).state_dict()
    for name, tensor in student.state_dict().items():
        if not name.startswith("steering."):
            tensor.copy_(whole[name.replace("layers.1.", f"layers.{student.config.layers[-1]}.")])
    return student


def random_steering(student: DraftModel) -> DraftModel:
    """The student with steering that changes each logit."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in student.state_dict().items():
        if name.startswith("steering."):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.15)
    return student


@dataclass
class Paper:
    """SD² after its paper. It has one row of keys and values a token, each with the g that it was made with.

    tokens: of the rows.   sources: the position of the verifier's hidden states that steered each row, -1 for none.
    """

    folder: Path
    drafter: str = "sd2"
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        opened = DrafterCheckpoint.open(self.folder / self.drafter)
        self.config = opened.configure(DraftModelConfig)
        self.student = DraftModel(self.config).eval()
        opened.load(self.student)
        self.weights = {name.removeprefix("model."): t for name, t in self.student.state_dict().items()}
        self.verifier = AutoModelForCausalLM.from_pretrained(self.folder / "verifier").eval()
        self.text = self.verifier.config
        self.caches: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.config.layers]
        self.most_kept = 0

    @torch.no_grad()
    def hidden_states(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return [h ; m ; l] of the verifier at each position, [T, 3 n]."""
        found = self.verifier.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.cat([found[int(name) + 1][0] for name in self.config.hidden_states], dim=-1)

    @torch.no_grad()
    def draft(self, committed: Sequence[int], drafted: Sequence[int], steps: int) -> list[torch.Tensor]:
        """Draft after these tokens, whatever tokens are chosen. Returns the logits of each drafted token.

        Rows of drafted tokens that were committed stay. The other rows but the last one catch up, each with the g of
        the position before it. The last returned token is at t: its g_t comes from t - 1, whose logits gave it.
        """
        states, last = self.hidden_states(committed), len(committed) - 1
        kept = 0
        while kept < min(len(self.tokens), last) and self.tokens[kept] == committed[kept]:
            kept += 1
        self._cut(kept)
        for position in range(kept, last + 1):
            logits = self.row(committed[position], position, states, position - 1)
        chain = [logits]
        for depth in range(1, steps):
            chain.append(self.row(drafted[depth - 1], last + depth, states, last - 1))
        return chain

    def _cut(self, rows: int) -> None:
        del self.tokens[rows:], self.sources[rows:]
        for cache in self.caches:
            del cache[rows:]

    def row(self, token: int, position: int, states: torch.Tensor, source: int) -> torch.Tensor:
        """Compute the row of a token after all earlier rows, steered by the hidden states at `source`; [V] logits."""
        assert position == len(self.tokens)
        self.tokens.append(token)
        self.sources.append(source)
        w = self.weights
        g = w["steering.vector.weight"] @ states[source] if source >= 0 else torch.zeros(self.text.hidden_size)
        x = self.verifier.model.embed_tokens.weight[token]
        for layer, cache in enumerate(self.caches):
            at = f"layers.{layer}."
            a = self._norm(x, w[f"{at}input_layernorm.weight"])
            q, k, v = (self._heads(w[f"{at}self_attn.{name}_proj.weight"] @ a) for name in "qkv")
            cache.append((self._turned(k, position), v))
            shared = len(q) // len(k)
            keys, values = (torch.stack(rows).repeat_interleave(shared, 1) for rows in zip(*cache, strict=True))
            scores = torch.einsum("hd,thd->ht", self._turned(q, position), keys) * q.shape[-1] ** -0.5
            attended = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
            x = x + w[f"{at}self_attn.o_proj.weight"] @ attended.flatten()
            a = self._norm(x, w[f"{at}post_attention_layernorm.weight"])
            gate, up, down = (w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            size = len(up)
            biases = w["steering.bias.weight"][layer * size : (layer + 1) * size] @ g
            x = x + down @ ((up @ a + biases) * torch.nn.functional.silu(gate @ a))
        return self.verifier.lm_head.weight @ self._norm(x, w["norm.weight"])

    def trained(self, committed: Sequence[int]) -> torch.Tensor:
        """Return the training module's logits [T, V] of all rows, in one pass with the same sources."""
        assert self.student.steering is not None
        states = self.hidden_states(committed)[None]
        positions = torch.arange(len(self.tokens))[None]
        features = states[:, torch.tensor(self.sources).clamp(min=0)]
        embedded = self.verifier.model.embed_tokens(torch.tensor([self.tokens]))
        with torch.no_grad():
            hidden = self.student(embedded, self.student.steering(features, positions))
            return self.verifier.lm_head(hidden)[0]

    def _norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean() + self.text.rms_norm_eps).rsqrt() * gain

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self.text.head_dim)

    def _turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Return heads [H, D], whose halves are turned by the position."""
        half = x.shape[-1] // 2
        angles = position * 10000.0 ** (-torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )
