"""`redraft demo`: the same prompts plainly and speculatively, side by side, and commands to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.console import print_caveats, print_json, progress
from redraft.cli.options import Device, Json, NewTokens, System, Threads, Verify
from redraft.config import Precision
from redraft.errors import DownloadError
from redraft.methods import NONE

if TYPE_CHECKING:
    from redraft.bench.compare import Run, Settings
    from redraft.bench.prompts import BenchPrompt
    from redraft.cli.written import Answer
    from redraft.runtime import Runtime

MODEL = "smollm2-135m"
PRECISION: Precision = "int8"
FALLBACK = "tiny"
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
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
PAIRS = 6
"""Pairs of runs that the figures come from, at least. The first of each prompt is shown."""
WARM_UP_TOKENS = 8
CUT_OFF = " …"
EXAMPLES = Path("assets/tiny/prompts")


@dataclass(frozen=True)
class Shown:
    """A bundle to decode with. chat: wrap prompts in its chat template."""

    engines: Path
    chat: bool


def demo(
    engines: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"An engine bundle; may be given again. Without any, builds {MODEL} in {PRECISION}, or {FALLBACK} if "
            "it cannot be downloaded, below build/engines."
        ),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given again.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap prompts in the bundle's chat template.")] = False,
    system: System = None,
    max_new_tokens: NewTokens = 40,
    threads: Threads = None,
    device: Device = None,
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Decode the same prompts plainly and speculatively, and compare speed and text."""
    from redraft.runtime.conversation import check_system

    check_system(system, chat or not engines)
    bundles = [Shown(path, chat) for path in engines] if engines else [newcomer(as_json)]
    results = []
    for shown in bundles:
        texts = prompt or (QUESTIONS if shown.chat else (CODE,))
        opening = {"threads": threads, "verify": verify, "device": device}
        results.append(_measure(shown, texts, system if shown.chat else None, max_new_tokens, opening, as_json))
        if not as_json:
            _print_summary(results[-1])
    if as_json:
        print_json({"bundles": results})
    else:
        typer.echo(_next(results[0]))


def newcomer(quiet: bool) -> Shown:
    """Build the bundle for someone who has none.

    It has MODEL, or FALLBACK if MODEL cannot be downloaded, which is printed. Raises CheckpointError if another file
    than MODEL's was downloaded.
    """
    try:
        return Shown(_build(MODEL, PRECISION, quiet), chat=True)
    except DownloadError as error:
        typer.echo(f"the demo shows the embedded model {FALLBACK}, since {error}", err=True)
        return Shown(_build(FALLBACK, "fp32", quiet), chat=False)


def _build(model: str, precision: Precision, quiet: bool) -> Path:
    """Build a recipe's bundle with its default drafter, without measuring its quality. Returns its folder.

    It is the demo's own, so that it replaces no bundle of `redraft build`.
    """
    from redraft.assembly.bundle import build_bundles
    from redraft.assembly.options import BuildRequest
    from redraft.assembly.resolve import ENGINES

    out = ENGINES / f"demo-{model}"
    with progress(quiet) as report:
        report(f"building {out}")
        build_bundles(BuildRequest(model, out, precision=precision, texts={}), report)
    return out


def _measure(
    shown: Shown, prompts: Sequence[str], system: str | None, new_tokens: int, opening: Mapping[str, Any], quiet: bool
) -> dict[str, Any]:  # fmt: skip
    """Show every prompt's first pair of runs while it is written, then time more pairs.

    Plain and speculative decoding take turns. Returns texts and figures as a JSON object.
    """
    from redraft.bench.compare import PLAIN, Settings, decode, first_turn
    from redraft.bench.prompts import BenchPrompt
    from redraft.bench.summary import margin_finder, summarise
    from redraft.cli.opening import open_runtime
    from redraft.engines.manifest import load_manifest
    from redraft.runtime import SamplingParams

    settings = Settings(SamplingParams(max_tokens=new_tokens), chat=shown.chat, system=system)
    asked = [BenchPrompt(f"{number}", "demo", text) for number, text in enumerate(prompts, 1)]
    with ExitStack() as stack:
        with progress(quiet) as report:
            report(f"opening {shown.engines}")
            runtime = stack.enter_context(open_runtime(shown.engines, **opening))
            methods = (PLAIN, runtime.default_method)
            ids = [first_turn(runtime, prompt, settings) for prompt in asked]
            for method in methods:
                report(f"warming up {method}")
                decode(runtime, ids[0], method, replace(settings, params=SamplingParams(max_tokens=WARM_UP_TOKENS)))
        pairs = [_write(runtime, *each, methods, settings, quiet) for each in zip(asked, ids, strict=True)]
        runs = [run for run, _ in pairs]
        with progress(quiet) as report:
            report("timing more pairs of runs")
            runs = [*runs, *_more_pairs(runtime, runs, methods, settings)]
        margin_of = margin_finder(runtime, settings.params)
        figures, caveats = summarise(runs, margin_of), list(runtime.caveats)
    manifest = load_manifest(shown.engines)
    answers = [
        {"prompt": run.prompt.text, "texts": _texts(run), "loops": run.loops, "origins": dict(answer.counts)}
        for run, answer in pairs
    ]
    return {
        "engines": str(shown.engines),
        "name": manifest.name,
        "precision": manifest.precisions,
        "chat": shown.chat,
        "caveats": caveats,
        "method": methods[1],
        "prompts": answers,
        "methods": figures,
        "pairs": _spread(runs, methods),
    }


def _write(
    runtime: Runtime, prompt: BenchPrompt, ids: Sequence[int], methods: Sequence[str], settings: Settings, quiet: bool
) -> tuple[Run, Answer]:
    """Decode a prompt by every method, and show the texts while they are written. Returns the last answer too."""
    from redraft.bench.compare import Run, speculation
    from redraft.cli.written import Answer, SideBySide

    answers, generations = [Answer(_title(name)) for name in methods], {}
    with SideBySide(prompt.text, answers, quiet) as view:
        for name, answer in zip(methods, answers, strict=True):
            written = runtime.pieces(ids, settings.params, speculation(name, settings))
            for piece in written.pieces():
                answer.add(piece)
                view.draw()
            generations[name] = written.generation
            answer.end = CUT_OFF if written.generation.finish_reason == "length" else ""
    return Run(prompt, ids, generations), answers[-1]


def _title(method: str) -> str:
    """Return a method's name for a reader."""
    return "plain" if method == NONE else method


def _more_pairs(runtime: Runtime, runs: Sequence[Run], methods: Sequence[str], settings: Settings) -> Iterator[Run]:
    """Decode the prompts again until there are PAIRS runs of every method, each pair in another order than the last."""
    from redraft.bench.compare import decode

    for number in range(1, -(-PAIRS // len(runs))):
        for run in runs:
            order = methods[:: -1 if number % 2 else 1]
            yield replace(run, generations={name: decode(runtime, run.token_ids, name, settings) for name in order})


def _spread(runs: Sequence[Run], methods: Sequence[str]) -> tuple[float, float] | None:
    """Return the least and the largest times as fast of single pairs, None without any that can be timed.

    They are of the same few prompts, so they say what the machine's noise is, and not what other prompts would give.
    """
    from redraft.bench.compare import timing
    from redraft.bench.statistics import speedup

    timed = [run for run in runs if run.timed]
    pairs = [[[timing(run.generations[name])] for name in methods] for run in timed]
    ratios = [speedup(*pair).ratio for pair in pairs]
    return (min(ratios), max(ratios)) if ratios else None


def _texts(run: Run) -> dict[str, str]:
    """Return the text of each method, with an ellipsis if it was cut off."""
    return {name: made.text + CUT_OFF * (made.finish_reason == "length") for name, made in run.generations.items()}


def _print_summary(result: Mapping[str, Any]) -> None:
    """Print the figures of all pairs of runs."""
    from redraft.bench.compare import PLAIN
    from redraft.bench.statistics import interval_text, rate_text, ratio_text
    from redraft.cli.written import print_counts

    print_caveats(result["caveats"])
    plain, fast = result["methods"][PLAIN], result["methods"][result["method"]]
    typer.echo(f"\n{result['name']} in {result['precision']}, {fast['prompts']} pairs of runs:")
    if fast["prompts"]:
        names = (_title(PLAIN), result["method"])
        rates = [each["tokens_per_second"] for each in (plain, fast)]
        for name, rate in zip(names, map(rate_text, rates), strict=True):
            typer.echo(f"  {name:{max(map(len, names))}}  {rate:>6} tokens a second")
        bounds, pairs = fast["speedup_interval"], interval_text(result["pairs"])
        spread = f"95 % interval {interval_text(bounds)}" if bounds else f"{pairs} in single pairs"
        typer.echo(f"  {ratio_text(rates[1], rates[0])} times as fast ({spread})")
    else:
        typer.echo("  the texts are too short to time")
    typer.echo(f"  {_accept_output(fast)}")
    if any(answer["loops"] for answer in result["prompts"]):
        typer.echo("  a text ends in a loop, which flatters speculation")
    print_counts(sum((Counter(answer["origins"]) for answer in result["prompts"]), Counter[str]()))


def _accept_output(figures: Mapping[str, object]) -> str:
    if figures["identical_to_plain"]:
        return "lossless: both wrote the same tokens"
    return "lossless but for a near-tie of two logits" if figures["lossless"] else "NOT LOSSLESS: please report this"


def _next(result: Mapping[str, Any]) -> str:
    """Return three commands to try next with a bundle. Each works as it is printed."""
    redraft, engines = shlex.quote(_command()), shlex.quote(result["engines"])
    chat = " --chat" if result["chat"] else ""
    prompts = EXAMPLES / ("word_problems.jsonl" if chat else "code.jsonl")
    look = f"chat {engines}" if chat else f'generate --engines {engines} --prompt "def main():"'
    measure = f"bench --engines {engines}{chat} \\\n    --prompts {prompts} --limit 4"
    return f"""
next:
  {redraft} {look}
  {redraft} {measure if prompts.is_file() else f"inspect {engines}"}
  {redraft} build {FALLBACK}  # or your model: a folder, a GGUF file, a Hugging Face id"""


def _command() -> str:
    """Return how a shell runs this program."""
    own = Path(sys.argv[0])
    found = shutil.which(own.name)
    return own.name if own.name != "redraft" or (found and own.samefile(found)) else os.path.relpath(own)
