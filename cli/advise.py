"""`redraft advise`: when speculation pays, predicted by short measurements of a bundle on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.bench_load import parse_batches
from redraft.cli.bench_setup import conditions
from redraft.cli.console import print_caveats, print_json, print_table, progress
from redraft.cli.options import Device, Engines, Json, NewTokens, System, Threads, Verify
from redraft.cli.profile import check_writable
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.engines.manifest import DrafterRecord
    from redraft.runtime import Runtime


def advise(
    engines: Engines,
    prompts: Annotated[
        list[Path], typer.Option(help="JSON lines with `turns`, which measure acceptance; may be given again.")
    ],
    chat: Annotated[bool, typer.Option("--chat", help="Wrap prompts in the bundle's chat template.")] = False,
    system: System = None,
    batch: Annotated[str, typer.Option(help="Numbers of sequences at once.")] = "1,2,4,8,16",
    limit: Annotated[int, typer.Option(min=1, help="At most this many prompts of each kind.")] = 4,
    max_new_tokens: NewTokens = 64,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also decode the prompts plainly and with trees of the predicted size, and compare the gains.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw gains and break-even by batch into this file, .svg or .png.")
    ] = None,
    threads: Threads = None,
    device: Device = None,
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Predict how much faster each drafter makes decoding by batch, the best size of its trees, and the break-even.

    A drafter pays if a step brings more tokens than its break-even, or if a larger share of drafted tokens is accepted.
    """
    from redraft.runtime.conversation import check_system

    check_system(system, chat)
    batches = parse_batches(batch, None, None, [], {})
    check_plot(plot)

    from redraft.bench.advice_runs import acceptance, measure
    from redraft.bench.advice_runs import check as checked
    from redraft.bench.compare import Settings
    from redraft.bench.prompts import load_prompts
    from redraft.cli.opening import open_runtime
    from redraft.runtime import SamplingParams

    drafters = {name: record.limits for name, record in drafters_of(engines, max(batches)).items()}
    loaded = [replace(prompt, later_turns=()) for prompt in load_prompts(prompts, limit)]
    settings = Settings(SamplingParams(max_tokens=max_new_tokens), chat=chat, system=system)
    with progress(quiet=as_json) as report:

        def opened(sequences: int) -> Runtime:
            report(f"opening the engines for {sequences}")
            return open_runtime(engines, threads=threads, device=device, verify=verify, max_num_seqs=sequences)

        with opened(1) as runtime:
            result = conditions(runtime, settings, engines, threads)
            accepted = acceptance(runtime, loaded, drafters, settings, report)
        predicted = measure(opened, loaded, drafters, accepted, settings, batches, report)
        result |= {
            "prompts": len(loaded),
            "methods": {
                name: {
                    "shares": accepted[name].shares,
                    "batches": {str(size): by_batch[size].to_json() for size in batches},
                }
                for name, by_batch in predicted.items()
            },
        }
        if check:
            result["check"] = checked(opened, loaded, drafters, predicted, settings, report)
    if plot:
        draw_plot(result, plot)
    print_json(result) if as_json else show(result)


def check_plot(plot: Path | None) -> None:
    """Raise UsageError if the picture cannot be drawn or written, or the file's name is of another kind."""
    from redraft.bench.plots import KINDS, check_plots

    if plot is None:
        return
    if plot.suffix[1:] not in KINDS:
        raise UsageError(f"--plot {plot}: expected a name that ends with .svg or .png", "rename it")
    check_plots()
    check_writable(plot, "--plot")


def drafters_of(engines: Path, sequences: int) -> dict[str, DrafterRecord]:
    """Return the bundle's drafters by id. Raises UsageError for a bundle without any, or for fewer sequences."""
    from redraft.engines import check_max_num_seqs
    from redraft.engines.manifest import load_manifest

    manifest = load_manifest(engines)
    if manifest.largest_call is not None:
        check_max_num_seqs(manifest.largest_call[0], sequences)
    drafters = dict(manifest.drafters)
    if not drafters:
        raise UsageError(
            "this bundle has no drafter to advise on", "build it with `redraft build MODEL --drafter ID=DIR`"
        )
    return drafters


def draw_plot(result: dict[str, Any], plot: Path) -> None:
    """Draw the figures."""
    from redraft.bench.advice import draw
    from redraft.bench.plots import Pictures

    model = result["environment"]["model"]
    pictures = Pictures(plot.parent, f"{model['name']}, {model['precision']}", [plot.suffix[1:]])
    draw(result["methods"], pictures, plot.stem)


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    from redraft.bench.advice import check_table, table

    machine = result["environment"]
    print_caveats([*machine["model"]["caveats"], *noise(result["methods"])])
    print_table(
        table(result["methods"]), f"{machine['cpu']}, {machine['threads']} threads, {machine['model']['precision']}"
    )
    if "check" in result:
        print_table(check_table(result["check"]), "\ntrees of the predicted size")


def noise(methods: Mapping[str, Any]) -> Iterator[str]:
    """Warn of times that cannot be right."""
    for method, found in methods.items():
        for batch, each in found["batches"].items():
            if each["least_tokens"] < 1:
                yield f"{method}, batch {batch}: a plain step took longer than a speculative one: the machine is busy"
