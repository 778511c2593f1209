"""Train the embedded model's variant with Meta's independent heads, publish it, and measure it.

    python -m experiments.multi_head train --out RUN --data code=stdlib \\
        --data word_problems=gsm8k_train.jsonl --data prose=books.txt
    python -m experiments.multi_head publish RUN --out VERIFIER
    python -m experiments.multi_head evaluate VERIFIER --start assets/tiny

Each prints one JSON object; the progress of training goes to the error stream. The variant begins with the weights of
`assets/tiny`, and trains verifier and heads jointly. `redraft build VERIFIER --drafter VERIFIER/multi_head` builds it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.multi_head.evaluate import evaluate
from experiments.multi_head.publish import publish
from experiments.multi_head.recipe import DEFAULT, VariantRecipe
from experiments.multi_head.run import train_variant
from redraft.bench.command import run
from redraft.train.data import parse_sources
from redraft.train.loop import load_checkpoint
from redraft.train.progress import ProgressReport

TINY = Path(__file__).parents[2] / "assets" / "tiny"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the command."""
    options = parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    found: dict[str, Any] = options.work(options)
    return found


def _train(options: argparse.Namespace) -> dict[str, Any]:
    recipe = VariantRecipe.load(str(options.config)).with_options(options.steps, options.seed)
    with ProgressReport(Console(stderr=True)) as report:
        ran = train_variant(
            parse_sources(options.data),
            options.start,
            options.out,
            recipe,
            resume=options.resume,
            checkpoint_every=options.checkpoint_every,
            report=report,
        )
    return {"out": str(options.out), "steps": int(load_checkpoint(options.out)["step"]), "steps_run": ran}


def _publish(options: argparse.Namespace) -> dict[str, Any]:
    heads = publish(options.run, options.start, options.out)
    return {"verifier": str(options.out), "heads": str(heads), **evaluate(options.out, options.start).to_dict()}


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    return evaluate(options.folder, options.start).to_dict()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the three commands."""
    found = argparse.ArgumentParser(
        prog="python -m experiments.multi_head",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--threads", type=int, help="CPU threads of torch")
    commands = found.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a verifier jointly with heads on its trunk")
    train.set_defaults(work=_train)
    text = "KIND=SOURCE, once for each kind: stdlib, a .jsonl or a text file"
    train.add_argument("--data", action="append", required=True, help=text)
    train.add_argument("--out", type=Path, required=True, help="run folder: token streams, checkpoint")
    train.add_argument("--config", type=Path, default=DEFAULT, help="a .toml recipe; the variant's by default")
    train.add_argument("--steps", type=int, help="steps of the whole run, instead of the recipe's")
    train.add_argument("--seed", type=int, help="instead of the recipe's")
    train.add_argument("--resume", action="store_true", help="continue from the folder's checkpoint")
    train.add_argument("--checkpoint-every", type=int, default=25, help="steps between checkpoints")
    publishing = commands.add_parser("publish", help="write a run's verifier and heads, and measure them")
    publishing.set_defaults(work=_publish)
    publishing.add_argument("run", type=Path, help="run folder of `train`")
    publishing.add_argument("--out", type=Path, required=True, help="folder to write")
    for command in (train, publishing):
        command.add_argument("--start", type=Path, default=TINY, help="the verifier to begin with; assets/tiny")
    measuring = commands.add_parser("evaluate", help="print bits per byte and how often each head is right")
    measuring.set_defaults(work=_evaluate)
    measuring.add_argument("folder", type=Path, help="a published variant")
    measuring.add_argument("--start", type=Path, help="also measure the bits per byte of this verifier")
    return found


if __name__ == "__main__":
    run(main)
