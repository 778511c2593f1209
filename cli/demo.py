"""`redraft demo`: the same prompts plainly and speculatively, side by side, and commands to try next."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.console import print_caveats, print_json, progress
from redraft.cli.options import Device, Json, NewTokens, System, Threads, Verify
from redraft.config import Precision
from redraft.errors import DownloadError

if TYPE_CHECKING:
    from redraft.bench.compare import Run

MODEL = "smollm2-135m"
PRECISIONS: tuple[Precision, ...] = ("int8", "fp32")
FALLBACK = "tiny"
QUESTIONS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the largest of three numbers.",
)
"""Prompts of a chat."""
CODE = """class Vector:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
"""
"""The prompt without a chat."""
ROUNDS = 3


@dataclass(frozen=True)
class Shown:
    """A bundle to decode with. chat: wrap prompts in its chat template."""

    engines: Path
    chat: bool


def demo(
    engines: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"An engine bundle; may be given again. Without any, builds {MODEL} in {' and '.join(PRECISIONS)}, or "
            f"{FALLBACK} if it cannot be downloaded, below build/engines."
        ),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given again.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap prompts in the bundle's chat template.")] = False,
    system: System = None,
    max_new_tokens: NewTokens = 128,
    threads: Threads = None,
    device: Device = None,
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Decode the same prompts plainly and speculatively, and compare speed and text."""
    from redraft.runtime.conversation import check_system

    check_system(system, chat or not engines)
    bundles = iter([Shown(path, chat) for path in engines]) if engines else newcomers(as_json)
    results = []
    for shown in bundles:
        texts = prompt or (QUESTIONS if shown.chat else (CODE,))
        opening = {"threads": threads, "verify": verify, "device": device}
        results.append(_measure(shown, texts, system if shown.chat else None, max_new_tokens, opening))
        if not as_json:
            _print_bundle(results[-1])
    if as_json:
        print_json({"bundles": results})
    else:
        typer.echo(_next(results[0]))


def newcomers(quiet: bool) -> Iterator[Shown]:
    """Build the bundles for someone who has none, each when it is asked for.

    Yields one of MODEL in each of PRECISIONS, or one of FALLBACK if MODEL cannot be downloaded, which it prints. Raises
    CheckpointError if another file than MODEL's was downloaded.
    """
    try:
        for precision in PRECISIONS:
            yield Shown(_build(MODEL, precision, quiet), chat=True)
    except DownloadError as error:
        typer.echo(f"the demo shows the embedded model {FALLBACK}, since {error}", err=True)
        yield Shown(_build(FALLBACK, "fp32", quiet), chat=False)


def _build(model: str, precision: Precision, quiet: bool) -> Path:
    """Build a recipe's bundle, without measuring its perplexity. Returns its folder."""
    from redraft.assembly.bundle import build_bundle
    from redraft.assembly.models import Place, find_model, find_recipe
    from redraft.cli.build import ENGINES

    out = ENGINES / (model if model == FALLBACK else f"{model}-{precision}")
    with progress(quiet) as report, tempfile.TemporaryDirectory(prefix="redraft-") as scratch:
        report(f"building {out}")
        recipe = find_recipe(model)
        assert recipe is not None, "the package has it"
        found = find_model(model, recipe, Place(None, False, Path(scratch)), report)
        build_bundle(found, replace(recipe.build, precision=precision), out, {}, False, report)
    return out


def _measure(
    shown: Shown, prompts: Sequence[str], system: str | None, max_new_tokens: int, opening: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the texts and figures of every prompt as a JSON object. Plain and speculative decoding take turns."""
    from redraft.bench.compare import Settings, compare
    from redraft.bench.prompts import Prompt
    from redraft.bench.summary import summarise
    from redraft.cli.bench import margin_finder
    from redraft.cli.opening import open_runtime
    from redraft.engines.manifest import load_manifest
    from redraft.runtime import SamplingParams

    settings = Settings(SamplingParams(max_tokens=max_new_tokens), chat=shown.chat, system=system)
    asked = [Prompt(f"{number}", "demo", text) for number, text in enumerate(prompts, 1)]
    with open_runtime(shown.engines, **opening) as runtime:
        best = runtime.default_method
        runs = compare(runtime, [prompt for prompt in asked for _ in range(ROUNDS)], [best], settings)
        of_prompt = [[run for run in runs if run.prompt is prompt] for prompt in asked]
        figures = [summarise(some, margin_finder(runtime, settings)) for some in of_prompt]
        caveats = list(runtime.caveats)
    manifest = load_manifest(shown.engines)
    return {
        "engines": str(shown.engines),
        "name": manifest.name,
        "precision": manifest.precision,
        "chat": shown.chat,
        "caveats": caveats,
        "method": best,
        "prompts": [
            {"prompt": prompt.text, "texts": _texts(some[0]), "loops": some[0].loops, "methods": methods}
            for prompt, some, methods in zip(asked, of_prompt, figures, strict=True)
        ],
    }


def _texts(run: Run) -> dict[str, str]:
    """Return the text of each method, with an ellipsis if it was cut off."""
    return {name: made.text + " …" * (made.finish_reason == "length") for name, made in run.generations.items()}


def _print_bundle(result: Mapping[str, Any]) -> None:
    from redraft.bench.compare import PLAIN

    print_caveats(result["caveats"])
    best = result["method"]
    for each in result["prompts"]:
        plain, fast = each["methods"][PLAIN], each["methods"][best]
        typer.echo(f"\n{result['name']}, {result['precision']}")
        titles = [f"plain, {_rate(plain)}", f"{best}, {_rate(fast)}"]
        _print_side_by_side(each["prompt"], [each["texts"][name] for name in (PLAIN, best)], titles)
        if fast["prompts"]:
            length = f"mean acceptance length {fast['mean_acceptance_length']:.2f}"
            typer.echo(f"{fast['speedup']:.2f} times as fast, {length}")
        if each["loops"]:
            typer.echo("the text ends in a loop, which flatters speculation")
        typer.echo(_accept_output(fast))


def _next(result: Mapping[str, Any]) -> str:
    """Return commands to try next with a bundle."""
    engines, chat = result["engines"], "--chat " if result["chat"] else ""
    example, kind = ("What is photosynthesis?", "word_problems") if chat else ("def main():", "code")
    return f"""
next:
  . .venv/bin/activate                # the environment of make
  redraft generate --engines {engines} {chat}--prompt "{example}"
  redraft bench --engines {engines} {chat}--prompts assets/tiny/prompts/{kind}.jsonl --limit 4
  redraft inspect {engines}
  redraft doctor
  make engines MODEL=<a Hugging Face checkpoint folder or id>"""


def _rate(figures: Mapping[str, float]) -> str:
    return f"{figures['tokens_per_second']:.0f} tokens/s" if figures["prompts"] else "too short to time"


def _accept_output(figures: Mapping[str, object]) -> str:
    if figures["identical_to_plain"]:
        return "lossless: both wrote the same tokens"
    return "lossless but for a near-tie of two logits" if figures["lossless"] else "NOT LOSSLESS: please report this"


def _print_side_by_side(prompt: str, texts: Sequence[str], titles: Sequence[str]) -> None:
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False)
    width = max(console.width // 2 - 2, 30)
    between = "" if prompt.endswith("\n") else "\n\n"
    panels = [
        Panel(Text(prompt + between, style="dim") + Text(text), title=title, width=width)
        for text, title in zip(texts, titles, strict=True)
    ]
    console.print(Columns(panels))
