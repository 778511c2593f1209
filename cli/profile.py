"""`redraft profile`: the time of every stage of a run's steps, and engines against the memory's speed.

On the CPU this process records the ranges and writes them as a trace. With `--nsys` the command runs again as a child
of Nsight Systems, which sees the same ranges and the GPU's work.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.console import Report, print_caveats, print_json, print_table, progress
from redraft.cli.generate import encode, read_prompt, writable
from redraft.cli.options import BudgetText, Device, Engines, Json, NewTokens, Threads, Verify, parse_budget
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.bench.roofline import Roofline
    from redraft.bench.stages import Profile
    from redraft.runtime import Generation
    from redraft.runtime.profiling import RangeListener


WARM_UPS_ON_DEVICE = 2
"""Warm-up runs before the recorded one: the first runs a shape plainly, the second captures its graph."""


@dataclass(frozen=True)
class Asked:
    """The run that the options describe; `text` is the prompt."""

    engines: Path
    text: str
    method: str | None
    max_new_tokens: int
    budget: str | None
    threads: int | None
    device: str | None
    verify: bool | None = None

    def arguments(self, prompt: Path) -> list[str]:
        """Return the options that repeat this run; `prompt` is a file, as the text may be too long for an argument."""
        given = {"--method": self.method, "--budget": self.budget, "--threads": self.threads, "--device": self.device}
        options = [part for name, value in given.items() if value is not None for part in (name, str(value))]
        if self.verify is not None:
            options.append("--verify" if self.verify else "--no-verify")
        fixed = ["--engines", str(self.engines), "--max-new-tokens", str(self.max_new_tokens)]
        return ["profile", *fixed, *options, "--prompt-file", str(prompt), "--nvtx"]


def profile(
    engines: Engines,
    prompt: Annotated[str | None, typer.Option(help="The prompt; `-` reads the standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt.")] = None,
    method: Annotated[
        str | None, typer.Option(help="Drafting method; `none` decodes plainly; the bundle's best by default.")
    ] = None,
    max_new_tokens: NewTokens = 128,
    budget: BudgetText = None,
    out: Annotated[
        Path | None, typer.Option(help="File of the trace, for Perfetto; with --nsys the report (.nsys-rep).")
    ] = None,
    nsys: Annotated[bool, typer.Option("--nsys", help="Measure with Nsight Systems instead of recording.")] = False,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Also compare every engine with the speed of the memory.")
    ] = False,
    threads: Threads = None,
    device: Device = None,
    verify: Verify = None,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Only emit NVTX ranges, for a tool that already records, such as ncu.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Decode one prompt and show the time of each stage of its steps."""
    asked = Asked(engines, read_prompt(prompt, prompt_file), method, max_new_tokens, budget, threads, device, verify)
    parse_budget(budget, method)
    if nvtx:
        given = {"--out": out, "--nsys": nsys, "--roofline": roofline, "--json": as_json}
        refuse([name for name, value in given.items() if value])
        emit(asked)
        return
    if roofline:
        import redraft.bench.roofline  # noqa: F401  (fails before decoding if its package is missing)
    with progress(quiet=as_json) as report:
        values = under_nsys(asked, out) if nsys else recorded(asked, out, report)
        if roofline:
            report("timing the engines")
            values["roofline"] = compare_with_memory(asked)
    print_json(as_object(values)) if as_json else show(values)


def refuse(options: list[str]) -> None:
    """Raise UsageError for options that do nothing with `--nvtx`, which measures nothing here."""
    if options:
        raise UsageError(f"--nvtx only emits ranges: {', '.join(options)} would do nothing", "leave one out")


def emit(asked: Asked) -> None:
    """Decode once while NVIDIA's tools record."""
    from redraft.cli.nsys import CAPTURED
    from redraft.runtime.profiling import Nvtx

    with ExitStack() as stack:
        watcher = Nvtx()
        decode(asked, stack, watcher, CAPTURED)


def under_nsys(asked: Asked, out: Path | None) -> dict[str, Any]:
    """Return the profile from a child of nsys; its report is written to `out`."""
    from redraft.bench.stages import profile as summed
    from redraft.cli.nsys import SUFFIX, check_out, recorded_by_nsys
    from redraft.engines.manifest import load_manifest

    with ExitStack() as stack:
        if out is not None:
            check_out(out)
            check_writable(out)
        caveats = load_manifest(asked.engines).model.caveats
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prompt = folder / "prompt.txt"
        prompt.write_text(asked.text, encoding="utf-8", errors="surrogateescape", newline="")
        found = summed(recorded_by_nsys(asked.arguments(prompt), out or folder / f"profile{SUFFIX}"))
    return {
        "method": asked.method,
        "device": asked.device,
        "source": "nsys",
        "caveats": list(caveats),
        "profile": found,
        "trace": out,
    }


def recorded(asked: Asked, out: Path | None, report: Report) -> dict[str, Any]:
    """Return the profile of a run recorded in this process; its trace is written to `out`."""
    from redraft.bench.environment import environment, usable_threads
    from redraft.bench.stages import profile as summed
    from redraft.runtime.profiling import Recording

    if out is not None:
        check_writable(out)
    report("decoding")
    recording = Recording()
    with ExitStack() as stack:
        found = decode(asked, stack, recording)
    profile = summed(recording.ranges)
    machine = {**environment(asked.threads or usable_threads()), "device": found.device}
    if out is not None:
        with writable(out, "--out") as file:
            recording.write(file, {"method": found.method, "engines": asked.engines.name, "environment": machine})
    return {
        "method": found.method,
        "device": found.device,
        "source": "clock",
        "caveats": list(found.caveats),
        "profile": profile,
        "metrics": found.generation.metrics.to_json(),
        "tokens": {"prompt": found.generation.prompt_tokens, "new": len(found.generation.token_ids)},
        "environment": machine,
        "trace": out,
    }


def check_writable(out: Path) -> None:
    """Raise UsageError if `out` cannot be written. A file there changes only after success."""
    new = not out.exists()
    if new or out.is_dir() or not os.access(out, os.W_OK):
        writable(out, "--out").close()
    if new:
        out.unlink()


@dataclass(frozen=True)
class Decoded:
    """Describe the run; `device` is `host` if the runtime computes between engine calls."""

    generation: Generation
    method: str
    device: str
    caveats: tuple[str, ...]


def decode(asked: Asked, stack: ExitStack, watcher: RangeListener, around: str | None = None) -> Decoded:
    """Decode the prompt to warm up, twice on a device, then inside of a range `around` while `watcher` records it."""
    from redraft.cli.opening import open_runtime
    from redraft.runtime import SamplingParams, SpeculationParams

    runtime = stack.enter_context(
        open_runtime(asked.engines, threads=asked.threads, verify=asked.verify, device=asked.device)
    )
    params = SamplingParams(max_tokens=asked.max_new_tokens)
    ids = encode(runtime, asked.text, chat=False)
    how = SpeculationParams(asked.method, budget=parse_budget(asked.budget))
    ranges, device = runtime.verifier.ranges, runtime.verifier.device
    for _ in range(WARM_UPS_ON_DEVICE if device.step_graphs else 1):
        runtime.generate([ids], params, how)
    with ranges.listening(watcher), ranges.stage(around) if around else ExitStack():
        found = runtime.generate([ids], params, how)[0]
    return Decoded(found, asked.method or runtime.default_method, device.name, runtime.caveats)


def compare_with_memory(asked: Asked) -> Roofline:
    """Compare engines with the memory. Needs the `onnx` package, to know which weights a graph reads."""
    from redraft.bench.roofline import measure

    return measure(asked.engines, asked.threads, device=asked.device)


def as_object(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a profile."""
    plain = {key: value for key, value in values.items() if key not in ("profile", "roofline", "trace")}
    roofline = values.get("roofline")
    return {
        **plain,
        **values["profile"].to_json(),
        "trace": str(values["trace"]) if values["trace"] else None,
        "roofline": roofline.to_json() if roofline else None,
    }


def show(values: dict[str, Any]) -> None:
    """Print the tables of a profile."""
    from redraft.bench import stages

    print_caveats(values["caveats"])
    found: Profile = values["profile"]
    where = f" on {values['device']}" if values["device"] not in (None, "host") else ""
    print_table(stages.table(found), f"{values['method'] or 'default method'}{where}, times of the {values['source']}")
    sums = ", ".join(f"{name} {ms:.1f}" for name, ms in found.stage_ms.items())
    typer.echo(f"ms by stage: {sums}; {found.outside_engines:.1%} of the steps' time outside of engine calls")
    if values["trace"]:
        typer.echo(f"wrote {values['trace']}")
    if roofline := values.get("roofline"):
        show_roofline(roofline)


def show_roofline(found: Roofline) -> None:
    """Print the table of engines against the memory."""
    from redraft.bench.roofline import table

    place = f"on {found.device}" if found.threads is None else f"{found.threads} threads"
    print_table(table(found), f"bytes that a call must move, {found.kv_len} rows of KV, {place}")
    reads = "" if found.read is None else f"reads {found.read:.1f} GB/s, "
    typer.echo(f"memory of {found.device}: {reads}copies {found.copy:.1f} GB/s, over {found.streamed_bytes >> 20} MiB")
