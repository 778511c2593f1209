"""Publish a run folder as a Hugging Face checkpoint with prompts and held-out text.

The verifier's file loads anywhere. The MTP module has a separate file, `mtp.safetensors`, since a loader of the
verifier would report its tensors as surplus. `redraft_mtp` in config.json names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from experiments.tiny.heldout import write_held_out, write_prompts
from experiments.tiny.objective import VerifierObjective
from experiments.tiny.recipe import VerifierRecipe
from experiments.tiny.tokenizer import EOS_ID, save_tokenizer
from redraft.names import TOKENIZER_FILE
from redraft.train.data import Corpus
from redraft.train.loop import load_checkpoint
from redraft.train.mtp import MTP_FILE, MTP_KEY


def load_run(run: Path) -> tuple[VerifierObjective, VerifierRecipe, int]:
    """Return the trained modules of a run folder, their recipe and their step."""
    state = load_checkpoint(run)
    recipe = VerifierRecipe.from_dict(state["recipe"], str(run))
    objective = VerifierObjective(recipe)
    step = int(state["step"])
    objective.prepare(step - 1)
    objective.load_state_dict(state["objective"])
    return objective.eval(), recipe, step


def publish(run: Path, out: Path, corpora: Mapping[str, Corpus]) -> None:
    """Write the checkpoint folder `out` (bf16), with prompts and text from the held-out documents of `corpora`."""
    objective, recipe, _ = load_run(run)
    objective.prepare(recipe.steps)  # publish the full depth even if the run has not grown yet
    out.mkdir(parents=True, exist_ok=True)
    _save_model(objective, out)
    tokenizer = Tokenizer.from_file(str(run / TOKENIZER_FILE))
    save_tokenizer(tokenizer, out, recipe.model.max_positions)
    for corpus in corpora.values():
        write_prompts(corpus, tokenizer, out / "prompts" / f"{corpus.kind}.jsonl")
        write_held_out(corpus, out / "heldout" / f"{corpus.kind}.txt")


def save_verifier(model: LlamaForCausalLM, out: Path) -> None:
    """Write the model in bf16, which the argument becomes."""
    model = model.bfloat16()
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.do_sample = False
    model.save_pretrained(str(out))
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors makes the files readable for their owner only


def _save_model(objective: VerifierObjective, out: Path) -> None:
    save_verifier(objective.model, out)
    tensors = {name: t.detach().to(torch.bfloat16).contiguous() for name, t in objective.mtp.state_dict().items()}
    save_file(tensors, str(out / MTP_FILE), metadata={"format": "pt"})
    (out / MTP_FILE).chmod(0o644)  # as the verifier's file
    config_path = out / "config.json"
    config: dict[str, Any] = json.loads(config_path.read_text(encoding="utf-8"))
    config[MTP_KEY] = {"file": MTP_FILE, "depth": 1}
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
