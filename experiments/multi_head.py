"""Train the embedded model's variant with Meta's independent heads, publish it, and measure it.

    python -m experiments.multi_head train --out RUN --data code=stdlib \\
        --data word_problems=gsm8k_train.jsonl --data prose=books.txt
    python -m experiments.multi_head publish RUN --out VERIFIER
    python -m experiments.multi_head evaluate VERIFIER --start assets/tiny

Each prints one JSON object; the progress of training goes to the error stream. The variant begins with the weights of
`assets/tiny`, and trains verifier and heads jointly. Its loss is the mean over heads of their cross-entropy (Gloeckle
et al. 2024, section 2):

    L = 1/n Σ_i CE(M N(Layer_i(z_1 … z_t)), x_{t+i})        z = trunk(x), i from 1 to n

Layer_1 is the verifier's last layer, and the others are the drafter's. The paper has the sum (equation 2). It has the
same minimum, and neither Muon nor Adam sees a constant factor.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from tests.train.small_verifier import by_kind, load_stream, save_verifier, write_streams
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from experiments.tiny.__main__ import add_training_options
from experiments.tiny.evaluate import bits_per_byte
from redraft.bench.command import run
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.layer import renamed
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter, configuration_of
from redraft.methods.multi_head import METHOD
from redraft.names import TOKENIZER_FILE
from redraft.train.acceptance import acceptance_of, rank_accuracies
from redraft.train.batches import Batch, BatchPlan
from redraft.train.config import Recipe
from redraft.train.data import SEPARATOR, data_digest, load_corpora, parse_sources
from redraft.train.distillation import ChainAttention
from redraft.train.loop import load_checkpoint, refuse_run, train
from redraft.train.objectives.multi_head import MultiHeadObjective
from redraft.train.progress import ProgressReport
from redraft.train.verifier_model import VerifierModel, open_verifier

TINY = Path(__file__).parents[1] / "assets" / "tiny"
CONFIG = Path(__file__).with_suffix(".toml")
"""The recipe that the variant was trained with."""
PROMPT_TOKENS, NEW_TOKENS, ROWS = 32, 160, 24
"""Tokens of held-out text before a greedy text, tokens of that at most, and texts of a kind."""
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSES.md", "heldout", "prompts")
"""The parts that the variant has from its first verifier."""


@dataclass(frozen=True)
class VariantRecipe(Recipe):
    """A variant's run.   draft_heads: without the verifier's own; the paper's n is one more."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"code": 0.45, "word_problems": 0.2, "prose": 0.35})
    draft_heads: int = 3


class JointObjective(nn.Module):
    """A Llama verifier with heads on its trunk. All of them share its final norm and its head."""

    def __init__(self, start: Path, recipe: VariantRecipe) -> None:
        """Begin with the verifier in the folder `start`, and with its last layer for each head."""
        super().__init__()
        self.model = LlamaForCausalLM.from_pretrained(str(start), dtype=torch.float32)
        config = configuration_of(self.model.config, self.model.config.vocab_size, draft_heads=recipe.draft_heads)
        self.drafter = MultiHeadDrafter(config)
        self.lookahead = 1 + recipe.draft_heads  # tokens that a row needs after its inputs, one for each head
        last = {renamed(name): tensor for name, tensor in self.model.model.layers[-1].state_dict().items()}
        for layer in self.drafter.layers:
            layer.load_state_dict(last)
        self.drafter.norm = self.model.model.norm  # type: ignore[assignment]

    def prepare(self, step: int, steps: int) -> bool:
        """Return False: the parameters never change."""
        return False

    def states(self, trunk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the states [B, T, n] of every head, the verifier's own first, after the final norm."""
        yield self.model.model.norm(self._layer(len(self.model.model.layers) - 1, trunk))
        places = torch.arange(trunk.shape[1])
        for head in range(self.drafter.config.draft_heads):
            yield self.drafter.head(head, trunk, places, ChainAttention(self.drafter.config, places[None]))

    def head_losses(self, trunk: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the mean loss [B] of every head in nats a token, for tokens i64[B, T + lookahead]."""
        rows = trunk.shape[1]
        for head, hidden in enumerate(self.states(trunk), 1):
            logits = self.model.lm_head(hidden).float()  # [B, T, V]
            targets = tokens[:, head : head + rows]
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            yield losses.view(targets.shape).mean(dim=1)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the mean over heads, and metrics in nats a token: by kind for the next token, and by head.

        With gradients, each head's backward pass runs here before the next head's forward pass, so the logits of one
        head exist at a time (section 2, figure 2). The loss has the gradient that is left: the trunk's.
        """
        trunk = self.model.model.embed_tokens(batch.tokens[:, : -self.lookahead])
        for number in range(len(self.model.model.layers) - 1):
            trunk = self._layer(number, trunk)
        cut = trunk.detach().requires_grad_(trunk.requires_grad)
        found: list[torch.Tensor] = []
        for losses in self.head_losses(cut, batch.tokens):
            if losses.requires_grad:
                torch.autograd.backward(losses.mean() / self.lookahead)
            found.append(losses.detach())
        total = torch.stack(found).mean()
        if cut.grad is not None:
            left = (trunk * cut.grad).sum()
            total = total + left - left.detach()
        heads = {f"head {n}": one.mean().item() for n, one in enumerate(found[1:], 1)}
        return total, {**by_kind(batch.kinds, found[0]), **heads}

    def _layer(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        body, places = self.model.model, torch.arange(hidden.shape[1])[None]
        rotary = body.rotary_emb(hidden, places)
        out: torch.Tensor = body.layers[number](
            hidden, attention_mask=None, position_ids=places, position_embeddings=rotary
        )
        return out


def train_variant(options: argparse.Namespace) -> dict[str, Any]:
    """Train, or continue training, in the run folder `options.out`, from the verifier `options.start`."""
    recipe = VariantRecipe.load(str(options.config)).with_options(options.steps, options.seed)
    corpora, out = load_corpora(parse_sources(options.data), recipe), options.out
    if not options.resume:
        refuse_run(out)
        out.mkdir(parents=True, exist_ok=True)
        write_streams(corpora, Tokenizer.from_file(str(options.start / TOKENIZER_FILE)), out, recipe.seed)
    streams = {kind: load_stream(out, kind) for kind in corpora}
    torch.manual_seed(recipe.seed)
    objective = JointObjective(options.start, recipe)
    plan = BatchPlan(streams, recipe.weights, recipe.seed, objective.lookahead)
    with ProgressReport(Console(stderr=True)) as report:
        steps = train(
            objective, plan, recipe, out, identity=data_digest(corpora), resume=options.resume, checkpoint_every=25,
            report=report,
        )  # fmt: skip
    return {"out": str(out), "steps_run": steps}


def publish(folder: Path, start: Path, out: Path) -> dict[str, Any]:
    """Write the verifier (bf16) in `out`, with the tokenizer, prompts and held-out text of `start`, and its heads.

    Heads have matrices in 8 bits. The accuracies for their tree are measured on greedy texts of the new verifier that
    begin with held-out text.
    """
    state = load_checkpoint(folder)
    recipe = VariantRecipe.from_dict(state["recipe"], str(folder))
    objective = JointObjective(start, recipe)
    objective.load_state_dict(state["objective"])
    trained = objective.drafter.state_dict()
    out.mkdir(parents=True, exist_ok=True)
    for source in (start / name for name in COPIED if (start / name).exists()):
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, out / source.name)
    save_verifier(objective.model, out, {})

    verifier = open_verifier(out, "cpu")
    measured = MultiHeadObjective(verifier.model, objective.drafter.config)
    layers = {name: tensor for name, tensor in trained.items() if name.startswith("layers.")}
    measured.drafter.load_state_dict({**measured.drafter.state_dict(), **layers})  # the norm is the published one
    texts = greedy_texts(verifier, out / "heldout", measured.lookahead)
    shares = rank_accuracies(measured, [batch for batches in texts.values() for batch in batches])
    config = replace(objective.drafter.config, rank_accuracies=tuple(map(tuple, shares)))
    counts = sum(np.bincount(load_stream(folder, kind), minlength=config.vocab_size) for kind in recipe.weights)
    training = {"recipe": recipe.to_dict(), "step": int(state["step"]), "joint": True}
    identity, heads = Identity.of(Checkpoint.open(out)), out / METHOD.id
    save_drafter(
        heads, METHOD.id, config, identity, measured.drafter, torch.as_tensor(counts), training, storage="int8"
    )
    return {"verifier": str(out), "heads": str(heads), **evaluate(out, start)}


def evaluate(folder: Path, start: Path | None = None) -> dict[str, Any]:
    """Measure a published variant on the CPU in fp32.

    Of each kind: bits per byte of held-out text, and `before` those of the verifier `start`. By head: `right`, the
    share of the verifier's greedy tokens that are its likeliest one, and `accepted`, that after right drafts.
    """
    verifier = open_verifier(folder, "cpu")
    checkpoint = DrafterCheckpoint.open(folder / METHOD.id)
    config = checkpoint.configure(MultiHeadConfig)
    checkpoint.check_verifier(config, verifier.hidden_size, verifier.vocab_size, verifier.identity)
    objective = MultiHeadObjective(verifier.model, config)
    checkpoint.load(objective.drafter)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    before = None if start is None else AutoModelForCausalLM.from_pretrained(str(start), dtype=torch.float32)
    kinds = {}
    for kind, batches in greedy_texts(verifier, folder / "heldout", objective.lookahead).items():
        text = (folder / "heldout" / f"{kind}.txt").read_text(encoding="utf-8")
        kinds[kind] = {
            "bits_per_byte": bits_per_byte(verifier.model, tokenizer, text)[0],
            "before": None if before is None else bits_per_byte(before, tokenizer, text)[0],
            "right": [shares[0] for shares in rank_accuracies(objective, batches)],
            "accepted": acceptance_of(objective, batches).top,
        }
    parameters = sum(p.numel() for p in objective.drafter.layers.parameters())
    return {"parameters": verifier.model.num_parameters(), "head_parameters": parameters, "kinds": kinds}


@torch.inference_mode()
def greedy_texts(verifier: VerifierModel, held_out: Path, lookahead: int) -> dict[str, list[Batch]]:
    """Return greedy texts of the verifier by kind, which begin with held-out text; drafts start after that."""
    found, most = {}, verifier.max_positions or NEW_TOKENS + PROMPT_TOKENS
    for path in sorted(held_out.glob("*.txt")):
        documents = path.read_text(encoding="utf-8").split(f"\n{SEPARATOR}\n")
        prompts = [
            encoding.ids[start : start + PROMPT_TOKENS]
            for encoding in verifier.tokenizer.encode_batch(documents)
            for start in range(0, len(encoding.ids) - PROMPT_TOKENS + 1, PROMPT_TOKENS)
        ]
        chosen = torch.tensor(prompts[:: -(-len(prompts) // ROWS)])
        new_tokens = min(NEW_TOKENS, most - PROMPT_TOKENS)
        texts = verifier.model.generate(chosen, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
        found[path.stem] = [
            Batch.whole(rows, (path.stem,) * len(rows), lookahead, PROMPT_TOKENS - 1) for rows in texts.split(8)
        ]
    return found


def main() -> dict[str, Any]:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    training = commands.add_parser("train", help="train a verifier jointly with heads on its trunk")
    add_training_options(training, CONFIG)
    publishing = commands.add_parser("publish", help="write a run's verifier and heads, and measure them")
    publishing.add_argument("folder", metavar="RUN", type=Path, help="run folder of `train`")
    publishing.add_argument("--out", type=Path, required=True, help="folder to write")
    for command in (training, publishing):
        command.add_argument("--start", type=Path, default=TINY, help="the verifier to begin with; assets/tiny")
    measuring = commands.add_parser("evaluate", help="print bits per byte and how often each head is right")
    measuring.add_argument("folder", type=Path, help="a published variant")
    measuring.add_argument("--start", type=Path, help="also measure the bits per byte of this verifier")
    options = parser.parse_args()
    if options.command == "train":
        return train_variant(options)
    if options.command == "publish":
        return publish(options.folder, options.start, options.out)
    return evaluate(options.folder, options.start)


if __name__ == "__main__":
    run(main)
