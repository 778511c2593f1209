"""The part of `redraft bench` that measures under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from redraft.cli.bench_report import drafting_methods
from redraft.cli.bench_setup import conditions, default_methods
from redraft.cli.console import print_table
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.bench.compare import Settings
    from redraft.bench.prompts import BenchPrompt
    from redraft.runtime import Runtime


@dataclass(frozen=True)
class LoadRun:
    """What to measure.

    batches: numbers of requests that run at once.   rate: arrivals a second; None for a closed loop.
    long_prompts: tokens of the prompts that arrive beside running requests; None to leave that out.
    methods: as listed; empty for the default ones.   settings_of: returns the settings for an open runtime.
    opening: options of `Runtime.open`.
    """

    engines: Path
    batches: Sequence[int]
    rate: float | None
    long_prompts: int | None
    prompts: Sequence[BenchPrompt]
    methods: Sequence[str]
    settings_of: Callable[[Runtime], Settings]
    opening: Mapping[str, Any]


def parse_batches(
    batches: str | None, rate: float | None, long_prompts: int | None, methods: Sequence[str],
    contradicting: Mapping[str, object],
) -> tuple[int, ...]:  # fmt: skip
    """Return the batch sizes of `--batch`; none without the option.

    contradicting: options that load measurements cannot have, by name. Raises UsageError for other text, for a rate
    that is not above 0, and for options that do not go together.
    """
    from redraft.bench.command import sizes
    from redraft.bench.compare import INEXACT
    from redraft.bench.long_prompts import FEWEST_TOKENS

    if batches is None:
        if rate is not None:
            raise UsageError("--rate belongs to --batch", "give --batch too, such as --batch 8")
        if long_prompts is not None:
            raise UsageError("--long-prompts belongs to --batch", "give --batch too, such as --batch 1,4")
        return ()
    try:
        found = tuple(dict.fromkeys(sizes(batches)))
    except ValueError:
        raise UsageError(f"--batch {batches!r}: expected whole numbers from 1", "such as 1,2,4,8,16") from None
    if rate is not None and not (isfinite(rate) and rate > 0):
        raise UsageError(f"--rate {rate:g}: expected requests a second, above 0", "such as --rate 2.5")
    if long_prompts is not None and long_prompts < FEWEST_TOKENS:
        raise UsageError(f"--long-prompts {long_prompts}: expected {FEWEST_TOKENS} tokens or more", "such as 2000")
    if option := next((name for name, value in contradicting.items() if value), None):
        raise UsageError(f"--batch takes no {option}", "leave one of the two out")
    if INEXACT in methods:
        raise UsageError("--batch takes no method `inexact`", "give --inexact, for all methods")
    return found


def measure_load(run: LoadRun, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return what `redraft bench --batch --json` prints. Raises UsageError before it measures, and RequestError."""
    from redraft.bench import long_prompts
    from redraft.bench.compare import PLAIN, first_turn
    from redraft.bench.load import measure, summarise

    _check(run)
    result: dict[str, Any] = {}
    batches: dict[str, Any] = {}
    long: dict[str, Any] = {}
    for batch in run.batches:
        progress(f"batch {batch}: opening the engines")
        with ExitStack() as stack:
            opened = partial(_opened, run, batch)
            runtime = opened(stack)
            settings = run.settings_of(runtime)
            methods = _methods(run, runtime)
            prompts = [first_turn(runtime, prompt, settings) for prompt in run.prompts]
            if run.long_prompts is not None:
                long_prompts.long_prompt(prompts, run.long_prompts, 0)  # refuses a number that is too large
            result = result or conditions(runtime, settings, run.engines, run.opening["threads"])
            alone = run.rate is not None or runtime.verifier.device.asynchronous
            ways = [*dict.fromkeys((PLAIN, *methods))]
            with ExitStack() as others:  # closed before the first, which speculates: its measured costs are kept
                runtimes = {way: runtime if alone or way == ways[-1] else opened(others) for way in ways}
                blocks = measure(runtimes, prompts, settings, run.rate, progress)
            batches[str(batch)] = summarise(blocks, batch, run.rate is not None)
            if run.long_prompts is not None:
                found = long_prompts.measure(runtime, prompts, methods, settings, run.long_prompts, progress)
                long[str(batch)] = long_prompts.summarise(found)
    left_out = sum(len(prompt.later_turns) for prompt in run.prompts)
    return {**result, "prompts": len(run.prompts), "turns_left_out": left_out, "rate": run.rate, "batches": batches,
            "long_prompts": {"tokens": run.long_prompts, "batches": long} if long else None}  # fmt: skip


def _opened(run: LoadRun, batch: int, stack: ExitStack) -> Runtime:
    """Open the engines for a batch size, until the end of `stack`."""
    from redraft.cli.opening import open_runtime

    return stack.enter_context(open_runtime(run.engines, max_num_seqs=batch, **run.opening))


def _check(run: LoadRun) -> None:
    """Raise UsageError if the prompts or the engines are not enough for the largest batch."""
    from redraft.bench.long_prompts import check_context
    from redraft.engines import check_max_num_seqs, open_bundle

    largest = max(run.batches)
    if len(run.prompts) < largest:
        raise UsageError(
            f"--batch {largest} needs {largest} prompts, found {len(run.prompts)}: different ones run at once",
            "give more prompts, or smaller batches",
        )
    manifest = open_bundle(run.engines, verify=False).manifest
    if manifest.largest_call is not None:
        check_max_num_seqs(manifest.largest_call[0], largest)
    if run.long_prompts is not None:
        check_context(run.long_prompts, manifest.max_model_len)


def _methods(run: LoadRun, runtime: Runtime) -> list[str]:
    """Return the methods to measure. Raises UsageError for one that the bundle does not have."""
    from redraft.bench.compare import INEXACT

    chosen = drafting_methods(run.methods, runtime) or default_methods(runtime, run.engines)
    if unknown := next((name for name in chosen if name not in (INEXACT, *runtime.methods)), None):
        runtime.warm(unknown)  # raises now, not after the methods before it
    return [name for name in chosen if name != INEXACT]


def print_load(result: dict[str, Any]) -> None:
    """Print the figures as tables under the environment, then caveats, and files of a report."""
    from redraft.bench import long_prompts
    from redraft.bench.load import table

    machine = result["environment"]
    versions = f"redraft {machine['libraries']['redraft']}, onnxruntime {machine['libraries']['onnxruntime']}"
    title = f"{machine['cpu']}, {machine['threads']} threads, {machine['model']['precision']}, {versions}"
    print_table(table(result["batches"]), title)
    if long := result["long_prompts"]:
        title = f"\nprompts of {long['tokens']} tokens, and requests that run"
        print_table(long_prompts.table(long["batches"]), title)
    for line in (*load_warnings(result), *result.get("files", ())):
        typer.echo(line)


def load_warnings(result: dict[str, Any]) -> Iterator[str]:
    """Warn of random weights, turns that were left out, differing texts, missed prefixes and looping texts."""
    from redraft.bench import long_prompts
    from redraft.bench.compare import PLAIN
    from redraft.bench.summary import describe_loops

    yield from result["environment"]["model"]["caveats"]
    if result["turns_left_out"]:
        yield f"turns left out, since each prompt has its first turn only: {result['turns_left_out']}"
    for batch, methods in result["batches"].items():
        for method, each in methods.items():
            if each["differing_outputs"]:
                yield f"DIFFERENT: batch {batch}, {method}: {each['differing_outputs']} of {each['outputs']} outputs"
        yield f"batch {batch}: {describe_loops(methods[PLAIN])}"
    for batch, methods in (result["long_prompts"] or {"batches": {}})["batches"].items():
        for method, each in methods.items():
            yield from long_prompts.warnings(batch, method, each)
