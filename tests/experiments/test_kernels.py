"""The parts of measuring kernels, over host memory and the CPU build of the kernels."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.kernels import device as kernel_device
from experiments.kernels import speed
from experiments.kernels.checks import FEATURES, checks
from experiments.kernels.competitors import BIAS_COLUMNS, competitors, packed_mask
from experiments.kernels.device import Captured, capture, missing_device, paired_us
from experiments.kernels.problem import CompactionProblem, DeviceProblem, Features
from experiments.kernels.speed import best, captured_others, measure, unless_out_of_memory
from redraft.bench.command import Sections, run
from redraft.errors import KernelError
from redraft.plugins.library import CPU_LIBRARY, LIBRARY_VARIABLE, AttentionArgs, CompactArgs, Kernels
from redraft.plugins.traffic import AttentionSizes, attention_bytes, attention_flops, compaction_bytes

SIZES = AttentionSizes("float32", 2, 30, 5, 4, 2, 64)
OPTIONS = argparse.Namespace(check=True, quick=False, ctas=0)


def as_captured(calls: list[Callable[[], Any]]) -> Captured:
    return Captured(lambda: [call() for call in calls] and None, calls)


def test_checks_cover_every_kernel(kernels: Kernels) -> None:
    found = list(checks(kernels, device="cpu", kv_len=21))
    trees = {(each["dtype"], each["head_dim"], each["rows"]) for each in found if each["what"] == "tree"}
    dtypes = ("float16", "bfloat16", "float32")
    assert {each[:2] for each in trees} == {(d, h) for d in dtypes for h in (64, 80, 96, 128, 256)}
    assert {each for each in trees if each[1] == 64} == {(d, 64, rows) for d in dtypes for rows in (16, 32, 64)}
    assert {(each["dtype"], each["what"]) for each in found} == {
        (d, what) for d in dtypes for what in ("tree", "random", *FEATURES, "compaction")
    }


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("window", 0), ("softcap", 0.0), ("node_counts", None), ("mask_bits", None), ("mask_bools", None), ("k", None)],
)
def test_checks_notice_an_option_that_a_kernel_ignores(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, field: str, wrong: int | None
) -> None:
    right = DeviceProblem.args

    def args(self: DeviceProblem, ctas: int = 0) -> AttentionArgs:
        made = right(self, ctas)
        setattr(made, field, wrong)
        if field == "k":
            made.v = None
        return made

    monkeypatch.setattr(DeviceProblem, "args", args)
    with pytest.raises(KernelError, match=r"float16, head size 64, .* nodes, .*: e(rror|xpected)"):
        list(checks(kernels, device="cpu", kv_len=101))


def test_checks_notice_a_row_written_behind_the_new_ones(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is right: only the cache is wrong."""
    right = DeviceProblem.ours

    def ours(self: DeviceProblem, kernels: Kernels, ctas: int = 0) -> Callable[[], Any]:
        call = right(self, kernels, ctas)

        def called() -> Any:
            answer = call()
            self.keys[-1, :, -1] = 0
            return answer

        return called

    monkeypatch.setattr(DeviceProblem, "ours", ours)
    with pytest.raises(KernelError, match="expected the new rows in the cache"):
        list(checks(kernels, device="cpu", kv_len=21))


def test_checks_notice_compaction_that_moves_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "compact", lambda self, args, stream=0: None)
    with pytest.raises(KernelError, match="float16, compaction of 1 rows"):
        list(checks(kernels, device="cpu", kv_len=21))


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> Kernels:
    """A "device" that is the host, with the CPU build as its library."""
    monkeypatch.setattr(speed, "missing_device", lambda: None)
    monkeypatch.setattr(speed, "missing_kernels", lambda: None)
    monkeypatch.setattr(speed, "device_environment", lambda: {"device": "host"})
    monkeypatch.setattr(speed, "open_kernels", lambda: SimpleNamespace(on_cpu=False))
    monkeypatch.setattr(speed, "checks", lambda _: checks(kernels, device="cpu", kv_len=21))
    return kernels


def test_a_wrong_result_fails_and_keeps_earlier_results(
    on_host: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = Kernels.attend

    def forgetful(self: Kernels, args: AttentionArgs, *rest: int) -> None:
        if not args.window:  # the second check has one
            attend(self, args, *rest)

    monkeypatch.setattr(Kernels, "attend", forgetful)
    out = tmp_path / "attention.json"
    monkeypatch.setattr(sys, "argv", ["speed", "--check", "--out", str(out)])
    with pytest.raises(SystemExit) as exit_:
        run(speed.main)
    assert exit_.value.code == 1
    found = json.loads(out.read_text())
    assert len(found["checks"]) == 1
    assert found["error"].startswith("KernelError: float16, head size 64, 20 nodes, window: error ")
    assert "skipped" not in found
    assert "20 nodes" in capsys.readouterr().err


def test_a_library_that_does_not_load_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setattr(speed, "missing_device", lambda: None)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "broken.so"))
    report = Sections(tmp_path / "out.json")
    with pytest.raises(KernelError, match="does not load"):
        report.fill(lambda report: measure(OPTIONS, report))
    assert "does not load" in json.loads((tmp_path / "out.json").read_text())["error"]


def test_the_cpu_build_is_no_library_for_a_device(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setattr(speed, "missing_device", lambda: None)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(root / "build" / "plugins" / CPU_LIBRARY))
    with pytest.raises(KernelError, match="found the CPU build"):
        measure(OPTIONS, Sections())


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(speed, "missing_device", lambda: None)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    found = Sections().fill(lambda report: measure(OPTIONS, report))
    assert list(found) == ["skipped"]
    assert "make plugins" in found["skipped"]


def test_the_report_is_written_after_every_size(
    on_host: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The third size finds both earlier results in the file, one of them too large for the memory."""
    out = tmp_path / "attention.json"
    monkeypatch.setattr(speed, "require_device", lambda: torch)
    monkeypatch.setattr(speed, "copy_bytes_per_second", lambda: 1e12)
    monkeypatch.setattr(speed, "checks", lambda _: [{"what": "tree"}])
    seen: list[Any] = []

    def timed(*_: Any) -> dict[str, Any]:
        seen.append(json.loads(out.read_text()).get("attention", []))
        if len(seen) == 2:
            raise torch.OutOfMemoryError("tried to allocate\n 9 GiB")
        if len(seen) == 3:
            raise ValueError("launch failed")
        return {"us": {"ours": 1.0}}

    monkeypatch.setattr(speed, "timed", timed)
    options = argparse.Namespace(check=False, quick=True, ctas=0)
    with pytest.raises(ValueError, match="launch failed"):
        Sections(out).fill(lambda report: measure(options, report))
    first, second = seen[2]
    assert (first["us"], first["nodes"]) == ({"ours": 1.0}, 1)
    assert (second["skipped"], second["nodes"]) == ("OutOfMemoryError: tried to allocate 9 GiB", 64)
    assert json.loads(out.read_text())["error"] == "ValueError: launch failed"


def test_only_a_lack_of_memory_skips_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "require_device", lambda: torch)

    def wrong() -> dict[str, Any]:
        raise KernelError("wrong")

    with pytest.raises(KernelError):
        unless_out_of_memory({}, wrong)


@pytest.mark.parametrize(("nodes", "heads"), [(1, (4, 2)), (5, (4, 2)), (5, (2, 2))])
def test_pytorchs_ways_solve_the_same_problem(kernels: Kernels, nodes: int, heads: tuple[int, int]) -> None:
    problem = DeviceProblem(AttentionSizes("float32", 2, 30, nodes, *heads, 64), device="cpu")
    problem.ours(kernels)()
    ways = {name: build for name, build in competitors(2, nodes, heads[0] != heads[1]).items() if "sdpa" in name}
    assert ("sdpa_folded" in ways, "sdpa_unmasked" in ways) == (heads[0] != heads[1], nodes == 1)
    for build in ways.values():
        way = build(problem)
        torch.testing.assert_close(way.answer(way.call()), problem.out, atol=2e-6, rtol=0)
    torch.testing.assert_close(problem.reference().float(), problem.out, atol=2e-6, rtol=0)


def test_the_bias_has_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = DeviceProblem(AttentionSizes("float16", 2, 30, 5, 4, 2, 64), device="cpu")
    given: list[Any] = []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, mask, **_: given.append(mask)
    )
    for name in ("sdpa_bias", "sdpa_folded"):
        competitors(2, 5, True)[name](problem).call()
    for mask, rows in zip(given, (5, 10), strict=True):
        assert (mask.dtype, tuple(mask.shape)) == (torch.float16, (2, 1, rows, 35))
        assert all(stride % BIAS_COLUMNS == 0 for stride in mask.stride()[:-1])


def test_flashinfer_gets_its_documented_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence, one node of it, and a batch over our caches as pages."""
    calls: list[tuple[str, Any, Any]] = []

    def note(name: str) -> Callable[..., Any]:
        return lambda *given, **options: calls.append((name, given, options))

    wrapper = SimpleNamespace(plan=note("plan"), run=note("run"))
    module = SimpleNamespace(
        single_prefill_with_kv_cache=note("prefill"),
        single_decode_with_kv_cache=note("decode"),
        BatchPrefillWithPagedKVCacheWrapper=lambda *_: wrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)  # type: ignore[arg-type]
    for batch, nodes in ((1, 5), (1, 1), (2, 5)):
        problem = DeviceProblem(AttentionSizes("float16", batch, 30, nodes, 4, 2, 64), device="cpu")
        for name, build in competitors(batch, nodes, True).items():
            if name.startswith("flashinfer"):
                build(problem).call()
    (_, prefill, masked), (_, decode, plain), (_, _, mma), (_, plan, paged), (_, ran, _) = calls
    assert [tuple(each.shape) for each in prefill] == [(5, 4, 64), (2, 35, 64), (2, 35, 64)]
    assert masked["packed_custom_mask"].shape == (-(-5 * 35 // 8),)
    assert [tuple(each.shape) for each in decode] == [(4, 64), (2, 31, 64), (2, 31, 64)]
    assert (plain["use_tensor_cores"], mma["use_tensor_cores"]) == (False, True)
    assert [each.tolist() for each in plan[:4]] == [[0, 5, 10], [0, 1, 2], [0, 1], [35, 35]]
    assert plan[4:] == (4, 2, 64, problem.capacity)
    assert paged["custom_mask"].shape == (2 * 5 * 35,)
    assert tuple(ran[0].shape) == (10, 4, 64)
    assert not ran[1][0][:, :, 35:].isnan().any()


def test_masks_are_packed_lowest_bit_first() -> None:
    problem = DeviceProblem(AttentionSizes("float16", 1, 3, 2, 1, 1, 64), device="cpu")
    assert problem.visible().reshape(-1).tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    assert packed_mask(problem).tolist() == [0b11101111, 0b11]


def test_a_library_that_fails_or_errs_is_skipped_with_its_reason(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = DeviceProblem(SIZES, device="cpu")
    problem.ours(kernels)()

    def plan(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel\nfor this")

    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=lambda *_: SimpleNamespace(plan=plan))
    monkeypatch.setitem(sys.modules, "flashinfer", module)  # type: ignore[arg-type]
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, mask, **options: attention(q, k, v, mask if mask.dtype == torch.bool else None, **options),
    )
    graphs, skipped = captured_others([problem], as_captured)
    assert list(graphs) == ["sdpa_bool"]
    assert skipped["flashinfer_paged"] == "RuntimeError: no kernel for this"
    assert skipped["sdpa_bias"].startswith("ValueError: its answer is off by ")
    assert set(skipped) == {"sdpa_bias", "sdpa_folded", "flashinfer_paged"}


def test_the_best_way_is_the_fastest() -> None:
    us = {"ours": 1.0, "sdpa_bool": 9.0, "sdpa_bias": 3.0}
    assert (best(us, "sdpa"), best(us, "flashinfer")) == ("sdpa_bias", None)


def test_compaction_is_recognized(kernels: Kernels) -> None:
    problem = CompactionProblem(3, 2, 2, 4, device="cpu")
    assert not problem.right()
    problem.ours(kernels)()
    assert problem.right()
    problem.caches[2][1, 1, 7, 5] += 1
    assert not problem.right()
    assert isinstance(problem.args, CompactArgs)


@pytest.mark.parametrize("row", [30, 32, 33])
def test_a_row_in_the_wrong_place_is_noticed(kernels: Kernels, row: int) -> None:
    """A changed new row, and one written past a tree's count."""
    problem = DeviceProblem(SIZES, device="cpu", features=Features(counts=(5, 3)))
    problem.ours(kernels)()
    assert problem.rows_written()
    problem.values[1, 1, row, 7] = 2
    assert not problem.rows_written()


class Recorder:
    """A stand-in for torch that records the order of calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.cuda = self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self.log.append(name)

    def stream_named(self, name: str) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"), name=name)

    def current_stream(self) -> Any:
        return self.stream_named("current")

    def Stream(self) -> Any:
        return self.stream_named("side")

    def stream(self, _: Any) -> Any:
        return self

    def graph(self, _: Any) -> Any:
        self.log.append("captures")
        return self

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def Event(self, **_: Any) -> Any:
        return SimpleNamespace(
            record=lambda: self.log.append("record"), synchronize=lambda: None, elapsed_time=lambda _: 3.0
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_the_warm_up_waits_for_the_filling_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(kernel_device, "require_device", lambda: recorder)
    held = capture([lambda: recorder.log.append("call")]).calls
    assert len(held) == 1  # and with it its memory, which the graph uses
    order = ["side waits for current", "call", "current waits for side", "synchronize", "captures", "call"]
    assert recorder.log == order


def test_the_launch_of_a_graph_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is kept busy until it has the first event, the graph and the last event."""
    recorder = Recorder()
    monkeypatch.setattr(kernel_device, "require_device", lambda: recorder)
    times = paired_us({"a": Captured(lambda: recorder.log.append("replay"), [print, print])}, replays=1)
    assert times == {"a": [1500.0]}
    assert recorder.log[:4] == ["_sleep", "record", "replay", "record"]


def test_least_bytes() -> None:
    sizes = AttentionSizes("float16", 1, 16384, 1, 32, 8, 128)
    cache = 2 * 8 * 16385 * 256
    assert attention_bytes(sizes) == cache + 4 * 8 * 256 + 2 * 32 * 256 + 4
    assert attention_flops(sizes) == 4 * 32 * 16385 * 128
    assert compaction_bytes(64, 1, 32, 256, 4) == 2 * 64 * 32 * 4 * 256


@pytest.mark.skipif(missing_device() is None, reason="a CUDA device is here")
def test_without_a_device_the_report_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "attention.json"
    monkeypatch.setattr(sys, "argv", ["speed", "--out", str(out)])
    found = speed.main()
    assert found == {"skipped": missing_device()}
    assert json.loads(out.read_text()) == found
