"""The verifier's objective: next-token loss plus the weighted multi-token-prediction loss, trained jointly."""

from __future__ import annotations

import copy
import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.tiny.recipe import ModelConfig, VerifierRecipe
from experiments.tiny.tokenizer import BOS_ID, EOS_ID, PAD_ID
from redraft.train.batches import Batch
from redraft.train.mtp import MtpModule


def llama_config(model: ModelConfig) -> LlamaConfig:
    """Return the transformers configuration of the recipe's shape."""
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        rms_norm_eps=model.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


class VerifierObjective(nn.Module):
    """A Llama verifier with its MTP module."""

    lookahead = 2
    """Tokens that a row needs after its inputs: the next token, and one more for the MTP module."""

    def __init__(self, recipe: VerifierRecipe, compile_graph: bool = False) -> None:
        """Initialise by torch's generator, so seed it first. `compile_graph` runs the loss through torch.compile."""
        super().__init__()
        config = llama_config(recipe.model)
        self.mtp = MtpModule(config)
        config.num_hidden_layers = recipe.layers(0)
        self.model = LlamaForCausalLM(config)
        self._recipe = recipe
        self._weight = recipe.mtp_weight
        self._stride = recipe.mtp_row_stride
        _initialise(self)
        self._row_losses = torch.compile(self.row_losses, dynamic=False) if compile_graph else self.row_losses

    def prepare(self, step: int) -> bool:
        """Grow the model if `step` needs more layers than it has."""
        wanted = self._recipe.layers(step)
        if wanted == len(self.model.model.layers):
            return False
        grow(self.model, wanted)
        return True

    def row_losses(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean losses, nats a token, of tokens i64[B, T + 2]: next one [B], one after next [ceil(B / stride)].

        The MTP module sees every `mtp_row_stride`-th row, which bounds its cost.
        """
        inputs, following, after = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, n]
        main = self._cross_entropy(hidden, following)
        some = slice(None, None, self._stride)
        states = self.mtp(hidden[some], self.model.model.embed_tokens(following[some]))
        return main, self._cross_entropy(states, after[some])

    def _cross_entropy(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model.lm_head(hidden).float()  # [B, T, V]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return mean next-token loss plus `mtp_weight` times MTP loss, and metrics by kind and `mtp`, nats a token."""
        device = self.model.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            main, mtp = self._row_losses(batch.tokens.to(device))
        by_kind: dict[str, list[float]] = defaultdict(list)
        for kind, value in zip(batch.kinds, main.tolist(), strict=True):
            by_kind[kind].append(value)
        metrics = {kind: math.fsum(values) / len(values) for kind, values in by_kind.items()}
        mtp_loss = mtp.mean()
        return main.mean() + self._weight * mtp_loss, {**metrics, "mtp": mtp_loss.item()}


def grow(model: LlamaForCausalLM, layers: int) -> None:
    """Deepen `model` in place, to a multiple of its layers, without changing its results.

    Copies of each layer follow it. Their writes to the residual stream are zero, so they start as the identity (as in a
    fresh model) but read with trained projections.
    """
    times, rest = divmod(layers, len(model.model.layers))
    if rest or times < 1:
        raise ValueError(f"cannot grow {len(model.model.layers)} layers to {layers}")
    grown = []
    for layer in model.model.layers:
        grown.append(layer)
        for _ in range(times - 1):
            duplicate = copy.deepcopy(layer)
            nn.init.zeros_(duplicate.self_attn.o_proj.weight)
            nn.init.zeros_(duplicate.mlp.down_proj.weight)
            grown.append(duplicate)
    for index, layer in enumerate(grown):
        layer.self_attn.layer_idx = index  # the layer's index in a KV cache
    model.model.layers = nn.ModuleList(grown)
    model.config.num_hidden_layers = layers


def _initialise(module: nn.Module) -> None:
    """Set normal weights with variance 1 / fan-in, small embeddings, and zero projections into the residual stream."""
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            nn.init.ones_(parameter)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        elif "embed_tokens" in name:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
