"""A small Llama and a multi-token-prediction module, trained jointly from nothing: for tests and `experiments.tiny`.

The loss is the next token's plus the weighted one of the token after it (DeepSeek-V3 report 2024, section 2.2). The
first `grow_step` steps train a model of `start_layers` layers, then grown to all.
"""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.errors import UsageError
from redraft.names import TOKENIZER_FILE
from redraft.train.batches import Batch, BatchPlan
from redraft.train.config import Recipe
from redraft.train.data import DATA, Corpus, data_digest, facts_of, load_corpora, token_stream
from redraft.train.loop import StepReport, load_checkpoint, refuse_run, train
from redraft.train.mtp import MTP_FILE, MTP_KEY, MtpModule

from .small_tokenizer import BOS_ID, EOS_ID, PAD_ID, change_json, save_tokenizer, train_tokenizer


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama verifier and of its multi-token-prediction module (one more layer of the same shape)."""

    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 12
    intermediate_size: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UsageError(f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}")

    def llama(self) -> LlamaConfig:
        """Return the transformers configuration."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            rms_norm_eps=self.rms_norm_eps,
            tie_word_embeddings=True,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )


@dataclass(frozen=True)
class VerifierRecipe(Recipe):
    """A verifier's run. The module sees every `mtp_row_stride`-th row, which bounds its cost."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"code": 0.45, "word_problems": 0.2, "prose": 0.35})
    decay_seq_len: int = 512
    model: ModelConfig = field(default_factory=ModelConfig)
    start_layers: int = 0
    grow_step: int = 0
    mtp_weight: float = 0.3
    mtp_row_stride: int = 2

    adjustable: ClassVar[frozenset[str]] = Recipe.adjustable | {"grow_step"}

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = max(self.seq_len, self.decay_seq_len)
        if longest > self.model.max_positions:
            raise UsageError(f"rows of {longest} tokens are longer than model.max_positions {self.model.max_positions}")
        if self.grow_step > 0 and (self.start_layers < 1 or self.model.layers % self.start_layers):
            raise UsageError(f"start_layers {self.start_layers} must divide model.layers {self.model.layers}")

    def layers(self, step: int) -> int:
        """Layers of the model that `step` trains."""
        return self.start_layers if step < self.grow_step else self.model.layers

    def course(self, step: int) -> tuple[float, ...]:
        """Return the values that `step` takes from the adjustable fields, its number of layers included."""
        return (*super().course(step), self.layers(step))


class VerifierObjective(nn.Module):
    """A Llama verifier with its module. Initialised by torch's generator, so seed it first."""

    lookahead = 2
    """Tokens that a row needs after its inputs: the next token, and one more for the module."""

    def __init__(self, recipe: VerifierRecipe) -> None:
        super().__init__()
        config = recipe.model.llama()
        self.mtp = MtpModule(config)
        config.num_hidden_layers = recipe.layers(0)
        self.model = LlamaForCausalLM(config)
        self._recipe = recipe
        for name, parameter in self.named_parameters():  # variance 1 / fan-in; nothing goes to the residual stream
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02 if "embed_tokens" in name else parameter.shape[1] ** -0.5)

    def prepare(self, step: int, steps: int) -> bool:
        """Grow the model if `step` needs more layers than it has."""
        wanted = self._recipe.layers(step)
        if wanted == len(self.model.model.layers):
            return False
        grow(self.model, wanted)
        return True

    def row_losses(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean losses of tokens i64[B, T + 2], in nats: next one [B], one after next [ceil(B / stride)]."""
        inputs, following, after = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, n]
        some = slice(None, None, self._recipe.mtp_row_stride)
        states = self.mtp(hidden[some], self.model.model.embed_tokens(following[some]))
        return self._cross_entropy(hidden, following), self._cross_entropy(states, after[some])

    def _cross_entropy(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model.lm_head(hidden).float()  # [B, T, V]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return mean next-token loss plus `mtp_weight` times the module's, and both in nats: by kind, and `mtp`."""
        main, mtp = self.row_losses(batch.tokens)
        metrics = {**by_kind(batch.kinds, main), "mtp": mtp.mean().item()}
        return main.mean() + self._recipe.mtp_weight * mtp.mean(), metrics


def by_kind(kinds: Sequence[str], losses: torch.Tensor) -> dict[str, float]:
    """Return the mean of rows' losses [B] by kind."""
    found: dict[str, list[float]] = defaultdict(list)
    for kind, value in zip(kinds, losses.tolist(), strict=True):
        found[kind].append(value)
    return {kind: math.fsum(values) / len(values) for kind, values in found.items()}


def grow(model: LlamaForCausalLM, layers: int) -> None:
    """Deepen `model` in place, to a multiple of its layers, without changing its results.

    Copies of each layer follow it. Their writes to the residual stream are zero, so they start as the identity (as in a
    fresh model) but read with trained projections.
    """
    grown = []
    for layer in model.model.layers:
        grown.append(layer)
        for _ in range(layers // len(model.model.layers) - 1):
            duplicate = copy.deepcopy(layer)
            nn.init.zeros_(duplicate.self_attn.o_proj.weight)
            nn.init.zeros_(duplicate.mlp.down_proj.weight)
            grown.append(duplicate)
    for index, layer in enumerate(grown):
        layer.self_attn.layer_idx = index  # the layer's index in a KV cache
    model.model.layers = nn.ModuleList(grown)
    model.config.num_hidden_layers = layers


def train_verifier(
    sources: Mapping[str, str], out: Path, recipe: VerifierRecipe, *, resume: bool = False,
    checkpoint_every: int = 100, report: Callable[[StepReport], None] = lambda _: None,
) -> int:  # fmt: skip
    """Train, or continue training, in the run folder `out`; returns the number of steps run now.

    The folder gets tokenizer.json, the token streams and data.json at the start, and checkpoint.pt as training goes.
    """
    corpora = load_corpora(sources, recipe)
    if not resume:
        refuse_run(out)
        out.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer([c.train for c in corpora.values()], recipe.model.vocab_size, recipe.seed)
        tokenizer.save(str(out / TOKENIZER_FILE))
        write_streams(corpora, tokenizer, out, recipe.seed)
    streams = {kind: load_stream(out, kind) for kind in corpora}
    recipe = recipe.for_epoch(sum(map(len, streams.values())) / recipe.batch_tokens)
    torch.manual_seed(recipe.seed)
    objective = VerifierObjective(recipe)
    plan = BatchPlan(streams, recipe.weights, recipe.seed, objective.lookahead)
    identity = data_digest(corpora)
    return train(
        objective, plan, recipe, out, identity=identity, resume=resume, checkpoint_every=checkpoint_every, report=report
    )


def write_streams(corpora: Mapping[str, Corpus], tokenizer: Tokenizer, out: Path, seed: int) -> None:
    """Write the token stream of each kind's training side, and the split's names."""
    facts = {}
    for kind, corpus in corpora.items():
        stream = token_stream(tokenizer, corpus.train, seed, EOS_ID, np.uint16)
        np.save(out / f"{kind}.npy", stream)
        facts[kind] = facts_of(corpus, len(stream))
    (out / DATA).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_stream(run: Path, kind: str) -> NDArray[np.uint16]:
    """Return a kind's token stream of a run."""
    stream: NDArray[np.uint16] = np.load(run / f"{kind}.npy")
    return stream


def load_run(run: Path) -> tuple[VerifierObjective, VerifierRecipe]:
    """Return the trained modules of a run folder, and their recipe."""
    state = load_checkpoint(run)
    recipe = VerifierRecipe.from_dict(state["recipe"], str(run))
    objective = VerifierObjective(recipe)
    objective.prepare(int(state["step"]) - 1, recipe.steps)
    objective.load_state_dict(state["objective"])
    return objective.eval(), recipe


def publish(run: Path, out: Path) -> None:
    """Write a run's verifier, module and tokenizer (bf16) as a Hugging Face checkpoint.

    The module has a separate file, since a loader of the verifier would report its tensors as surplus. `redraft_mtp`
    in config.json names the file.
    """
    objective, recipe = load_run(run)
    objective.prepare(recipe.steps, recipe.steps)  # publish the full depth even if the run has not grown yet
    out.mkdir(parents=True, exist_ok=True)
    save_verifier(objective.model, out, {MTP_KEY: {"file": MTP_FILE, "depth": 1}})
    tensors = {name: t.detach().to(torch.bfloat16).contiguous() for name, t in objective.mtp.state_dict().items()}
    save_file(tensors, str(out / MTP_FILE), metadata={"format": "pt"})
    save_tokenizer(Tokenizer.from_file(str(run / TOKENIZER_FILE)), out, recipe.model.max_positions)


def save_verifier(model: LlamaForCausalLM, out: Path, more: Mapping[str, Any]) -> None:
    """Write the model in bf16, which the argument becomes. more: values of its config.json."""
    model = model.bfloat16()
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.do_sample = False
    model.save_pretrained(str(out))
    change_json(out / "config.json", more, without=MTP_KEY)
