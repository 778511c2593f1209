"""`redraft train`: train a drafter from text, publish it, measure it."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from redraft.methods import find_method as specification
from redraft.train.objectives import METHODS

app = typer.Typer(help="Train drafters.", no_args_is_help=True)


class Device(StrEnum):
    """Device to train on."""

    cpu = "cpu"
    cuda = "cuda"


Config = Annotated[str | None, typer.Option(help="A recipe of redraft, or a .toml file.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps of the whole run, instead of the recipe's.")]
Seed = Annotated[int | None, typer.Option(help="Seed, instead of the recipe's.")]
Compile = Annotated[bool, typer.Option("--compile", help="Use torch.compile (needs a C++ compiler).")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the folder's checkpoint.")]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")]


@app.callback()
def group() -> None:
    """Train drafters."""


def drafter(
    context: typer.Context,
    verifier: Annotated[Path, typer.Option(help="Folder of the verifier's Hugging Face checkpoint.")],
    out: Annotated[Path, typer.Option(help="Run folder: texts, progress, checkpoint.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND=SOURCE, once for each kind; SOURCE is stdlib, a .jsonl or a text file. Without it, the "
            "verifier writes all text."
        ),
    ] = None,
    config: Config = None,
    steps: Steps = None,
    seed: Seed = None,
    device: Annotated[Device, typer.Option()] = Device.cpu,
    compile_graph: Compile = False,
    threads: Threads = None,
    resume: Resume = False,
    checkpoint_every: CheckpointEvery = 100,
    as_json: Json = False,
) -> None:
    """Train a drafter by the method in the command's name, which is also the name of its default recipe."""
    from rich.console import Console

    from redraft.errors import UsageError
    from redraft.train.data import parse_sources
    from redraft.train.drafter_run import train_drafter
    from redraft.train.objectives import find_method
    from redraft.train.progress import ProgressReport

    name = str(context.info_name)
    recipe = find_method(name).recipe.load(config or name).with_options(steps, seed)
    if recipe.method != name:
        raise UsageError(f"the recipe {config} is for {recipe.method}", f"use `redraft train {recipe.method}`")
    _use_threads(threads)
    console = Console(quiet=as_json)
    with ProgressReport(console) as report:
        ran = train_drafter(
            name,
            verifier,
            parse_sources(data or []),
            out,
            recipe,
            device=device.value,
            compile_graph=compile_graph,
            resume=resume,
            checkpoint_every=checkpoint_every,
            report=report,
        )
    _trained(ran, out, console, as_json)


for _name in METHODS:
    app.command(_name, help=f"Train a drafter. {specification(_name).summary}")(drafter)


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="Run folder that `redraft train` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write a run as a drafter's checkpoint, with its figures and a card."""
    from redraft.train.drafter_publish import publish_drafter

    _show_drafter(publish_drafter(run, out), out, as_json)


@app.command()
def acceptance(
    folder: Annotated[Path, typer.Argument(help="A published drafter.")],
    verifier: Annotated[Path, typer.Option(help="Folder of its verifier.")],
    prompts: Annotated[list[Path], typer.Option(help="A .jsonl file of prompts with turns; may be given again.")],
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens that the verifier writes after a prompt.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts of each kind.")] = None,
    device: Annotated[Device, typer.Option()] = Device.cpu,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Print how often a drafter's tokens equal those of its verifier's greedy text, by depth and kind of prompt."""
    from redraft.train.drafter_evaluate import evaluate_drafter

    _use_threads(threads)
    found = evaluate_drafter(folder, verifier, prompts, new_tokens, limit, device.value)
    if as_json:
        typer.echo(json.dumps({kind: values.to_dict() for kind, values in found.items()}))
        return
    typer.echo(
        "shares of correct drafts at each depth after a correct prefix: likeliest token / any of the four likeliest"
    )
    for kind, values in found.items():
        typer.echo(f"{kind} ({values.prompts} prompts): {values.acceptance}")


def _use_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def _trained(ran: int, out: Path, console: Any, as_json: bool) -> None:
    """Report a run; its length is the checkpoint's."""
    from redraft.train.checkpoint import load_checkpoint

    steps = int(load_checkpoint(out)["step"])
    if as_json:
        typer.echo(json.dumps({"out": str(out), "steps": steps, "steps_run": ran}))
    else:
        console.print(f"trained {ran} steps, {steps} in all, in {out}", soft_wrap=True)


def _show_drafter(training: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(training))
        return
    typer.echo(f"wrote {out}, after {training['step']} steps")
    for kind, found in training["measured"].get("acceptance", {}).items():
        shares = " ".join(f"{top:.3f}/{wide:.3f}" for top, wide in zip(found["top"], found["wide"], strict=True))
        typer.echo(f"{kind}: {shares}")
