"""Costs of engines on a device, compared with the bounds by its memory and by the costs of verification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft import names
from redraft.bench.command import Sections
from redraft.bench.compare import PLAIN, Run, Settings, Totals, compare
from redraft.bench.prompts import BenchPrompt
from redraft.bench.roofline import DeviceStream, traffic
from redraft.bench.stages import profile
from redraft.bench.summary import achieved
from redraft.engines import Bundle
from redraft.engines.cuda_device import CudaDevice
from redraft.engines.device import Device
from redraft.errors import UsageError
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.drafters.synthetic import Acceptance, SyntheticAcceptance, SyntheticDrafter
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.observe.profiling import STEP, WAIT, Recording
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy, Sampler
from redraft.runtime.steps.measurements import MEASURED_KV_LEN, measure_curve
from redraft.runtime.trees.offers import Speculation

SIZES = (1, 2, 4, 8, 13, 16, 32, 64)
PLAIN_WANTED, SPECULATIVE_WANTED = 0.8, 0.9
HOST_US_WANTED = 60.0
COPY_BYTES, COPY_RUNS = 1 << 30, 8
"""Bytes of each end of a copy: launching copies and waiting for them takes less than a hundredth of the time."""
CURVE_SECONDS = 3.0
_TIMED_STEPS, _TIMED_ROUNDS = 24, 5
_FORCED = "synthetic acceptance: speeds are real, texts are not"


@dataclass(frozen=True)
class Load:
    """The timed work: the same texts over trees of one `size`, with acceptance by depth `forced` on speculation."""

    prompts: Sequence[BenchPrompt]
    params: SamplingParams
    size: Budget
    forced: tuple[float, ...]


def measure_speed(runtime: Runtime, bundle: Bundle, load: Load, sections: Sections) -> None:
    """Measure the sections on time."""
    curve = measure_curve(runtime.verifier, SIZES, seconds=CURVE_SECONDS)
    sizes = {str(size): curve.table_ms[size] for size in SIZES if size <= curve.largest}
    sections.put("curve", {"kv_len": min(MEASURED_KV_LEN, runtime.verifier.max_model_len - 1), "ms": sizes})
    runs = compare(runtime, load.prompts, ["ngram"], Settings(load.params, load.size, load.forced))
    device = runtime.verifier.device
    copied = copy_bytes_per_second(device) if isinstance(device, CudaDevice) else None
    sections.put("plain", plain := plain_share(bundle, runs, curve.table_ms[1], copied))
    step_ms = step_ms_by_acceptance(runtime, load.prompts[0], load.size, Acceptance(load.forced))
    sections.put("bound", bound := bounded(runs, curve.table_ms, step_ms, load.forced))
    sections.put("figures", {
        "labelled": ", ".join([*bundle.manifest.model.caveats, _FORCED]),
        "plain_share_of_bandwidth": plain.get("share_of_copy"), "plain_share_wanted": PLAIN_WANTED,
        **{
            f"speculative_{key}{place}": shares[key]
            for place, shares in (("", bound), ("_accepted_on_device", bound["accepted_on_device"]))
            for key in ("share_of_bound", "share_of_bound_in_time")
        },
        "speculative_share_wanted": SPECULATIVE_WANTED,
        **_hosts_part(runtime, load),
    })  # fmt: skip
    sections.put("stages", profile(_recorded(runtime, load.prompts[0], load.params, load.size).ranges).to_json())


def copy_bytes_per_second(device: Device) -> float:
    """Return the bytes read and written a second by the device's own copy, the most of several runs."""
    memory = DeviceStream(device, COPY_BYTES)
    for _ in range(COPY_RUNS):
        memory.run()
    return memory.copy * 1e9


def _hosts_part(runtime: Runtime, load: Load) -> dict[str, Any]:
    """Return the host's time of a step on CUDA, and the CUDA graphs; None elsewhere."""
    figures: dict[str, Any] = {"host_us_a_step": None, "host_us_a_step_adaptive": None,
                               "host_us_wanted": HOST_US_WANTED, "cuda_graphs": None, "not_captured": None}  # fmt: skip
    device = runtime.verifier.device
    if isinstance(device, CudaDevice):
        figures["host_us_a_step"] = host_us(runtime, load.prompts[0], load.params, load.size)
        figures["host_us_a_step_adaptive"] = host_us(runtime, load.prompts[0], load.params, None)
        figures |= {"cuda_graphs": device.cuda.captured, "not_captured": device.cuda.warned}
    return figures


def host_us(runtime: Runtime, prompt: BenchPrompt, params: SamplingParams, size: Budget | None) -> float:
    """Return the host's median time of a step with the bundle's own drafter, µs, less its waits for the device.

    size: of every tree; without one the controller chooses. The text is decoded twice, so that work done once for each
    shape is over. The time includes recording, which reads the clock twenty times.
    """
    spent: list[float] = []
    waited = 0.0
    runtime.generate([prompt.text], params, SpeculationParams(budget=size))
    for one in _recorded(runtime, prompt, params, size).ranges:
        if one.name == WAIT:
            waited += one.ended - one.started
        elif one.name == STEP:
            spent.append(one.ended - one.started - waited)
            waited = 0.0
    return float(np.median(spent)) * 1e6


def _recorded(runtime: Runtime, prompt: BenchPrompt, params: SamplingParams, size: Budget | None) -> Recording:
    recording = Recording()
    with runtime.verifier.ranges.listening(recording):
        runtime.generate([prompt.text], params, SpeculationParams(budget=size))
    return recording


def plain_share(bundle: Bundle, runs: list[Run], one_ms: float, copied: float | None) -> dict[str, Any]:
    """Return plain decoding's least bytes a token over its time, as a share of the device's copy speed.

    `ms` is of a whole step, from the runs of plain decoding; `verification_ms` is t(1) of the curve, without the host's
    work between two calls. Each is compared with the bytes for its own number of KV rows.
    """
    generations = [run.generations[PLAIN] for run in runs]
    step_ms = 1e3 / Totals.of(generations).rate
    kv_len = round(float(np.mean([each.prompt_tokens + len(each.token_ids) / 2 for each in generations])))
    measured = min(MEASURED_KV_LEN, bundle.manifest.max_model_len - 1)
    moved, alone = (traffic(bundle, names.VERIFIER, 1, rows).total for rows in (kv_len, measured))
    figures: dict[str, Any] = {"ms": step_ms, "verification_ms": one_ms, "kv_len": kv_len, "bytes": moved}
    if copied is None:
        return {**figures, "skipped": "on the CPU `redraft profile --roofline` compares with the memory"}
    return {
        **figures,
        "copy_gb_per_second": copied / 1e9,
        "share_of_copy": moved / step_ms * 1e3 / copied,
        "verification_share_of_copy": alone / one_ms * 1e3 / copied,
    }


def step_ms_by_acceptance(runtime: Runtime, prompt: BenchPrompt, size: Budget, forced: Acceptance) -> dict[str, float]:
    """Return milliseconds of a whole step over trees of one size, accepted by the host or the device; median of rounds.

    The host forces acceptance: it reads `accept_output`, draws, writes the path and starts the compaction of its rows.
    The device accepts as for real text, by one launch and one read, and keeps almost no node of these trees.
    """
    samplers: dict[str, Callable[[], Sampler]] = {
        "host": lambda: SyntheticAcceptance(forced, seed=0), "device": Greedy
    }  # fmt: skip
    rounds = [
        [_steps_ms(runtime, prompt, size, forced, sampler()) for sampler in samplers.values()]
        for _ in range(_TIMED_ROUNDS + 1)
    ]
    medians = np.median(rounds[1:], axis=0)  # the first round warms up
    return dict(zip(samplers, medians.tolist(), strict=True))


def _steps_ms(runtime: Runtime, prompt: BenchPrompt, size: Budget, forced: Acceptance, sampler: Sampler) -> float:
    """Return mean milliseconds of steps that verify whole trees."""
    drafter = SyntheticDrafter(runtime.verifier, forced)
    loop = DecodeLoop(runtime.verifier, Speculation(drafter, FixedBudget(size)))
    ids = runtime.encode(prompt.text)
    seq = Request(ids, len(ids), runtime.max_model_len, frozenset(), sampler)
    loop.add(seq)
    while not seq.new_tokens and seq.finish_reason is None:
        loop.step()
    if seq.error is not None:
        raise seq.error
    began = loop.verifier.clock.total
    whole = size.nodes + size.depth + 1
    steps = 0
    while steps < _TIMED_STEPS and min(seq.remaining, runtime.max_model_len - seq.num_computed_tokens) > whole:
        loop.step()
        steps += 1
    if not steps:
        raise UsageError("the prompt is too long for another tree", "give shorter prompts")
    return (loop.verifier.clock.total - began) / steps * 1e3


def bounded(
    runs: list[Run], table_ms: Sequence[float], step_ms: Mapping[str, float], forced: Sequence[float]
) -> dict[str, Any]:
    """Compare speculation with the curve's bound: the runs, accepted on the host, and the device's own steps.

    The bound limits speed over plain decoding: τ t(1) / (t(n) + draft). The device's share is of τ tokens a step of its
    time over plain decoding's measured speed. Plain decoding that takes more than t(1) raises both shares. Shares in
    time are t(n) + draft over a step's time, independent of plain decoding.
    """
    figures = achieved(runs, "ngram", table_ms)
    plain, own = (Totals.of(run.generations[name] for run in runs) for name in (PLAIN, "ngram"))
    plain_ms, runs_ms = 1e3 / plain.rate, sum(own.stage_ms.values()) / own.steps
    bound_ms = figures["verification_ms"]["step"] + figures["draft_ms"]
    on_device = own.tau * plain_ms / step_ms["device"]
    return {
        "synthetic_acceptance": list(forced),
        "path_timed": "accepted on the host: it reads the verifier's tokens, no logits, and writes the path it draws",
        **figures,
        "ms_per_step": {
            "plain": plain_ms,
            "bound": bound_ms,
            "runs": runs_ms,
            "accepted_on_host": step_ms["host"],
            "accepted_on_device": step_ms["device"],
        },
        "share_of_bound_in_time": bound_ms / runs_ms,
        "accepted_on_device": {
            "speedup": on_device,
            "share_of_bound": on_device / figures["bound"],
            "share_of_bound_in_time": bound_ms / step_ms["device"],
        },
    }
