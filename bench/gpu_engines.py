"""A bundle's engines on a device: the host's tokens, what they cost, and how near they come to what they could.

    python -m redraft.bench.gpu_engines --engines build/engines/tiny --prompts assets/tiny/prompts/code.jsonl \\
        [--reference BUNDLE] [--device cuda] [--synthetic-acceptance 0.9,0.8,0.7] [--out build/gpu/engines.json]
    python -m redraft.bench.gpu_engines --build vicuna-7b --backend tensorrt --weights random --go-on ...

Sections of the one JSON object, each written when it is there:

    tokens   every method on the device against plain decoding on the host: of the same bundle, of TensorRT's engines by
             --reference, an ONNX Runtime bundle of the same model. Not for random weights, whose logits say nothing.
             Another token where the host's logits do not nearly tie is an error, after the rest was measured.
    curve    milliseconds by nodes verified at once.
    plain    plain decoding: its step and its verification alone, and the bytes of each over what the device copies.
    bound    speculation with forced acceptance against what the curve allows, judged on the host and on the device.
    figures  the shares that are asked for, with what they are of, the host's time of a step, and CUDA graphs.
    stages   where the time of a run's steps goes.

What is not here is said under `skipped`; with --go-on whatever else fails, but wrong tokens, is a line under `error`.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from redraft import names
from redraft.bench.bound import achieved, overall_rate
from redraft.bench.command import budget, rates, run
from redraft.bench.compare import PLAIN, Run, Settings, compare
from redraft.bench.environment import environment, execution_providers
from redraft.bench.gpu_device import gpu_environment
from redraft.bench.gpu_report import Report, reason_of
from redraft.bench.prompts import Prompt, load_prompts
from redraft.bench.roofline import DeviceStream, traffic
from redraft.bench.stages import profile
from redraft.bench.statistics import first_difference
from redraft.config import Backend, Precision
from redraft.engines import Bundle, open_bundle
from redraft.engines.cuda_device import CudaDevice
from redraft.engines.device import Device
from redraft.engines.manifest import Manifest
from redraft.engines.tensorrt.driver import find_gpu
from redraft.errors import BackendError, RedraftError, UsageError
from redraft.runtime import Budget, Runtime, SamplingParams, scheduler
from redraft.runtime.controller import FixedBudget
from redraft.runtime.cost import MEASURED_LIVE, measure_curve
from redraft.runtime.cycle import Cycle
from redraft.runtime.ranges import STEP, WAIT
from redraft.runtime.sampler import Greedy, Sampler
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.synthetic import Acceptance, SyntheticAcceptance, SyntheticDrafter
from redraft.runtime.watchers import Recording

SIZES = (1, 2, 4, 8, 13, 16, 32, 64)
PLAIN_WANTED, SPECULATIVE_WANTED = 0.8, 0.9
HOST_US_WANTED = 60.0
COPY_BYTES, COPY_RUNS = 1 << 30, 8
"""Of each end of a copy: launching copies and waiting for them is then less than a hundredth of the time."""
NEAR_TIES: Mapping[Precision, float] = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.8}
"""Leads of the host's logits that rounding may turn round, logits being about 16 where they are largest. Weights in
fewer bits are rounded otherwise by every backend: where texts of those differ is said, and is no error."""
_FORCED = (0.9, 0.8, 0.7)
_JUDGED_STEPS, _JUDGED_ROUNDS = 24, 5
_PACKAGES: Mapping[Backend, tuple[str, ...]] = {
    "onnxruntime": ("cuda.bindings",), "tensorrt": ("tensorrt", "polygraphy", "cuda.bindings"),
}  # fmt: skip
"""What builds engines and runs them, beside ONNX Runtime itself."""
_GIB = 1 << 30


class WrongTokens(RedraftError):
    """A device says other tokens than the host, which rounding does not explain."""


def main() -> dict[str, Any]:
    """Measure what the options ask for, and write it where `--out` says."""
    options = _arguments()
    report = Report(options.out)
    try:
        return report.fill(partial(measure, options))
    except WrongTokens:
        raise
    except Exception as error:
        if not options.go_on:
            raise
        print(f"not measured: {reason_of(error)}", file=sys.stderr)
        return report.found


def measure(options: argparse.Namespace, report: Report) -> None:
    """All sections, or why nothing runs the engines here. Raises WrongTokens, and UsageError for another model."""
    if reason := _absent(options):
        report.put("skipped", reason)
        return
    if options.build:
        _build(options)
    bundle = open_bundle(options.engines, verify=False)
    manifest = bundle.manifest
    if options.reference:
        check_reference(manifest, open_bundle(options.reference, verify=False).manifest)
    report.put("environment", gpu_environment() if options.device == "cuda" else environment())
    report.put("device", options.device)
    report.put("bundle", {"name": manifest.name, "backend": manifest.backend, "precision": manifest.precision,
                          "random_weights": manifest.model.random_weights})  # fmt: skip
    prompts = load_prompts(options.prompts, options.limit)
    with Runtime.open(options.engines, device=options.device, verify=False) as runtime:
        texts = _texts(runtime, manifest, prompts, options)
        _measure_speed(runtime, bundle, prompts, options, report)
    report.put("tokens", found := _section(partial(_compared, options, manifest, prompts, texts)))
    if wrong := [f"{method}: {each}" for method in texts for each in found.get(method, {}).get("wrong", ())]:
        raise WrongTokens(f"{manifest.backend} on {options.device} says other tokens than the host: {wrong[0]}")


def missing(backend: Backend) -> str | None:
    """What is not here to run a backend's engines on a GPU, or None. What is here and fails is not missing."""
    if reason := _without_gpu():
        return reason
    if backend == "onnxruntime" and "CUDAExecutionProvider" not in (found := execution_providers()):
        return f"ONNX Runtime runs on {', '.join(found)}; install onnxruntime-gpu[cuda,cudnn]"
    absent = [package for package in _PACKAGES[backend] if not _is_installed(package)]
    return f"not installed: {', '.join(absent)}" if absent else None


def _without_gpu() -> str | None:
    """What the driver says where there is no GPU."""
    try:
        find_gpu()
    except BackendError as error:
        return str(error)
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _absent(options: argparse.Namespace) -> str | None:
    """What is not here of device, backend, memory and disk."""
    if options.device != "cuda":
        return None
    if reason := _without_gpu():
        return reason
    backend: Backend = options.backend or open_bundle(options.engines, verify=False).manifest.backend
    if reason := missing(backend):
        return reason
    gpu = find_gpu()
    if gpu.free_bytes < options.gpu_gib * _GIB:
        return f"{options.gpu_gib} GiB of GPU memory needed, {gpu.name} has {gpu.free_bytes / _GIB:.1f} free"
    there = next(folder for folder in (options.engines, *options.engines.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free / _GIB
    if options.build and not options.engines.is_dir() and free < options.disk_gib:
        return f"{options.disk_gib} GiB of disk needed for the engines, {free:.1f} free"
    return None


def _build(options: argparse.Namespace) -> None:
    """`redraft build`, which does nothing where the bundle is current. Raises BackendError with its last line."""
    command = [str(Path(sys.executable).parent / "redraft"), "build", options.build, "-o", str(options.engines)]
    for name in ("backend", "weights", "precision", "context", "lyanna"):
        command += [f"--{name}", str(value)] if (value := getattr(options, name)) is not None else []
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BackendError(f"`{' '.join(['redraft', *command[1:]])}` failed: {lines[-1]}")


def check_reference(manifest: Manifest, reference: Manifest) -> None:
    """Raise UsageError where `reference` is of another model, or cannot run on the host."""
    if reference.backend != "onnxruntime":
        raise UsageError(f"the host runs ONNX Runtime's bundles only, the reference is for {reference.backend}")
    ours, theirs = (
        (dict(each.model.weights) or each.model.source, each.model.random_weights, each.shape.vocabulary)
        for each in (manifest, reference)
    )
    if ours != theirs:
        raise UsageError(
            f"the reference is of another model: expected the weights of {manifest.model.source}, "
            f"found those of {reference.model.source}",
            "build it of the same checkpoint with --backend onnxruntime",
        )


def _section(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A section, or what keeps it from being measured."""
    try:
        return make()
    except UsageError as error:
        return {"skipped": str(error)}


def _params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=options.max_new_tokens, ignore_eos=True)


# --- tokens ----------------------------------------------------------------------------------------------------------

Texts = dict[str, list[tuple[int, ...]]]
"""Tokens of every prompt by method."""


def _texts(
    runtime: Runtime, manifest: Manifest, prompts: Sequence[Prompt], options: argparse.Namespace
) -> Texts:  # fmt: skip
    """What the device says; nothing where weights are random."""
    methods = [] if manifest.model.random_weights else [PLAIN, "ngram", *(["lyanna"] if manifest.lyanna else [])]

    def said(method: str, prompt: Prompt) -> tuple[int, ...]:
        fixed = None if method == PLAIN else options.budget
        return runtime.generate([prompt.text], _params(options), method, fixed)[0].token_ids

    return {method: [said(method, prompt) for prompt in prompts] for method in methods}


def _compared(
    options: argparse.Namespace, manifest: Manifest, prompts: Sequence[Prompt], texts: Texts
) -> dict[str, Any]:
    """Where a text leaves the host's, with the lead that the host's logits had there: a near-tie, or an error."""
    if manifest.model.random_weights:
        raise UsageError("random weights: rounding decides every token")
    if manifest.backend != "onnxruntime" and not options.reference:
        raise UsageError("the host runs ONNX Runtime's bundles only: give one of the same model as --reference")
    path = options.reference or options.engines
    reference = open_bundle(path, verify=False).manifest
    with Runtime.open(path, verify=False) as host:
        expected = [host.generate([prompt.text], _params(options), PLAIN, record_gaps=True)[0] for prompt in prompts]
    leads = [NEAR_TIES.get(each.precision, np.inf) for each in (manifest, reference)]
    found: dict[str, Any] = {"reference": {"bundle": str(path), "precision": reference.precision}}
    for method, outputs in texts.items():
        differences, wrong = [], []
        for prompt, output, plain in zip(prompts, outputs, expected, strict=True):
            if (place := first_difference(output, plain.token_ids)) is None:
                continue
            gap = plain.gaps[place] if plain.gaps and place < min(len(output), len(plain.gaps)) else None
            differences.append({"prompt": prompt.id, "token": place, "gap": gap})
            if gap is None or gap >= max(leads):
                wrong.append(f"prompt {prompt.id}, token {place}, which led by {gap}")
        found[method] = {"prompts": len(prompts), "differences": differences, "wrong": wrong}
    return found


# --- speed -----------------------------------------------------------------------------------------------------------


def _measure_speed(
    runtime: Runtime, bundle: Bundle, prompts: Sequence[Prompt], options: argparse.Namespace, report: Report
) -> None:
    """The sections on time."""
    curve = measure_curve(runtime.verifier, SIZES, seconds=3.0)
    sizes = {str(size): curve.table_ms[size] for size in SIZES if size <= curve.largest}
    report.put("curve", {"live": min(MEASURED_LIVE, runtime.verifier.capacity - 1), "ms": sizes})
    settings = Settings(_params(options), options.budget, options.synthetic_acceptance)
    runs = compare(runtime, prompts, ["ngram"], settings)
    device = runtime.verifier.device
    copied = copy_bytes_per_second(device) if isinstance(device, CudaDevice) else None
    report.put("plain", plain := plain_share(bundle, runs, curve.table_ms[1], copied))
    judged = judged_ms(runtime, prompts[0], options.budget, Acceptance(options.synthetic_acceptance))
    report.put("bound", bound := bounded(runs, curve.table_ms, judged, options.synthetic_acceptance))
    on_device = bound["judged_on_device"]
    report.put("figures", {
        "labelled": ", ".join([*bundle.manifest.model.caveats, "synthetic acceptance: speeds are real, texts are not"]),
        "plain_share_of_bandwidth": plain.get("share_of_copy"), "plain_share_wanted": PLAIN_WANTED,
        "speculative_share_of_bound": bound["share_of_bound"],
        "speculative_share_of_bound_in_time": bound["share_of_bound_in_time"],
        "speculative_share_of_bound_judged_on_device": on_device["share_of_bound"],
        "speculative_share_of_bound_in_time_judged_on_device": on_device["share_of_bound_in_time"],
        "speculative_share_wanted": SPECULATIVE_WANTED,
        **_hosts_part(runtime, prompts[0], options),
    })  # fmt: skip
    report.put("stages", profile(_recorded(runtime, prompts[0], options, options.budget).ranges).to_json())


def copy_bytes_per_second(device: Device) -> float:
    """Bytes read and written a second by the device's own copy, the most of several runs."""
    memory = DeviceStream(device, COPY_BYTES)
    for _ in range(COPY_RUNS):
        memory.run()
    return memory.copy * 1e9


def _hosts_part(runtime: Runtime, prompt: Prompt, options: argparse.Namespace) -> dict[str, Any]:
    """The host's time of a step on CUDA, and the graphs that it rests on: None elsewhere."""
    found: dict[str, Any] = {"host_us_a_step": None, "host_us_a_step_adaptive": None, "host_us_wanted": HOST_US_WANTED,
                             "cuda_graphs": None, "not_captured": None}  # fmt: skip
    device = runtime.verifier.device
    if isinstance(device, CudaDevice):
        found["host_us_a_step"] = host_us(runtime, prompt, options, options.budget)
        found["host_us_a_step_adaptive"] = host_us(runtime, prompt, options, None)
        found |= {"cuda_graphs": device.cuda.captured, "not_captured": device.cuda.told}
    return found


def host_us(runtime: Runtime, prompt: Prompt, options: argparse.Namespace, size: Budget | None) -> float:
    """What the host itself takes of a step of the bundle's own drafter: the step less what it waits for the device.

    size: of every tree; without one the controller chooses, as `generate` does by default. The text is said twice, so
    that what happens once for each shape is over. Half of the steps take at most this. Recording, which is part of it,
    reads the clock twenty times.
    """
    spent: list[float] = []
    waited = 0.0
    runtime.generate([prompt.text], _params(options), None, size)
    for found in _recorded(runtime, prompt, options, size).ranges:
        if found.name == WAIT:
            waited += found.ended - found.started
        elif found.name == STEP:
            spent.append(found.ended - found.started - waited)
            waited = 0.0
    return float(np.median(spent)) * 1e6


def _recorded(runtime: Runtime, prompt: Prompt, options: argparse.Namespace, size: Budget | None) -> Recording:
    recording = Recording()
    with runtime.verifier.ranges.watched(recording):
        runtime.generate([prompt.text], _params(options), None, size)
    return recording


def plain_share(bundle: Bundle, runs: list[Run], one_ms: float, copied: float | None) -> dict[str, Any]:
    """Plain decoding's least bytes a token over its time, as a share of the bytes that the device copies a second.

    `ms` is of a whole step, from the runs of plain decoding; `verification_ms` is t(1) of the curve, without what the
    host does between two calls. Each is held against the bytes with the rows that were live in it.
    """
    generations = [run.generations[PLAIN] for run in runs]
    step_ms = 1e3 / overall_rate(runs, PLAIN)
    live = round(float(np.mean([each.prompt_tokens + len(each.token_ids) / 2 for each in generations])))
    measured = min(MEASURED_LIVE, bundle.manifest.context - 1)
    moved, alone = (traffic(bundle, names.VERIFIER, 1, rows).total for rows in (live, measured))
    found: dict[str, Any] = {"ms": step_ms, "verification_ms": one_ms, "live": live, "bytes": moved}
    if copied is None:
        return {**found, "skipped": "on the CPU `redraft profile --roofline` compares with the memory"}
    shares = {"share_of_copy": moved / step_ms, "verification_share_of_copy": alone / one_ms}
    return {**found, "copy_gb_per_second": copied / 1e9,
            **{name: rate * 1e3 / copied for name, rate in shares.items()}}  # fmt: skip


def judged_ms(runtime: Runtime, prompt: Prompt, size: Budget, forced: Acceptance) -> dict[str, float]:
    """Milliseconds of a whole step over trees of one size, by who decides what is kept of them; median of rounds.

    Forced acceptance is the host's: it reads the verdict, draws, writes the path and starts what keeps its rows. The
    device's own answer, which real text takes, is one chain and one read; next to nothing of such trees is kept then.
    """
    samplers: dict[str, Callable[[], Sampler]] = {
        "host": lambda: SyntheticAcceptance(forced, seed=0), "device": Greedy
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(_JUDGED_ROUNDS + 1):
        for name, sampler in samplers.items():
            ms = _steps_ms(runtime, prompt, size, forced, sampler())
            if turn:
                taken[name].append(ms)
    return {name: float(np.median(times)) for name, times in taken.items()}


def _steps_ms(runtime: Runtime, prompt: Prompt, size: Budget, forced: Acceptance, sampler: Sampler) -> float:
    """Mean milliseconds of steps that verify whole trees."""
    drafter = SyntheticDrafter(runtime.verifier, forced)
    cycle = Cycle(runtime.verifier, drafter, FixedBudget(size, drafter.drafts))
    ids = runtime.encode(prompt.text)
    seq = Request(ids, len(ids), runtime.context, frozenset(), sampler)
    scheduler.admit(cycle, [], seq)
    whole = size.nodes + size.depth + 1
    steps = 0
    while steps < _JUDGED_STEPS and min(seq.remaining, runtime.context - seq.past_len) > whole:
        cycle.step([seq])
        steps += 1
    if not steps:
        raise UsageError("the prompt leaves no room for a tree", "give shorter prompts")
    return (cycle.clock.total - seq.began.total) / steps * 1e3


def bounded(
    runs: list[Run], table_ms: Sequence[float], judged: Mapping[str, float], forced: Sequence[float]
) -> dict[str, Any]:
    """Speculation against the curve's bound: of the runs, which the host judged, and of the device's own steps.

    The bound is on speed over plain decoding, τ t(1) / (t(n) + draft). The device's share is of τ tokens a step of its
    time over plain decoding's measured speed. Plain decoding that takes more than t(1) flatters both: shares in time
    are t(n) + draft over a step's time, whatever plain decoding takes.
    """
    found = achieved(runs, "ngram", table_ms)
    metrics = [run.generations["ngram"].metrics for run in runs]
    tokens_a_step = found["mean_acceptance_length"]
    plain_ms = 1e3 / overall_rate(runs, PLAIN)
    bound_ms = found["verification_ms"]["step"] + found["draft_ms"]
    runs_ms = sum(sum(each.stage_ms.values()) for each in metrics) / sum(each.num_steps for each in metrics)
    on_device = tokens_a_step * plain_ms / judged["device"]
    return {
        "synthetic_acceptance": list(forced),
        "path_timed": "judged on the host: it reads the verifier's tokens, no logits, and writes the path it draws",
        **found,
        "ms_per_step": {
            "plain": plain_ms,
            "bound": bound_ms,
            "runs": runs_ms,
            "judged_on_host": judged["host"],
            "judged_on_device": judged["device"],
        },
        "share_of_bound_in_time": bound_ms / runs_ms,
        "judged_on_device": {
            "overall_speedup": on_device,
            "share_of_bound": on_device / found["bound"],
            "share_of_bound_in_time": bound_ms / judged["device"],
        },
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--reference", type=Path, help="an ONNX Runtime bundle of the same model: the host's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=budget, default=Budget(12, 4, 4), help="nodes=12,depth=4,width=4 by default")
    parser.add_argument("--synthetic-acceptance", type=rates, default=_FORCED, help="forced by depth for `bound`")
    parser.add_argument("--limit", type=int, default=4, help="prompts a kind")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--go-on", action="store_true", help="fail for wrong tokens only; the rest is in the JSON")
    building = parser.add_argument_group("building the bundle first, where it is not current")
    building.add_argument("--build", metavar="MODEL", help="what `redraft build` is given, and with it:")
    building.add_argument("--backend", choices=("onnxruntime", "tensorrt"))
    for name in ("weights", "precision", "context", "lyanna"):
        building.add_argument(f"--{name}")
    building.add_argument("--gpu-gib", type=float, default=0, help="skip where less GPU memory is free")
    building.add_argument("--disk-gib", type=float, default=0, help="skip where less disk is free for a new bundle")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
