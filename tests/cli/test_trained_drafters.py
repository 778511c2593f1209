"""Drafters by the command line: trained, published, built and used; and drafters that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.conftest import Refused, Run

from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams

SCHEDULE = """
steps = 3
batch_tokens = 64
seq_len = 16
decay_seq_len = 16
warmup_steps = 1
optimizer = "adam"
lr = 0.003
held_out_every = 3
evaluate_every = 3
"""
"""A training of three steps, for any method."""
SELF_TEXT = """
[self_text]
rows = 4
prompt_tokens = 4
new_tokens = 20
held_out_rows = 2
"""
STEERING = """
[drafter]
layers = [0, 1]
{loss}
[self_text]
rows = 4
prompt_tokens = 4
new_tokens = 20
held_out_rows = 2
greedy = 0.0
sampled = {sampled}
text = {text}
temperatures = [1.0]
"""
"""Text for steered training: of the verifier itself, or plain."""
BUILT = {
    "medusa": ("medusa", "draft_vocabulary=20,nodes=9,head_rank=8", "9 nodes, 20 of 32 tokens, head of rank 8"),
    "short": ("medusa", "steps=1,nodes=3", "static tree of 3 nodes"),
    "eagle": ("eagle", "precision=fp32", "4 steps, static trees 3 wide of 12 nodes"),
    "dspark": ("dspark", "draft_vocabulary=20,steps=2,head_rank=8", "6 nodes, 20 of 32 tokens, head of rank 8"),
    "steered": ("steered", "steps=4,head_rank=6", "2 layers, 4 steps, head of rank 6, steering by hidden states 1, 0"),
}
"""Drafters of one bundle by id: method, options and the end of the summary.

Heads alone, twice; a decoder layer that predicts features; a block that knows the token before; a decoder of its own.
"""


def train(method: str, verifier: Path, run: Run, folder: Path, recipe: str, *options: object) -> None:
    """Train a drafter for a few steps in `folder`/run and publish it as `folder`/drafter.

    recipe: what follows the schedule.   options: of the training.
    """
    folder.mkdir()
    (folder / "recipe.toml").write_text(f'method = "{method}"\n{SCHEDULE}{recipe}')
    text = folder / "text.txt"
    animals = ("cat", "dog", "fox", "hen", "pig", "rat") * 20
    text.write_text("\n<|endoftext|>\n".join(f"the {word} sat on a mat, and so did {word}." * 4 for word in animals))
    command = {"draft_model": "student"}.get(method, method)
    data = ("--verifier", verifier, "--data", f"prose={text}", "--config", folder / "recipe.toml", "--threads", "1")
    assert run("train", command, *data, "--out", folder / "run", *options)["steps_run"] == 3
    run("train", "publish", folder / "run", "--out", folder / "drafter")


@pytest.fixture(scope="module")
def trained(checkpoint: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a drafter of each method.

    The steered one begins with a student that was trained on plain text, which has no steering of its own.
    """
    folder = tmp_path_factory.mktemp("trained")
    for method in ("medusa", "eagle"):
        train(method, checkpoint, run, folder / method, SELF_TEXT)
    train("dspark", checkpoint, run, folder / "dspark", f"[drafter]\nsteps = 3\ntoken_rank = 8\n{SELF_TEXT}")
    plain = STEERING.format(loss="kl = 0.0\nhard = 1.0", sampled=0.0, text=1.0)
    train("draft_model", checkpoint, run, folder / "student", plain)
    steering, start = STEERING.format(loss="", sampled=1.0, text=0.0), ("--start", folder / "student" / "run")
    train("steered", checkpoint, run, folder / "steered", steering, *start)
    return folder


@pytest.fixture(scope="module")
def built(checkpoint: Path, trained: Path, run: Run) -> dict[str, Any]:
    """The build of one bundle with all drafters."""
    options: list[str] = []
    for drafter, (method, chosen, _) in BUILT.items():
        options += ["--drafter", f"{drafter}={trained / method / 'drafter'},{chosen}"]
    return run("build", checkpoint, "-o", trained / "engines", "--skip-check", "--eval-text", "none", *options)


def test_drafters_are_built_with_their_options(built: dict[str, Any]) -> None:
    """Two of one method have names and files of their own."""
    assert list(built["drafters"]) == list(BUILT)
    for found, (method, _, summary) in zip(built["drafters"].values(), BUILT.values(), strict=True):
        assert found["method"] == method
        assert summary in found["summary"]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_texts_are_the_verifiers(built: dict[str, Any], device: str | None) -> None:
    """Greedy and sampled, on the host and over step graphs."""
    budget = Budget(6, 3, 2)  # costs would decide how much is drafted
    methods = [*BUILT, "ngram+medusa", "ngram+steered"]
    with Runtime.open(built["bundle"], threads=1, device=device, verify=False) as runtime:
        ways = [SpeculationParams(method, budget=budget) for method in methods]
        for temperature in (0, 1):
            params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
            plain, *drafted = runtime.generate(["abc"] * (1 + len(ways)), params, [SpeculationParams("none"), *ways])
            assert {text.token_ids for text in drafted} == {plain.token_ids}
            for method, text in zip(methods, drafted, strict=True):
                assert text.metrics.num_draft_tokens > (20 if method in ("medusa", "eagle") else 0), method


def test_published_accuracies_are_those_of_the_last_evaluation(trained: Path) -> None:
    measured = json.loads((trained / "medusa" / "run" / "progress.jsonl").read_text().splitlines()[-1])
    config = json.loads((trained / "medusa" / "drafter" / "config.json").read_text())["config"]
    assert config["rank_accuracies"] == measured["rank_accuracies"]
    assert {len(shares) for shares in config["rank_accuracies"]} == {10}


@pytest.mark.parametrize(
    ("method", "options", "status", "message"),
    [
        ("medusa", "steps=5", 1, "has 4 heads, which draft no tree of 5 levels; build it with at most steps=4"),
        ("medusa", "width=11", 1, "has accuracies of 10 candidates of a head, not of 11; build it with at most width"),
        ("medusa", "width=3,draft_vocabulary=2", 2, "a node cannot have 3 children of 2 tokens; lower width, or"),
        ("medusa", "method=multi_head", 1, "is a drafter of medusa: "),
        ("student", "method=steered", 1, "is a drafter of draft_model: it has no steering; train it on with `redraft"),
    ],
)
def test_options_that_do_not_fit_a_drafter(
    checkpoint: Path, trained: Path, refused: Refused, method: str, options: str, status: int, message: str
) -> None:
    chosen = ("--drafter", f"{trained / method / 'drafter'},{options}")
    assert message in refused("build", checkpoint, "-o", trained / "out", *chosen, status=status)


def test_drafters_that_do_not_fit(checkpoint: Path, refused: Refused, tmp_path: Path) -> None:
    def line(drafter: str, status: int = 1) -> str:
        return refused("build", checkpoint, "-o", tmp_path / "out", "--drafter", drafter, status=status)

    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"block.weight": torch.ones(2)}, tmp_path / "unknown" / "model.safetensors")
    assert "unknown has an unknown layout: no known layout has block.weight; " in line(f"eagle3={tmp_path / 'unknown'}")
    assert "width must be a number from 1 to 10, not 11" in line("e=random,method=griffin,width=11", 2)
    assert "a tree of 10 levels of 10 nodes computes 90 rows" in line("e=random,method=hass,width=10,steps=10", 2)
    assert "nodes must be a positive number, not 0" in line("e=random,method=fspad,nodes=0", 2)


def test_a_draft_model_with_other_tokens(checkpoint: Path, refused: Refused, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "draft"))
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = values["model"]["vocab"]
    words["ä"] = words.pop("a")
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    line = refused("build", checkpoint, "-o", tmp_path / "out", "--drafter", f"d={folder}", status=1)
    assert "1 of 29 tokens differ, first token 3, 'ä' instead of 'a'" in line
