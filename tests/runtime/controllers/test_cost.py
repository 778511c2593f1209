"""Verification costs: measured once, corrected by every call, saved for the next opening, refused if damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redraft.engines import open_bundle
from redraft.engines.gpu import Gpu
from redraft.errors import BackendError
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.steps import measurements
from redraft.runtime.steps.measurements import cached_costs, load_costs, measure_curve, save_costs
from redraft.runtime.steps.verifier import Verifier
from redraft.types import Costs
from tests.runtime.devices import open_over, tensorrt_device
from tests.runtime.fakes import CURVE, SHAPE, FakeEngine, FakeHost, engine_of, greedy, make_runtime


class Timed(Verifier):
    """A verifier whose calls take the milliseconds of a formula."""

    calls = 0

    def measure_ms(self, sequences: int, nodes: int, kv_len: int) -> float:
        assert nodes <= self.max_model_len
        Timed.calls += 1
        return 1.0 + 0.1 * nodes + 0.01 * (Timed.calls % 4)


@pytest.fixture
def verifier() -> Timed:
    return Timed(FakeHost(FakeEngine(single=True)), SHAPE, 30)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "redraft" / "curves"


def test_between_sizes_the_curve_is_straight_and_it_never_falls() -> None:
    curve = CostCurve.from_points({1: 1.0, 3: 2.0, 5: 1.5, 7: 4.0})
    assert curve.table_ms == pytest.approx((0.0, 1.0, 1.5, 2.0, 2.0, 2.0, 3.0, 4.0))
    assert curve.largest == 7


@pytest.mark.parametrize("points", [{}, {2: 1.0}, {1: 0.0}, {1: float("nan")}, {1: 1.0, 2: float("inf")}])
def test_points_that_make_no_curve_are_refused(points: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="no cost curve"):
        CostCurve.from_points(points)


def test_measuring_takes_the_least_of_several_and_fits_the_buffer(verifier: Timed) -> None:
    curve = measure_curve(verifier, sizes=(1, 2, 4, 64), seconds=60.0)
    assert curve.table_ms == pytest.approx((0.0, 1.1, 1.2, 1.3, 1.4))


@pytest.mark.parametrize(("sequences", "second"), [(1, 8), (3, 2)])
def test_a_verifier_that_is_slow_is_measured_at_two_sizes_and_extrapolated(
    monkeypatch: pytest.MonkeyPatch, sequences: int, second: int
) -> None:
    called = []
    verifier = Verifier(FakeHost(FakeEngine()), SHAPE, 30, 3)
    monkeypatch.setattr(verifier, "measure_ms", lambda batch, nodes, kv: called.append(nodes) or 90.0 + 10.0 * nodes)
    curve = measure_curve(verifier, seconds=0.0, sequences=sequences)
    assert called == [1, 1, second, second]
    assert curve.table_ms[1:] == pytest.approx([90.0 + 10.0 * nodes for nodes in range(1, 25)])


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_a_timed_call_reads_valid_rows(max_num_seqs: int) -> None:
    """The fake refuses rows past the buffer, rows that were not written, and positions that do not follow."""
    runtime = make_runtime(max_model_len=50, max_num_seqs=max_num_seqs)
    runtime.generate([[97] * 40] * max_num_seqs, greedy(9), speculation="none")
    engine = engine_of(runtime.verifier)
    for kv_len, nodes in ((20, 5), (100, 12)):
        assert runtime.verifier.measure_ms(max_num_seqs, nodes, kv_len) > 0
        assert engine.sizes[-1] == (max_num_seqs, nodes)


def test_a_curve_is_measured_once_for_the_same_engine(verifier: Timed, cache: Path) -> None:
    first = load_costs(verifier, {"build": "a", "threads": 2})
    calls = Timed.calls
    assert load_costs(verifier, {"build": "a", "threads": 2}).measured == first.measured
    assert Timed.calls == calls
    load_costs(verifier, {"build": "a", "threads": 1})
    assert Timed.calls > calls
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "other", [Gpu("Other", (9, 0), 1, 1), Gpu("One", (10, 0), 1, 1)], ids=["another name", "another capability"]
)
def test_a_folder_that_machines_share_never_serves_another_gpus_times(
    verifier: Timed, cache: Path, monkeypatch: pytest.MonkeyPatch, other: Gpu
) -> None:
    drafter, identity = TimedDrafter(), {"build": "a", "device": "cuda"}
    calls = []
    for gpu in (Gpu("One", (9, 0), 1, 1), Gpu("One", (9, 0), 2, 2), other):
        monkeypatch.setattr(measurements, "find_gpu", lambda gpu=gpu: gpu)
        load_costs(verifier, identity)
        cached_costs(verifier, drafter, {**identity, "method": "x"})
        calls.append((Timed.calls, drafter.calls))
    assert calls[0] == calls[1]  # only its free memory differs
    assert calls[2][0] > calls[1][0]
    assert calls[2][1] > calls[1][1]


def test_a_runtime_names_its_device(
    lyanna_bundle: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, curves = open_bundle(lyanna_bundle, verify=False), []
    monkeypatch.setattr(measurements, "measure_curve", lambda verifier, **_: curves.append(CURVE) or CURVE)
    for name in ("One", "Other", "One"):
        monkeypatch.setattr(measurements, "find_gpu", lambda name=name: Gpu(name, (9, 0), 1, 1))
        open_over(tensorrt_device(bundle, tmp_path).device, lyanna_bundle).close()
    assert len(curves) == 2 == len(list(cache.iterdir()))


def test_no_driver_is_used_if_no_gpu_computes(verifier: Timed, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "find_gpu", lambda: pytest.fail("the driver was asked"))
    load_costs(verifier, {"build": "a", "device": "cpu"})
    assert len(list(cache.iterdir())) == 1


def test_times_of_a_gpu_without_a_name_are_not_kept(
    verifier: Timed, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> Gpu:
        raise BackendError("no CUDA driver")

    monkeypatch.setattr(measurements, "find_gpu", absent)
    identity = {"build": "a", "device": "cuda"}
    assert load_costs(verifier, identity).largest == 24
    assert cached_costs(verifier, TimedDrafter(), identity) == Costs(0.5, 0.125)
    assert not cache.exists()


@pytest.mark.parametrize(
    "damage",
    [b"", b"[1]", b"\xff", b'{"build": "a"}', "null", '{"1": [1, "x"]}', '{"3": [1, 2]}', '{"1": [-1]}', '{"1": [1]}'],
)
def test_a_damaged_cache_is_measured_again_and_logged_in_a_line(
    verifier: Timed, cache: Path, damage: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    """damage: the file's bytes, or the curves in it."""
    first = load_costs(verifier, {"build": "a"})
    assert not caplog.records
    (file,) = cache.iterdir()
    if isinstance(damage, str):
        damage = f'{{"identity": {{"build": "a"}}, "measured": {damage}, "believed": {damage}}}'.encode()
    file.write_bytes(damage)
    assert load_costs(verifier, {"build": "a"}).table_ms(1) == pytest.approx(first.table_ms(1), abs=0.03)
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} holds no costs of these engines: they are measured again"
    ]
    assert json.loads(file.read_bytes())["believed"]["1"] == pytest.approx(first.table_ms(1)[1:], abs=0.03)


def test_a_cache_that_cannot_be_written_is_logged_in_a_line(
    verifier: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert load_costs(verifier, {"build": "a"}).largest == 24
    (record,) = caplog.records
    assert record.getMessage().startswith(f"cannot save measured figures in {blocked}")


def test_without_a_home_folder_costs_are_measured_at_every_opening(verifier: Timed, no_home: None) -> None:
    for _ in range(2):
        before = Timed.calls
        assert load_costs(verifier, {"build": "a"}).largest == 24
        assert Timed.calls > before


class TimedDrafter:
    """A drafter whose calls take given milliseconds, but sometimes ten times as long.   alone: on one thread."""

    calls = 0

    def __init__(self, alone: float = 0.5) -> None:
        self.alone, self.one, self.loaded = alone, False, False

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        self.calls += 1
        slow = 10 if self.calls % 5 == 0 else 1
        return (self.alone if self.one else 0.5) * slow, 0.125 * slow

    def load_one_thread(self) -> None:
        self.loaded = True

    def draft_on_one_thread(self, one: bool) -> None:
        assert self.loaded or not one
        self.one = one


def test_costs_of_drafts_are_measured_once_between_verifications(verifier: Timed, cache: Path) -> None:
    drafter, before = TimedDrafter(), Timed.calls
    first = cached_costs(verifier, drafter, {"build": "a", "method": "x"})
    assert first == Costs(0.5, 0.125)
    calls = drafter.calls
    assert Timed.calls - before == calls > 10
    assert cached_costs(verifier, drafter, {"build": "a", "method": "x"}) == first
    assert drafter.calls == calls
    cached_costs(verifier, drafter, {"build": "a", "method": "y"})
    assert drafter.calls > calls
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("alone", [0.4, 0.7, 0.75])
def test_a_draft_has_one_thread_unless_several_take_clearly_less(
    verifier: Timed, cache: Path, monkeypatch: pytest.MonkeyPatch, alone: float
) -> None:
    monkeypatch.setattr(verifier.device, "host_threads", 2)
    for _ in range(2):  # measured, and known
        drafter = TimedDrafter(alone)
        assert cached_costs(verifier, drafter, {"build": "a"}) == Costs(0.5 if alone == 0.75 else alone, 0.125)
        assert drafter.one == (alone < 0.75)
    assert not drafter.calls
    busy = TimedDrafter(alone)
    assert cached_costs(verifier, busy, {"build": "a"}, idle=False) == Costs(0.5 if alone == 0.75 else alone, 0.125)
    assert busy.one == busy.loaded == (alone < 0.75)
    assert cached_costs(verifier, busy, {"build": "b"}, idle=False) is None
    assert not busy.calls


@pytest.mark.parametrize(
    "damage",
    [
        b"[1]", b'{"fresh_ms": 1}', b'{"fresh_ms": 1, "resample_ms": 1}', b'{"fresh_ms": "x", "resample_ms": 1}',
        b'{"fresh_ms": NaN, "resample_ms": 1, "one_thread": false}',
        b'{"fresh_ms": 1, "resample_ms": -1, "one_thread": false}',
    ],
)  # fmt: skip
def test_damaged_costs_are_measured_anew(verifier: Timed, cache: Path, damage: bytes) -> None:
    drafter = TimedDrafter()
    first = cached_costs(verifier, drafter, {"build": "a"})
    (file,) = cache.iterdir()
    file.write_bytes(damage)
    assert cached_costs(verifier, drafter, {"build": "a"}) == first
    assert json.loads(file.read_bytes()) == {"fresh_ms": 0.5, "resample_ms": 0.125, "one_thread": False}


SIZES = (1, 2, 4, 8, 16)
TRUE = CostCurve.from_points({1: 10.0, 2: 10.5, 4: 11.5, 8: 13.5, 16: 19.0})


def called(costs: VerifyCosts, sizes: list[int], true: CostCurve = TRUE, sequences: int = 1) -> None:
    """Observe calls over trees of these equal sizes, one after the other, with the times of `true`."""
    for size in sizes:
        costs.observe(sequences, sequences * size, true.table_ms[size])


def test_a_level_that_is_wrong_is_corrected_for_all_sizes_by_calls_of_one() -> None:
    """The first opening ran next to a compiler."""
    costs = VerifyCosts({1: CostCurve.from_points({n: 3 * TRUE.table_ms[n] for n in SIZES})})
    called(costs, [1] * 64)
    assert costs.table_ms(1) == pytest.approx(TRUE.table_ms, rel=0.02)
    assert costs.measured[1].table_ms[1] == pytest.approx(30.0)


def test_a_shape_that_is_wrong_is_corrected_by_the_sizes_that_are_called() -> None:
    costs = VerifyCosts({1: CostCurve.from_points({1: 10.0, 2: 30.0, 4: 60.0, 8: 90.0, 16: 99.0})})
    called(costs, [1, 1, 1, 8] * 40)
    assert costs.table_ms(1)[1] == pytest.approx(10.0, rel=0.02)
    assert costs.table_ms(1)[8] == pytest.approx(13.5, rel=0.02)
    called(costs, [1, 2, 4, 8, 16] * 32)
    assert [costs.table_ms(1)[n] for n in SIZES] == pytest.approx([TRUE.table_ms[n] for n in SIZES], rel=0.03)


def test_a_call_that_was_interrupted_corrects_nothing() -> None:
    costs = VerifyCosts({1: TRUE})
    called(costs, [1] * 10)
    costs.observe(1, 1, 5000.0)
    called(costs, [1] * 5)
    assert costs.table_ms(1) == pytest.approx(TRUE.table_ms, rel=1e-9)


def test_costs_of_a_busy_machine_are_forgotten() -> None:
    """Sizes without calls after the load ends follow the sizes with calls."""
    costs, busy = VerifyCosts({1: TRUE}), CostCurve.from_points({n: 4 * TRUE.table_ms[n] for n in SIZES})
    called(costs, [1, 8] * 64, busy)
    assert costs.table_ms(1)[8] == pytest.approx(54.0, rel=0.02)
    called(costs, [1] * 200)
    assert costs.table_ms(1)[8] < 1.25 * 13.5


def line(rows: float) -> float:
    return 10.0 + 0.5 * rows


def by_rows(*sequences: int) -> VerifyCosts:
    """Return costs that depend on the rows of a call alone, measured with up to 16 nodes a sequence."""
    return VerifyCosts({b: CostCurve.from_points({n: line(b * n) for n in SIZES}) for b in sequences})


@pytest.mark.parametrize("known", [(1,), (16,), (1, 16)])
def test_numbers_of_sequences_that_were_not_measured_lie_between(known: tuple[int, ...]) -> None:
    """Costs of as many rows are alike, and straight lines continue the measured curves."""
    table = by_rows(*known).table_ms(4)
    assert table == pytest.approx([0.0, *[line(rows) for rows in range(4, 65)]])


def test_calls_between_multiples_of_the_sequences_correct_the_rows_near_them() -> None:
    """Trees of one batch differ in size. Rows up to 20 cost nothing in truth, and more than 24 as much as measured."""
    costs = by_rows(16)
    assert costs.estimated[16].table_ms == pytest.approx(costs.measured[16].table_ms)
    for rows in (16, 18, 20, 24, 32) * 40:
        costs.observe(16, rows, line(16) if rows <= 20 else line(rows))
    table = costs.table_ms(16)
    assert table[5] == pytest.approx(line(16), rel=0.02)
    assert [table[9], table[17]] == pytest.approx([line(24), line(32)], rel=0.02)
    assert len(table) == 1 + 16 * 15 + 1


def test_a_curve_never_falls_faster_than_its_rows() -> None:
    """A cost that rises with the square of the rows, continued by a line, would be negative for one sequence."""
    table = VerifyCosts({16: CostCurve.from_points({n: 0.1 * n * n for n in SIZES})}).table_ms(1)
    assert table[1] == pytest.approx(0.1 / 16)


def test_rows_of_a_call_depend_on_padding() -> None:
    curves = {4: TRUE}
    assert VerifyCosts(curves).rows([1, 5, 2, 1]) == 9
    assert VerifyCosts(curves, packed=False).rows([1, 5, 2, 1]) == 20


@pytest.mark.parametrize("packed", [True, False])
def test_estimates_are_saved_by_rows_with_the_measured_times(
    cache: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Calls of trees of several sizes were seen. Costs of padded calls are not those of packed ones."""
    verifier = Timed(FakeHost(FakeEngine()), SHAPE, 30, 3)
    monkeypatch.setattr(verifier.steps, "packed", packed)
    costs = load_costs(verifier, {"build": "a"})
    called(costs, [1] * 64)
    for rows in (3, 4) * 64:
        costs.observe(3, rows, 10.0 * rows)
    save_costs(costs, {"build": "a"})
    again = load_costs(verifier, {"build": "a"})
    for sequences in (1, 3):
        assert again.table_ms(sequences) == pytest.approx(costs.table_ms(sequences))
    assert (again.measured, again.packed) == (costs.measured, packed)
    assert again.table_ms(3)[2] == pytest.approx(40.0, rel=0.05)
    assert again.table_ms(1)[1] > 5 * again.measured[1].table_ms[1]
    monkeypatch.setattr(verifier.steps, "packed", not packed)
    assert load_costs(verifier, {"build": "a"}).table_ms(3)[2] < 5.0


def test_a_file_of_other_lengths_is_measured_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Costs of three sequences by nodes would be read as costs by rows."""
    verifier = Timed(FakeHost(FakeEngine()), SHAPE, 30, 3)
    load_costs(verifier, {"build": "a"})
    (file,) = cache.iterdir()
    values = json.loads(file.read_bytes())
    file.write_text(json.dumps({**values, "believed": values["measured"]}))
    load_costs(verifier, {"build": "a"})
    assert len(caplog.records) == 1


def test_a_change_that_matters_little_is_not_written(verifier: Timed, cache: Path) -> None:
    costs = load_costs(verifier, {"build": "a"})
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns, file.read_bytes()
    slightly = CostCurve(tuple(1.01 * ms for ms in costs.table_ms(1)))
    called(costs, [1] * 64, slightly)
    save_costs(costs, {"build": "a"})
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before


def test_costs_of_another_build_are_measured_again(
    verifier: Timed, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_costs(verifier, {"build": "a"})
    load_costs(verifier, {"build": "b"})
    assert not caplog.records
    one, other = cache.iterdir()
    one.write_bytes(other.read_bytes())
    load_costs(verifier, {"build": "a"})
    load_costs(verifier, {"build": "b"})
    assert [record.getMessage() for record in caplog.records] == [
        f"{one} holds no costs of these engines: they are measured again"
    ]


@pytest.mark.parametrize(("rows", "share"), [(1, 1.0), (2, 1 / 1.5), (4, 0.5), (9, 0.5)])
def test_the_plain_share_of_one_sequence(rows: int, share: float) -> None:
    """A curve has no rows beyond its largest tree."""
    costs = VerifyCosts({1: CostCurve.from_points({1: 2.0, 2: 3.0, 4: 4.0})})
    assert costs.plain_share(1, rows) == pytest.approx(share)


def test_the_plain_share_is_the_smaller_of_measured_and_estimated() -> None:
    """Rows between equal trees of two sequences are interpolated. Three sequences were not measured."""
    measured = {n: CostCurve.from_points({1: 2.0, 2: 4.0}) for n in (1, 2)}
    estimated = {1: CostCurve.from_points({1: 2.0, 2: 8.0}), 2: CostCurve((0.0, 3.0, 3.0, 3.0))}
    costs = VerifyCosts(measured, estimated)
    assert [costs.plain_share(1, rows) for rows in (1, 2)] == pytest.approx([1.0, 2 / 8])
    assert [costs.plain_share(2, rows) for rows in (2, 3, 4)] == pytest.approx([1.0, 2 / 3, 2 / 4])
    assert 0 < costs.plain_share(3, 5) <= 1
