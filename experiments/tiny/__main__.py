"""Train the embedded verifier with its multi-token-prediction module, publish it, and measure it.

    python -m experiments.tiny train --out RUN --data code=stdlib \\
        --data word_problems=gsm8k_train.jsonl --data prose=books.txt
    python -m experiments.tiny publish RUN --out assets/tiny
    python -m experiments.tiny evaluate assets/tiny

Each prints one JSON object; the progress of training goes to the error stream. `evaluate` reprints the figures of the
model card from the published folder alone; `publish` also writes them to evaluation.json. It leaves `prompts/` and
`heldout/` as they are: a hash of a document's name decides if it is held out, so a new run learns none of theirs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.train.small_verifier import VerifierRecipe, publish, train_verifier

from experiments.tiny.evaluate import evaluate
from redraft.bench.command import run
from redraft.train.data import parse_sources
from redraft.train.progress import ProgressReport

CONFIG = Path(__file__).parent / "tiny.toml"
"""The recipe that the embedded verifier was trained with."""


def main() -> dict[str, Any]:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    training = commands.add_parser("train", help="train a small Llama with its multi-token-prediction module")
    add_training_options(training, CONFIG)
    publishing = commands.add_parser("publish", help="write a run's checkpoint and its figures")
    publishing.add_argument("folder", metavar="RUN", type=Path, help="run folder of `train`")
    publishing.add_argument("--out", type=Path, required=True, help="folder with `prompts` and `heldout`")
    measuring = commands.add_parser("evaluate", help="print the figures of the model card")
    measuring.add_argument("folder", type=Path, help="a published verifier")
    options = parser.parse_args()
    if options.command == "evaluate":
        return evaluate(options.folder)
    if options.command == "train":
        recipe = VerifierRecipe.load(str(options.config)).with_options(options.steps, options.seed)
        with ProgressReport(Console(stderr=True)) as report:
            steps = train_verifier(
                parse_sources(options.data), options.out, recipe, resume=options.resume, report=report
            )
        return {"out": str(options.out), "steps_run": steps}
    publish(options.folder, options.out)
    figures = evaluate(options.out)
    (options.out / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def add_training_options(parser: argparse.ArgumentParser, config: Path) -> None:
    """Add the options of a run of training, which begins with a recipe."""
    parser.add_argument("--data", action="append", required=True, help="KIND=SOURCE, once for each kind")
    parser.add_argument("--out", type=Path, required=True, help="run folder: token streams, checkpoint")
    parser.add_argument("--config", type=Path, default=config, help="a .toml recipe; the embedded model's by default")
    parser.add_argument("--steps", type=int, help="steps of the whole run, instead of the recipe's")
    parser.add_argument("--seed", type=int, help="instead of the recipe's")
    parser.add_argument("--resume", action="store_true", help="continue from the folder's checkpoint")


if __name__ == "__main__":
    run(main)
