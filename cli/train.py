"""`redraft train`: train a verifier from text, publish it, measure it."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Train models from text.", no_args_is_help=True)


class Device(StrEnum):
    """Where to train."""

    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def group() -> None:
    """Train models from text."""


@app.command()
def verifier(
    data: Annotated[
        list[str], typer.Option(help="KIND=SOURCE, once a kind; SOURCE is stdlib, a .jsonl or a text file.")
    ],
    out: Annotated[Path, typer.Option(help="Run folder: tokenizer, token streams, checkpoint.")],
    config: Annotated[str, typer.Option(help="A recipe that ships, or a .toml file.")] = "tiny",
    steps: Annotated[int | None, typer.Option(help="Whole length, instead of the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, instead of the recipe's.")] = None,
    device: Annotated[Device, typer.Option()] = Device.cpu,
    compile_graph: Annotated[bool, typer.Option("--compile", help="Use torch.compile (needs a C++ compiler).")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's checkpoint.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")] = False,
) -> None:
    """Train a small Llama verifier, jointly with a multi-token-prediction module."""
    import torch
    from rich.console import Console

    from redraft.train.config import load_recipe
    from redraft.train.data import parse_sources
    from redraft.train.progress import ProgressReport
    from redraft.train.run import train_verifier

    recipe = load_recipe(config)
    recipe = replace(recipe, steps=recipe.steps if steps is None else steps, seed=recipe.seed if seed is None else seed)
    if threads:
        torch.set_num_threads(threads)
    console = Console(quiet=as_json)
    with ProgressReport(console) as report:
        ran = train_verifier(
            parse_sources(data),
            out,
            recipe,
            device=device.value,
            compile_graph=compile_graph,
            resume=resume,
            checkpoint_every=checkpoint_every,
            report=report,
        )
    if as_json:
        typer.echo(json.dumps({"out": str(out), "steps": recipe.steps, "steps_run": ran}))
    else:
        console.print(f"trained {ran} steps, {recipe.steps} in all, in {out}", soft_wrap=True)


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="Run folder that `redraft train verifier` wrote.")],
    data: Annotated[list[str], typer.Option(help="KIND=SOURCE, as in training: prompts come from held-out documents.")],
    out: Annotated[Path, typer.Option(help="Folder of the Hugging Face checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write a run as a Hugging Face checkpoint with prompts, held-out text, figures and a model card."""
    from redraft.train.card import write_card
    from redraft.train.data import parse_sources
    from redraft.train.evaluate import evaluate as measure
    from redraft.train.publish import load_run
    from redraft.train.publish import publish as write
    from redraft.train.run import data_facts, load_corpora

    _, recipe, _ = load_run(run)
    write(run, out, load_corpora(parse_sources(data), recipe))
    figures = measure(out)
    write_card(out, recipe, data_facts(run), figures)
    _show(figures.to_dict(), as_json)


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A published verifier.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Print the figures of the model card."""
    from redraft.train.evaluate import evaluate as measure

    _show(measure(folder).to_dict(), as_json)


def _show(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for kind, values in figures.pop("kinds").items():
        for name, value in values.items():
            typer.echo(f"{kind}.{name}: {value:.4g}")
    for name, value in figures.items():
        typer.echo(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
