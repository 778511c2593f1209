"""What tests of training share: a corpus of every kind, a tiny verifier, and runs that take a second."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from redraft.train.drafter_config import SelfText
from redraft.train.drafter_run import train_drafter
from redraft.train.objectives import find_training
from redraft.train.objectives.lyanna import LyannaTable
from redraft.train.progress import ProgressReport
from redraft.train.publish import publish_drafter
from redraft.train.verifier_model import VerifierModel, open_verifier
from tests.conftest import Once

from .small_verifier import ModelConfig, VerifierRecipe, publish, train_verifier

TEXT = "the cat sat on a mat and saw two dogs run over old green hills by the sea while rain fell"


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
def trained(once: Once, recipe: VerifierRecipe) -> Path:
    """A folder with corpora, the run of a verifier, and the published verifier."""
    return once(_train, recipe)


def _train(folder: Path, recipe: VerifierRecipe) -> None:
    (folder / "corpora").mkdir()
    _write_corpora(folder / "corpora")
    train_verifier(_sources(folder), folder / "run", recipe)
    publish(folder / "run", folder / "verifier")


def _sources(trained: Path) -> dict[str, str]:
    files = {"code": "code.txt", "word_problems": "problems.jsonl", "prose": "prose.txt"}
    return {kind: str(trained / "corpora" / name) for kind, name in files.items()}


def _write_corpora(folder: Path) -> None:
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


@pytest.fixture(scope="session")
def sources(trained: Path) -> dict[str, str]:
    """A text file for code (books in form), word problems, and prose."""
    return _sources(trained)


@pytest.fixture(scope="session")
def prose(sources: dict[str, str]) -> dict[str, str]:
    return {"prose": sources["prose"]}


@pytest.fixture(scope="session")
def run(trained: Path) -> Path:
    """A finished run folder of the verifier, for reading only."""
    return trained / "run"


@pytest.fixture(scope="session")
def verifier_folder(trained: Path) -> Path:
    """The run, published: what drafters are trained for. For reading only."""
    return trained / "verifier"


@pytest.fixture(scope="session")
def verifier(verifier_folder: Path) -> VerifierModel:
    return open_verifier(verifier_folder, "cpu")


LYANNA = find_training("lyanna").recipe(
    steps=8, batch_tokens=128, seq_len=16, decay_seq_len=16, warmup_steps=2, held_out_every=3, evaluate_every=3,
    drafter=LyannaTable(rank=4, chain=3, init="mtp"),
    self_text=SelfText(rows=12, prompt_tokens=6, new_tokens=20, held_out_rows=3),
)  # fmt: skip
"""The recipe of `lyanna_run`."""


@pytest.fixture(scope="session")
def lyanna_run(once: Once, trained: Path) -> Path:
    """A folder with a finished `run` of a drafter of two kinds of documents, `published`, and every step's metrics.

    For reading only.
    """
    return once(_train_lyanna, trained)


def _train_lyanna(folder: Path, trained: Path) -> None:
    sources, report = _sources(trained), KillAfter()
    two = {kind: sources[kind] for kind in ("code", "prose")}
    train_drafter("lyanna", trained / "verifier", two, folder / "run", LYANNA, checkpoint_every=4, report=report)
    publish_drafter(folder / "run", folder / "published")
    (folder / "losses.json").write_text(json.dumps(report.losses))


def altered(folder: Path, to: Path) -> Path:
    """Return a copy of a verifier with other weights."""
    shutil.copytree(folder, to)
    tensors = load_file(str(to / "model.safetensors"))
    save_file({name: t + 1 for name, t in tensors.items()}, str(to / "model.safetensors"), metadata={"format": "pt"})
    return to
