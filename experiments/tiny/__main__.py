"""Train the embedded verifier with its multi-token-prediction module, publish it, and measure it.

    python -m experiments.tiny train --out RUN --data code=stdlib \\
        --data word_problems=gsm8k_train.jsonl --data prose=books.txt
    python -m experiments.tiny publish RUN --data code=stdlib --data ... --out assets/tiny
    python -m experiments.tiny evaluate assets/tiny

Each prints one JSON object; the progress of training goes to the error stream. `evaluate` reprints the figures of the
model card from the published folder alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.tiny.card import write_card
from experiments.tiny.evaluate import evaluate
from experiments.tiny.publish import load_run, publish
from experiments.tiny.recipe import TINY, VerifierRecipe
from experiments.tiny.run import train_verifier
from redraft.bench.command import run
from redraft.train.data import data_facts, load_corpora, parse_sources
from redraft.train.loop import load_checkpoint
from redraft.train.progress import ProgressReport


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the command."""
    options = parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    found: dict[str, Any] = options.work(options)
    return found


def _train(options: argparse.Namespace) -> dict[str, Any]:
    recipe = VerifierRecipe.load(str(options.config)).with_options(options.steps, options.seed)
    with ProgressReport(Console(stderr=True)) as report:
        ran = train_verifier(
            parse_sources(options.data),
            options.out,
            recipe,
            device=options.device,
            compile_graph=options.compile,
            resume=options.resume,
            checkpoint_every=options.checkpoint_every,
            report=report,
        )
    return {"out": str(options.out), "steps": int(load_checkpoint(options.out)["step"]), "steps_run": ran}


def _publish(options: argparse.Namespace) -> dict[str, Any]:
    _, recipe, _ = load_run(options.run)
    publish(options.run, options.out, load_corpora(parse_sources(options.data), recipe))
    figures = evaluate(options.out)
    write_card(options.out, recipe, data_facts(options.run), figures)
    return figures.to_dict()


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    return evaluate(options.folder).to_dict()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the three commands."""
    found = argparse.ArgumentParser(
        prog="python -m experiments.tiny", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--threads", type=int, help="CPU threads of torch")
    commands = found.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a small Llama with its multi-token-prediction module")
    train.set_defaults(work=_train)
    _data(train)
    train.add_argument("--out", type=Path, required=True, help="run folder: tokenizer, token streams, checkpoint")
    train.add_argument("--config", type=Path, default=TINY, help="a .toml recipe; the embedded model's by default")
    train.add_argument("--steps", type=int, help="steps of the whole run, instead of the recipe's")
    train.add_argument("--seed", type=int, help="instead of the recipe's")
    train.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    train.add_argument("--compile", action="store_true", help="use torch.compile, which needs a C++ compiler")
    train.add_argument("--resume", action="store_true", help="continue from the folder's checkpoint")
    train.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    publishing = commands.add_parser("publish", help="write a run's checkpoint, prompts, held-out text and card")
    publishing.set_defaults(work=_publish)
    publishing.add_argument("run", type=Path, help="run folder of `train`")
    _data(publishing)
    publishing.add_argument("--out", type=Path, required=True, help="folder to write")
    measuring = commands.add_parser("evaluate", help="print the figures of the model card")
    measuring.set_defaults(work=_evaluate)
    measuring.add_argument("folder", type=Path, help="a published verifier")
    return found


def _data(part: argparse.ArgumentParser) -> None:
    text = "KIND=SOURCE, once for each kind: stdlib, a .jsonl or a text file; the same for training and publishing"
    part.add_argument("--data", action="append", required=True, help=text)


if __name__ == "__main__":
    run(main)
