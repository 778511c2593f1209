"""`redraft bench`: speculative against plain decoding on a file of prompts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.bench_controllers import compare_controllers, method_of, parse_ways, print_figures
from redraft.cli.bench_load import LoadRun, measure_load, parse_batches, print_load
from redraft.cli.bench_report import (
    ReportOptions,
    check_same_model,
    drafting_methods,
    write_load_report,
    write_report,
)
from redraft.cli.bench_setup import conditions, default_methods, has_inexact
from redraft.cli.console import print_json, print_table, progress
from redraft.cli.options import (
    BudgetText,
    ControllerText,
    Device,
    DrafterOptions,
    Engines,
    Inexact,
    Json,
    NewTokens,
    System,
    Threads,
    Verify,
    parse_acceptance,
    parse_budget,
    parse_drafter_options,
)
from redraft.cli.sampling_options import (
    Frequency,
    MinP,
    Presence,
    Repetition,
    Sampling,
    Seed,
    Temperature,
    TopK,
    TopP,
    check_sampling,
    sampling_params,
)
from redraft.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redraft.bench.compare import Settings
    from redraft.runtime import Runtime


def bench(  # noqa: C901, PLR0912, PLR0915 - a command reads its options one after the other
    engines: Engines,
    prompts: Annotated[list[Path], typer.Option(help="JSON lines with `turns`; may be given again.")],
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Wrap prompts in the bundle's chat template and decode all turns. Every method continues the plain "
            "answers. Without --chat only a prompt's first turn is decoded, without a template.",
        ),
    ] = False,
    system: System = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to compare, separated by commas; by default ngram, the bundle's default method and "
            "`inexact`. `inexact` is plain decoding with --inexact, by a second set of engines. `all` is "
            "every method of the bundle without pairs."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts of each kind.")] = None,
    max_new_tokens: NewTokens = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Decode all --max-new-tokens, past the end-of-sequence token.")
    ] = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    sampling: Sampling = None,
    repetition_penalty: Repetition = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    budget: BudgetText = None,
    controller: ControllerText = None,
    controllers: Annotated[
        str | None,
        typer.Option(
            help="Compare controllers of one method, separated by commas, instead of methods: fixed lengths and each "
            "of these, from every initial length. `docs/controllers.md` explains the tables."
        ),
    ] = None,
    initial_lengths: Annotated[
        str | None, typer.Option(help="With --controllers: lengths of first drafts; by default those of the paper.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Measure under load instead: numbers of requests that run at once, such as 1,2,4,8,16. Chats have "
            "their first turn only. `docs/benchmarks.md` explains the figures."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="With --batch: requests arrive at random, this many a second. By default a new one begins when one "
            "has ended."
        ),
    ] = None,
    long_prompts: Annotated[
        int | None,
        typer.Option(
            help="With --batch: also measure prompts of this many tokens, such as 2000, which arrive while other "
            "requests run, and prompts whose first half is cached."
        ),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="With --controllers: a folder for the plots, as PNG and SVG.")
    ] = None,
    report_to: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Write a report into this folder: one HTML page, its figures as JSON, its plots as PNG and SVG. "
            "Without --batch it measures temperatures 0 and 1; by default all methods.",
        ),
    ] = None,
    trained: Annotated[
        list[Path] | None,
        typer.Option(help="With --report: a folder of `redraft train all`, whose comparison the page has too."),
    ] = None,
    chains: Annotated[
        Path | None,
        typer.Option(
            help="With --report: engines of the same model whose drafters have width=1, for the figures by depth."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="With --report: a drafter; the page has every method's speed over it and τ.")
    ] = None,
    controllers_json: Annotated[
        Path | None, typer.Option(help="With --report: what --controllers printed with --json, for its tables.")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="With --report: what `python -m redraft.bench.peers --json` printed, for its tables."),
    ] = None,
    latency_json: Annotated[
        Path | None,
        typer.Option(help="With --report: times of a draft's parts as JSON; docs/benchmarks.md has the command."),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        typer.Option(help="Force acceptance by depth, such as 0.9,0.8,0.7: speeds are real, texts are meaningless."),
    ] = None,
    threads: Threads = None,
    device: Device = None,
    inexact: Inexact = False,
    drafter_option: DrafterOptions = None,
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Decode the same prompts plainly and speculatively, in turn, and compare speed and text."""
    listed = [method.strip() for method in methods.split(",")] if methods is not None else []
    if methods is not None and not all(listed):
        raise UsageError(f"--methods {methods!r}: expected names separated by commas", "such as none,ngram")
    from redraft.runtime.conversation import check_system

    check_system(system, chat)
    options = parse_drafter_options(drafter_option)
    size, forced = parse_budget(budget, *listed), parse_acceptance(synthetic_acceptance, *listed)
    ways = parse_ways(controllers, initial_lengths, plots, forced or controller)
    sampled = any(each is not None for each in (temperature, sampling, forced))
    reported = ReportOptions(report_to, trained or (), chains, baseline, controllers_json, peers, latency_json)
    batches = parse_batches(
        batch, rate, long_prompts, listed, {"--controllers": ways, "--synthetic-acceptance": forced}
    )
    other = reported.read_load() if batches else reported.read(sampled or ways or inexact)

    from redraft.bench.compare import INEXACT, Settings, compare
    from redraft.bench.controllers import speculations
    from redraft.bench.prompts import load_prompts
    from redraft.bench.summary import margin_finder, summarise
    from redraft.cli.opening import open_runtime
    from redraft.engines import open_bundle
    from redraft.runtime import SpeculationParams

    SpeculationParams(budget=size, controller=controller)  # refuses an invalid controller before engines are opened
    loaded = load_prompts(prompts, limit)
    given = dict(
        max_tokens=max_new_tokens, ignore_eos=ignore_eos, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seed=seed, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )  # fmt: skip
    check_sampling(sampling, **given)  # before the engines are opened
    with progress(quiet=as_json) as report, ExitStack() as stack:
        opening = {"threads": threads, "verify": verify, "device": device, "drafter_options": options}

        def settings_of(runtime: Runtime) -> Settings:
            return Settings(sampling_params(runtime, sampling, **given), size, forced, chat, system, controller)

        if batches:
            asked = LoadRun(
                engines, batches, rate, long_prompts, loaded, listed, settings_of, {**opening, "exact": not inexact}
            )
            result = measure_load(asked, report)
            if report_to:
                result = write_load_report(result, report_to)
            return print_json(result) if as_json else print_load(result)
        report("opening the engines")
        runtime = stack.enter_context(open_runtime(engines, exact=not inexact, **opening))
        settings = settings_of(runtime)
        chosen = drafting_methods(listed or (["all"] if report_to else []), runtime)
        chosen = chosen or default_methods(runtime, engines)
        if ways:
            settings = replace(settings, ways=speculations(ways, method_of(runtime, listed), size))
            chosen = list(settings.ways)
        elif unknown := next((name for name in chosen if name not in (INEXACT, *runtime.methods)), None):
            runtime.warm(unknown)  # raises now, not after the methods before it
        fast = None
        if INEXACT in chosen:
            if not has_inexact(runtime, engines):
                raise UsageError("these engines have no other, inexact decoding", "leave `inexact` out of --methods")
            fast = stack.enter_context(open_runtime(engines, threads=threads, exact=False, verify=False))
        result = conditions(runtime, settings, engines, threads)
        if report_to:
            from redraft.bench.report import Study

            bundle, deep = open_bundle(engines, verify=False), None
            if chains:
                check_same_model(bundle.manifest, open_bundle(chains, verify=False).manifest)
                deep = stack.enter_context(open_runtime(chains, threads=threads, verify=False))
            study = Study(runtime, bundle, loaded, chosen, settings, deep, baseline)
            result = write_report(study, result, other, report_to, report)
        else:
            runs = compare(runtime, loaded, chosen, settings, report, fast)
            result["turns_left_out"] = sum(len(p.turns) for p in loaded) - len(runs)
            if ways:
                result |= compare_controllers(runtime, runs, settings, ways, result["environment"]["model"], plots)
            else:
                margin_of = margin_finder(runtime, settings.params)
                result["methods"] = summarise(runs, margin_of, forced is not None)
    if as_json:
        print_json(result)
    elif report_to:
        typer.echo("\n".join(result["files"]))
    else:
        print_figures(result) if ways else print_comparison(result)


def print_comparison(result: dict[str, Any]) -> None:
    """Print the figures as a table under the environment, then caveats."""
    from redraft.bench.summary import describe_break_even, table

    machine = result["environment"]
    versions = f"redraft {machine['libraries']['redraft']}, onnxruntime {machine['libraries']['onnxruntime']}"
    title = f"{machine['cpu']}, {machine['threads']} threads, {machine['model']['precision']}, {versions}"
    print_table(table(result["methods"]), title)
    for method, figures in result["methods"].items():
        if "drafts_pay_above" in figures:
            typer.echo(f"{method}: {describe_break_even(figures)}")
    for line in warnings(result):
        typer.echo(line)


def warnings(result: dict[str, Any]) -> Iterator[str]:
    """Warn of random weights, forced acceptance, differing tokens and looping texts."""
    from redraft.bench.compare import INEXACT, PLAIN
    from redraft.bench.summary import describe_loops

    yield from result["environment"]["model"]["caveats"]
    if result["turns_left_out"]:
        reason = "since their conversations outgrow the context" if result["chat"] else "which need --chat"
        yield f"turns left out, {reason}: {result['turns_left_out']}"
    if result["synthetic_acceptance"]:
        yield "acceptance was forced: the speeds are real, the texts are meaningless"
    for method, figures in result["methods"].items():
        for one in figures.get("differences", ()) if method != INEXACT else ():
            kind = "near-tie" if one["near_tie"] else "DIFFERENT"
            gap = "past the end" if one["logit_margin"] is None else f"gap {one['logit_margin']:.2g}"
            turn = f", turn {one['turn']}" if result["chat"] else ""
            yield f"{kind}: prompt {one['prompt']}{turn}, token {one['token']}, {gap}"
    yield describe_loops(result["methods"][PLAIN])
