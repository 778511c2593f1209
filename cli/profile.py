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

from redraft.cli.console import Reporter, print_caveats, print_json, print_table, progress
from redraft.cli.generate import encode, read_prompt, writable
from redraft.cli.options import BudgetText, Device, Engines, Json, NewTokens, Threads, Verify, parse_budget
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.bench.roofline import Roofline
    from redraft.bench.stages import StageProfile
    from redraft.runtime import Generation, Runtime
    from redraft.runtime.observe.profiling import RangeListener

WARM_UPS_ON_DEVICE = 2
"""Warm-up runs before the recorded one: the first runs a shape plainly, the second captures its graph."""


@dataclass(frozen=True)
class ProfileRun:
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
    asked = ProfileRun(
        engines, read_prompt(prompt, prompt_file), method, max_new_tokens, budget, threads, device, verify
    )
    parse_budget(budget, method)
    if nvtx:
        given = {"--out": out, "--nsys": nsys, "--roofline": roofline, "--json": as_json}
        if useless := [name for name, value in given.items() if value]:
            raise UsageError(f"--nvtx only emits ranges: {', '.join(useless)} would do nothing", "leave one out")
        emit(asked)
        return
    if roofline:
        from redraft.bench.roofline import measure  # fails before decoding if its package is missing
    with progress(quiet=as_json) as report:
        values = under_nsys(asked, out) if nsys else recorded(asked, out, report)
        if roofline:
            report("timing the engines")
            values["roofline"] = measure(asked.engines, asked.threads, device=asked.device)
    print_json(as_object(values)) if as_json else show(values)


def emit(asked: ProfileRun) -> None:
    """Decode once while NVIDIA's tools record."""
    from redraft.cli.nsys import CAPTURED
    from redraft.runtime.observe.profiling import Nvtx

    with ExitStack() as stack:
        decode(asked, stack, Nvtx(), CAPTURED)


def under_nsys(asked: ProfileRun, out: Path | None) -> dict[str, Any]:
    """Return the profile from a child of nsys; its report is written to `out`."""
    from redraft.bench.stages import profile as summed
    from redraft.cli.nsys import SUFFIX, recorded_by_nsys
    from redraft.engines.manifest import load_manifest

    if out is not None:
        if out.suffix != SUFFIX:  # nsys would change it
            raise UsageError(f"--out {out}: expected a name that ends with {SUFFIX} with --nsys", "rename it")
        check_writable(out)
    caveats = load_manifest(asked.engines).model.caveats
    with tempfile.TemporaryDirectory() as temporary:
        prompt = Path(temporary) / "prompt.txt"
        prompt.write_text(asked.text, encoding="utf-8", errors="surrogateescape", newline="")
        ranges = recorded_by_nsys(asked.arguments(prompt), out or prompt.with_suffix(SUFFIX))
    return {
        "method": asked.method,
        "device": asked.device,
        "source": "nsys",
        "caveats": list(caveats),
        "profile": summed(ranges),
        "trace": out,
    }


def recorded(asked: ProfileRun, out: Path | None, report: Reporter) -> dict[str, Any]:
    """Return the profile of a run recorded in this process; its trace is written to `out`."""
    from redraft.bench.environment import environment, usable_threads
    from redraft.bench.stages import profile as summed
    from redraft.runtime.observe.profiling import Recording

    if out is not None:
        check_writable(out)
    report("decoding")
    recording = Recording()
    with ExitStack() as stack:
        runtime, generation = decode(asked, stack, recording)
        method, device = asked.method or runtime.default_method, runtime.verifier.device.name
        caveats = list(runtime.caveats)
    profile = summed(recording.ranges)
    machine = {**environment(asked.threads or usable_threads()), "device": device}
    if out is not None:
        with writable(out, "--out") as file:
            recording.write(file, {"method": method, "engines": asked.engines.name, "environment": machine})
    return {
        "method": method,
        "device": device,
        "source": "clock",
        "caveats": caveats,
        "profile": profile,
        "metrics": generation.metrics.to_json(),
        "tokens": {"prompt": generation.prompt_tokens, "new": len(generation.token_ids)},
        "environment": machine,
        "trace": out,
    }


def check_writable(out: Path, option: str = "--out") -> None:
    """Raise UsageError if `out`, which `option` names, cannot be written. A file there changes only after success."""
    new = not out.exists()
    if new or out.is_dir() or not os.access(out, os.W_OK):
        writable(out, option).close()
    if new:
        out.unlink()


def decode(
    asked: ProfileRun, stack: ExitStack, watcher: RangeListener, around: str | None = None
) -> tuple[Runtime, Generation]:
    """Decode the prompt to warm up, twice on a device, then inside of a range `around` while `watcher` records it.

    The runtime is open until `stack` ends.
    """
    from redraft.cli.opening import open_runtime
    from redraft.runtime import SamplingParams, SpeculationParams

    runtime = stack.enter_context(
        open_runtime(asked.engines, threads=asked.threads, verify=asked.verify, device=asked.device)
    )
    ids, params = encode(runtime, asked.text, chat=False), SamplingParams(max_tokens=asked.max_new_tokens)
    speculation = SpeculationParams(asked.method, budget=parse_budget(asked.budget))
    ranges = runtime.verifier.ranges
    for _ in range(WARM_UPS_ON_DEVICE if runtime.verifier.device.step_graphs else 1):
        runtime.generate([ids], params, speculation)
    with ranges.listening(watcher), ranges.stage(around) if around else ExitStack():
        generation = runtime.generate([ids], params, speculation)[0]
    return runtime, generation


def as_object(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a profile."""
    roofline = values.get("roofline")
    return {
        **{key: value for key, value in values.items() if key != "profile"},
        **values["profile"].to_json(),
        "trace": str(values["trace"]) if values["trace"] else None,
        "roofline": roofline.to_json() if roofline else None,
    }


def show(values: dict[str, Any]) -> None:
    """Print the tables of a profile."""
    from redraft.bench.stages import table

    print_caveats(values["caveats"])
    profile: StageProfile = values["profile"]
    where = f" on {values['device']}" if values["device"] not in (None, "host") else ""
    print_table(table(profile), f"{values['method'] or 'default method'}{where}, times of the {values['source']}")
    sums = ", ".join(f"{name} {ms:.1f}" for name, ms in profile.stage_ms.items())
    typer.echo(f"ms by stage: {sums}; {profile.outside_engines:.1%} of the steps' time outside of engine calls")
    if values["trace"]:
        typer.echo(f"wrote {values['trace']}")
    if roofline := values.get("roofline"):
        show_roofline(roofline)


def show_roofline(roofline: Roofline) -> None:
    """Print the table of engines against the memory."""
    from redraft.bench.roofline import table

    place = f"on {roofline.device}" if roofline.threads is None else f"{roofline.threads} threads"
    print_table(table(roofline), f"bytes that a call must move, {roofline.kv_len} rows of KV, {place}")
    reads = "" if roofline.read is None else f"reads {roofline.read:.1f} GB/s, "
    size = roofline.streamed_bytes >> 20
    typer.echo(f"memory of {roofline.device}: {reads}copies {roofline.copy:.1f} GB/s, over {size} MiB")
