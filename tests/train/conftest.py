"""What tests of training share: a corpus of every kind, a tiny verifier, and runs that take a second."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from redraft.train.mtp import MTP_FILE, MTP_KEY, MtpModule
from redraft.train.progress import ProgressReport

TEXT = "the cat sat on a mat and saw two dogs run over old green hills by the sea while rain fell"
SELF_TEXT = "[self_text]\nrows = 4\nprompt_tokens = 6\nnew_tokens = 20\nheld_out_rows = 2\n"
SMALL = "batch_tokens = 64\nseq_len = 16\ndecay_seq_len = 16\nheld_out_every = 3\n"
"""A recipe's numbers for rows that fit the tiny verifier."""


class Killed(Exception):
    """Simulates the end of the process."""


class KillAfter(ProgressReport):
    """Ends the run after a step or a text. `losses` has the metrics of every step."""

    def __init__(self, step=None, text=None):
        super().__init__(Console(quiet=True))
        self.step, self.text, self.written, self.losses = step, text, [], {}

    def __call__(self, report):
        self.losses[report.step] = report.metrics
        if report.step == self.step:
            raise Killed

    def writing(self, name, done, rows):
        self.written.append(name)
        if name == self.text:
            raise Killed


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A text file for code (books in form), word problems, and prose."""
    folder = tmp_path_factory.mktemp("corpora")
    rng, words = random.Random(0), TEXT.split()

    def sentence() -> str:
        return " ".join(rng.choices(words, k=12)).capitalize() + "."

    def book(title: str) -> str:
        paragraphs = [" ".join(sentence() for _ in range(4)) for _ in range(90)]
        return f"# Title: {title}\n\n## Author: Nobody\n\n" + "\n\n".join(paragraphs)

    for kind in ("code", "prose"):
        text = "\n<|endoftext|>\n".join(book(f"{kind} {i}") for i in range(12))
        (folder / f"{kind}.txt").write_text(text, encoding="utf-8")
    items = [
        {
            "question": f"{sentence()} {sentence()} How many are {i} and {i}?",
            "answer": f"{i}+{i} = <<{i}+{i}={2 * i}>>{2 * i}",
        }
        for i in range(400)
    ]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    return {
        "code": str(folder / "code.txt"),
        "word_problems": str(folder / "problems.jsonl"),
        "prose": str(folder / "prose.txt"),
    }


@pytest.fixture(scope="session")
def prose(sources: dict[str, str]) -> dict[str, str]:
    return {"prose": sources["prose"]}


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a tokenizer of 400 tokens that begins texts with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    return tokenizer


def make_model(config: LlamaConfig, tokens: torch.Tensor) -> LlamaForCausalLM:
    """Return a model after some steps of training."""
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(20):
        starts = torch.randint(len(tokens) - 32, (8,)).tolist()
        rows = torch.stack([tokens[start : start + 32] for start in starts])
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="session")
def verifier_folder(sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The verifier of drafters: a small model with a random MTP module."""
    out = tmp_path_factory.mktemp("verifier")
    texts = [Path(source).read_text(encoding="utf-8")[:20000] for source in sources.values()]
    tokenizer = make_tokenizer(texts)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(str(out))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=1, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = make_model(config, torch.tensor([token for text in texts for token in tokenizer.encode(text).ids]))
    setattr(model.config, MTP_KEY, {"file": MTP_FILE, "depth": 1})
    model.save_pretrained(str(out))
    save_file(MtpModule(config).state_dict(), str(out / MTP_FILE), metadata={"format": "pt"})
    return out


def altered(folder: Path, to: Path) -> Path:
    """Return a copy of a verifier with other weights."""
    shutil.copytree(folder, to)
    tensors = load_file(str(to / "model.safetensors"))
    save_file({name: t + 1 for name, t in tensors.items()}, str(to / "model.safetensors"), metadata={"format": "pt"})
    return to
