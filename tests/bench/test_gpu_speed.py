"""Speeds of engines on a device, from invented times and over the device path on the CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.bench.runs import make_generation, make_run
from tests.runtime.devices import cpu_device, open_over, tensorrt_device
from tests.runtime.lyanna_bundle import CONTEXT

from redraft import names
from redraft.bench.gpu_speed import bounded, host_us, plain_share, step_ms_by_acceptance
from redraft.bench.prompts import BenchPrompt
from redraft.bench.roofline import traffic
from redraft.engines import open_bundle
from redraft.runtime import SamplingParams
from redraft.runtime.drafters.synthetic import Acceptance
from redraft.runtime.loop import speculation
from redraft.runtime.steps import bound_step
from redraft.types import Budget, Costs


@pytest.mark.parametrize("size", [Budget(6, 2, 3), None], ids=["budget", "adaptive"])
def test_the_hosts_time_leaves_out_its_waits(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: Budget | None
) -> None:
    """The clock stands still, except that a wait takes one second and the device's work two."""
    now = [0.0]
    fakes = tensorrt_device(open_bundle(bundle, verify=False), tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speculation, "cached_costs", lambda *given: Costs())
    with open_over(fakes.device, bundle) as runtime:
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        wait, fill = fakes.device.wait, bound_step.BoundTreeStep.fill

        def waited() -> None:
            wait()
            now[0] += 1.0

        def filled(*given: Any) -> None:
            fill(*given)
            now[0] += 20e-6

        monkeypatch.setattr(fakes.device, "wait", waited)
        monkeypatch.setattr(bound_step.BoundTreeStep, "fill", filled)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        found = host_us(runtime, BenchPrompt("one", "letters", "abcd"), params, size)
    assert found == pytest.approx(20, rel=1e-3)


def test_plain_decoding_is_held_against_the_bytes_of_its_whole_step(bundle: Path) -> None:
    """A step of 4 ms with a verification of 2 alone: half the share. In the middle of a text, 40 rows are in the KV."""
    opened = open_bundle(bundle, verify=False)
    found = plain_share(opened, [make_run(none=make_generation(250.0, tokens=(0,) * 41))], 2.0, 1e9)
    step, alone = (traffic(opened, names.VERIFIER, 1, kv_len).total for kv_len in (40, CONTEXT - 1))
    assert step < alone
    assert (found["ms"], found["verification_ms"], found["kv_len"]) == (4.0, 2.0, 40)
    assert found["bytes"] == step
    assert found["share_of_copy"] == pytest.approx(step / 4e-3 / 1e9)
    assert found["verification_share_of_copy"] == pytest.approx(alone / 2e-3 / 1e9)
    assert found["copy_gb_per_second"] == 1.0


def test_the_bound_is_compared_with_acceptance_on_host_and_device() -> None:
    """60 tokens in 20 steps; plain decoding 4 ms a token; t(1) = 3 ms, t(4) = 5: at most 3 * 3 / 5 = 1.8 times plain.

    The runs take 8 ms a step, 1.5 times plain; steps accepted on the device 7.5 ms, 1.6 times plain. Plain decoding
    slower than t(1) raises both shares; in time alone, the bound has 5 of 8 ms.
    """
    tokens = (0,) * 61
    drafted = make_generation(375.0, 20, 60, 40, tokens, host_ms=160.0, sizes=(0, 0, 0, 0, 20))
    runs = [make_run(none=make_generation(250.0, tokens=tokens), ngram=drafted)]
    found = bounded(runs, [0.0, 3.0, 4.0, 4.5, 5.0], {"host": 8.1, "device": 7.5}, (0.9, 0.8))
    assert found["bound"] == pytest.approx(1.8)
    assert found["share_of_bound"] == pytest.approx(1.5 / 1.8)
    assert found["share_of_bound_in_time"] == pytest.approx(5 / 8)
    assert found["accepted_on_device"] == pytest.approx(
        {"speedup": 1.6, "share_of_bound": 1.6 / 1.8, "share_of_bound_in_time": 5 / 7.5}
    )
    assert found["ms_per_step"] == pytest.approx(
        {"plain": 4.0, "bound": 5.0, "runs": 8.0, "accepted_on_host": 8.1, "accepted_on_device": 7.5}
    )


@pytest.mark.parametrize("kind", ["cpu", "tensorrt"])
def test_acceptance_on_host_and_device_is_timed_over_whole_trees(
    kind: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that takes a second more to accept raises only its own figure; steps end before trees must be cut."""
    opened = open_bundle(bundle, verify=False)
    device = cpu_device(opened) if kind == "cpu" else tensorrt_device(opened, tmp_path).device
    settled, read = bound_step.BoundTreeStep._settled, []
    seconds = iter(range(10**6))

    def slow(*given: Any) -> Any:
        read.append([len(tree) for tree in given[3]])
        return [next(seconds) for _ in range(1000)] and settled(*given)

    with open_over(device, bundle) as runtime:
        monkeypatch.setattr(bound_step.BoundTreeStep, "_settled", slow)
        monkeypatch.setattr(time, "perf_counter", lambda: next(seconds) * 1e-3)
        near_the_end = BenchPrompt("long", "letters", "abcd" * 18)
        found = step_ms_by_acceptance(runtime, near_the_end, Budget(6, 2, 3), Acceptance((0.9, 0.8)))
    assert found["host"] > 1000 > found["device"] > 0
    assert read
    assert all(sizes == [7] for sizes in read)
