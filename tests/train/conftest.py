"""What tests of training share: a corpus of every kind, a tiny verifier, and runs that take a second."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from redraft.train.progress import ProgressReport

from .small_verifier import ModelConfig, VerifierRecipe, publish, train_verifier

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
def recipe() -> VerifierRecipe:
    model = ModelConfig(
        vocab_size=400, hidden_size=32, layers=4, intermediate_size=64, heads=2, kv_heads=1, head_dim=16,
        max_positions=64,
    )  # fmt: skip
    return VerifierRecipe(
        model=model, weights={"code": 0.5, "word_problems": 0.25, "prose": 0.25}, steps=12, batch_tokens=128,
        seq_len=16, decay_seq_len=32, start_layers=2, grow_step=4, warmup_steps=2, held_out_every=3,
    )  # fmt: skip


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


@pytest.fixture(scope="session")
def run(recipe: VerifierRecipe, sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder."""
    out = tmp_path_factory.mktemp("run")
    train_verifier(sources, out, recipe)
    return out


@pytest.fixture(scope="session")
def verifier_folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, published: what drafters are trained for."""
    out = tmp_path_factory.mktemp("verifier")
    publish(run, out)
    return out


def altered(folder: Path, to: Path) -> Path:
    """Return a copy of a verifier with other weights."""
    shutil.copytree(folder, to)
    tensors = load_file(str(to / "model.safetensors"))
    save_file({name: t + 1 for name, t in tensors.items()}, str(to / "model.safetensors"), metadata={"format": "pt"})
    return to
