"""Small vocabularies in each format of checkpoints, trained on a text of a few lines."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TEXT = """The tree is drafted, then verified in one call. The hidden states of the last layer are kept for the drafter.
def step(self, batch):
    plans, trees = self.propose(batch)  # looked up, resampled, drafted
    return [seq.commit(tree, outcome) for seq, tree, outcome in zip(batch, trees, outcomes)]
Naïve café, Größe 123, 45.6 and <b>bold</b>; "quotes" aren't rare. What follows is what was said, word for word.
"""
SAMPLES = [
    "The tree is verified", "  two  spaces", "naïve 日本語 🙂", "def f(x):\n    return 123\n", "\ttab  ", " x",
    "<|user|>hi</s> <s>a<|eot|> b", "drafted, then a longer text of more than eight tokens",
]  # fmt: skip
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<unk>",
}  # fmt: skip

Files = Mapping[str, str | bytes | Mapping[str, Any]]


def write_folder(folder: Path, files: Files, model_type: str = "llama", **settings: Any) -> Path:
    """A checkpoint's folder without weights: files by name, a configuration, and settings of the tokenizer if any."""
    folder.mkdir(parents=True, exist_ok=True)
    every: dict[str, Any] = {"config.json": {"model_type": model_type}, **files}
    if settings:
        every["tokenizer_config.json"] = settings
    for name, content in every.items():
        (folder / name).parent.mkdir(exist_ok=True)
        data = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


@cache
def sentencepiece_model(kind: str = "bpe") -> bytes:
    """A sentencepiece model with byte fallback, like Llama's."""
    import sentencepiece

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=trained, vocab_size=380, model_type=kind,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        user_defined_symbols=["<|user|>"], num_threads=1, hard_vocab_limit=False,
    )  # fmt: skip
    return trained.getvalue()


@cache
def byte_level() -> dict[str, Any]:
    """A `tokenizer.json` of byte-level BPE, like GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def vocabulary_and_merges() -> dict[str, str | Mapping[str, Any]]:
    """The same tokenizer as `vocab.json` and `merges.txt`."""
    model = byte_level()["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    return {"vocab.json": model["vocab"], "merges.txt": "\n".join(["#version: 0.2", *merges, ""])}


def _ranks() -> dict[bytes, int]:
    words = [bytes([value]) for value in range(256)]
    return {word: rank for rank, word in enumerate([*words, b"th", b"the", b" t", b"re", b"er", b"tr", b"tree"])}


def tiktoken_vocabulary() -> str:
    """Lines with a word in base64 and its rank."""
    return "".join(f"{base64.b64encode(word).decode()} {rank}\n" for word, rank in _ranks().items())


def tekken() -> dict[str, Any]:
    """A `tekken.json`, like Mistral's."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    sizes = {"num_vocab_tokens": 269, "default_vocab_size": 269, "default_num_special_tokens": len(special)}
    return {
        "config": {"pattern": pattern, "version": "v3", **sizes},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for word, rank in _ranks().items()
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)
        ],
    }


def metaspace(folder: Path) -> dict[str, Any]:
    """A `tokenizer.json` like Llama 2's, with a BOS token in front of every text."""
    from transformers import AutoTokenizer

    settings = dict(tokenizer_class="LlamaTokenizer", add_bos_token=True, **NAMES)
    source = write_folder(folder, {"tokenizer.model": sentencepiece_model()}, **settings)
    found: dict[str, Any] = json.loads(AutoTokenizer.from_pretrained(source).backend_tokenizer.to_str())
    return found
