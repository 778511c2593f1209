"""A tiny checkpoint with random weights, for tests of whole builds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

Redraft = Callable[..., subprocess.CompletedProcess[str]]
"""Runs the command line with these arguments."""
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", " ", ".", ","]
CONTEXT = 64


def write_tokenizer(folder: Path, bos: bool = True, words: Sequence[str] = WORDS) -> None:
    """A tokenizer of single characters, with a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>" if bos else None, "eos_token": "</s>"}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}."
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


def write_checkpoint(folder: Path, bos: bool = True, shards: str = "20KB") -> Path:
    """A Llama of two layers with random weights, in several shards."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shards)
    write_tokenizer(folder, bos)
    return folder
