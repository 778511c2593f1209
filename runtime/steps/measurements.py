"""Costs measured on this machine, and figures saved for the next opening: one JSON file for each identity.

A large model has time for a few sizes only; a line through the largest two continues the curve of a verification.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from redraft import names
from redraft.cpus import default_threads
from redraft.engines import Bundle
from redraft.engines.device import Device
from redraft.engines.gpu import find_gpu
from redraft.engines.host_device import HostDevice
from redraft.errors import BackendError
from redraft.packages import package_version
from redraft.plugins.operators import find_operators
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.steps.verifier import Verifier
from redraft.types import Costs
from redraft.user_cache import read_object, user_cache, write_object

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Tree sizes that are measured if there is time, root included."""
_FIRST_ROWS, _LEAST_SIZES = 8, 2
"""Rows of the second size that is measured, and the sizes that are measured however long they take."""
MEASURED_KV_LEN = 256
"""KV rows in use while measuring."""
_SECONDS = 0.8
_ROUNDS = 40
_DRAFT_SECONDS, _TURNS = 0.5, range(3, 60)
_TYPICAL_NODES, _TYPICAL_ROWS = 6, 2
_HOST_SECONDS = 0.0005
"""Time of the host's own work between a verification and a draft, in which the engine's other threads fall asleep."""
_CLEARLY_LESS = 0.7
"""Several threads must take at most this share of one thread's time: sleeping ones may wake late, for seconds at a
time, and a draft then takes three times as long."""
_SAVED_DRIFT = 0.05
"""Smallest relative change of a time that is written to disk."""
_LOG = logging.getLogger("redraft.costs")
Identity = Mapping[str, str | int]
"""Settings that figures depend on, apart from the machine: build, graph, threads, max_num_seqs, device …"""


def identity_of(bundle: Bundle, device: Device, threads: int | None, max_num_seqs: int) -> Identity:
    """Return the identity of a bundle's figures on a device."""
    manifest, graph, operators = bundle.manifest, names.VERIFIER, None
    if isinstance(device, HostDevice):
        graph, operators = device.verifier_graph, find_operators()
    return {
        "build": manifest.build_key,
        "graph": manifest.files[manifest.graphs[graph].file].sha256,
        "graphs": " ".join(manifest.files[graph.file].sha256[:16] for _, graph in sorted(manifest.all_graphs.items())),
        "library": package_version("onnxruntime") or "none",
        "operators": operators.identity if operators else "none",
        "backend": f"{manifest.backend} {manifest.backend_version}",
        "threads": threads or 0,
        "max_num_seqs": max_num_seqs,
        "device": device.name,
    }


def figures_file(identity: Identity) -> Path | None:
    """Return the file for figures of `identity` on this machine; None if the machine's GPU has no name.

    On the device `cuda`, the file name depends on the GPU.
    """
    try:
        return cache_folder() / f"{identity_key(identity)}.json"
    except BackendError:
        return None


def read_figures(path: Path | None) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, is unreadable, or holds another value."""
    return None if path is None else read_object(path)


def write_figures(path: Path | None, values: Mapping[str, Any]) -> None:
    """Write the whole file or nothing, so that no reader sees a part. Logs one line if the folder is not writable."""
    if path is None:
        return
    try:
        write_object(path, values)
    except OSError as error:
        _LOG.warning("cannot save measured figures in %s: %s; every opening measures again", path.parent, error)


def cache_folder() -> Path:
    """Return the folder of measured figures."""
    return user_cache() / "curves"


def identity_key(identity: Identity) -> str:
    """Return a name that depends on everything that a time depends on. Raises BackendError for a GPU without a name."""
    machine = {
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": default_threads().count,
        **(_gpu() if identity.get("device") == "cuda" else {}),
    }
    return hashlib.sha256(json.dumps({**identity, **machine}, sort_keys=True).encode()).hexdigest()[:32]


def _gpu() -> dict[str, object]:
    """Return the GPU that engines run on, which is the first visible one."""
    found = find_gpu()
    return {"gpu": found.name, "compute_capability": found.compute_capability}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        return f"{named.get('model name', '')} {hashlib.sha256(named.get('flags', '').encode()).hexdigest()[:8]}"
    return platform.processor()


def measure_curve(
    verifier: Verifier, sizes: tuple[int, ...] = SIZES, seconds: float = _SECONDS, sequences: int | None = None
) -> CostCurve:
    """Measure the least time of each size over `sequences` sequences. Sizes take turns.

    This takes about `seconds`, or two calls of two sizes if these take longer. Larger sizes than the measured ones are
    extrapolated. It overwrites KV rows, so no request may be running.
    """
    batch = sequences or verifier.max_num_seqs
    fitting = [size for size in sizes if size <= min(verifier.max_model_len, verifier.largest_tree)]
    best: dict[int, float] = {}
    start = time.perf_counter()
    possible = [size for size in fitting if size * batch <= max(verifier.most_rows, batch)]
    for size in _most_telling(possible, batch):
        if len(best) >= _LEAST_SIZES and time.perf_counter() - start > seconds:
            break
        verifier.measure_ms(batch, size, MEASURED_KV_LEN)  # the first call of a size prepares it
        best[size] = verifier.measure_ms(batch, size, MEASURED_KV_LEN)
    for _ in range(_ROUNDS):
        for size, least in best.items():
            if time.perf_counter() - start > seconds:
                return CostCurve.from_points(best, fitting[-1])
            best[size] = min(least, verifier.measure_ms(batch, size, MEASURED_KV_LEN))
    return CostCurve.from_points(best, fitting[-1])


def _most_telling(sizes: list[int], sequences: int) -> list[int]:
    """Order sizes: one node, about eight rows in all, powers of two, all others."""
    first = (1, max(2, _FIRST_ROWS // sequences), *(size for size in sizes if size.bit_count() == 1))
    return [size for size in dict.fromkeys((*first, *sizes)) if size in sizes]


def measure_costs(verifier: Verifier) -> VerifyCosts:
    """Measure the curves of one sequence and of a full batch."""
    batches = sorted({1, verifier.max_num_seqs})
    curves = {n: measure_curve(verifier, seconds=_SECONDS / len(batches), sequences=n) for n in batches}
    return VerifyCosts(curves, packed=verifier.packed)


def load_costs(verifier: Verifier, identity: Identity) -> VerifyCosts:
    """Load the estimate of the last run with this `identity` on this machine; otherwise measure and save one."""
    path = _costs_file(identity, verifier.packed)
    if path is not None and path.exists():
        saved = read_figures(path)
        costs = parse_costs(saved, verifier) if saved and saved.get("identity") == dict(identity) else None
        if costs is not None:
            return costs
        _LOG.warning("%s holds no costs of these engines: they are measured again", path)
    costs = measure_costs(verifier)
    save_costs(costs, identity)
    return costs


def save_costs(costs: VerifyCosts, identity: Identity) -> None:
    """Save the measured curves and the estimated tables, unless the file holds nearly the same."""
    path = _costs_file(identity, costs.packed)
    saved = _curves((read_figures(path) or {}).get("believed"))
    if (
        saved
        and set(saved) <= set(costs.measured)
        and _fit(saved, {n: n * (costs.largest - 1) + 1 for n in saved})
        and costs.drift(saved) < _SAVED_DRIFT
    ):
        return
    measured = {str(n): curve.table_ms[1:] for n, curve in costs.measured.items()}
    estimated = {str(n): costs.table_ms(n)[1:] for n in costs.measured}
    write_figures(path, {"identity": dict(identity), "measured": measured, "believed": estimated})


def parse_costs(values: dict[str, Any] | None, verifier: Verifier) -> VerifyCosts | None:
    """Return the costs in a file's JSON; None if they do not fit the verifier or have another form."""
    measured, estimated = (_curves((values or {}).get(name)) for name in ("measured", "believed"))
    if measured is None or estimated is None or not set(measured) == set(estimated) == {1, verifier.max_num_seqs}:
        return None
    largest = max(size for size in SIZES if size <= min(verifier.max_model_len, verifier.largest_tree))
    if not _fit(measured, dict.fromkeys(measured, largest)):
        return None
    if not _fit(estimated, {n: n * (largest - 1) + 1 for n in estimated}):
        return None
    return VerifyCosts(measured, estimated, verifier.packed)


def _costs_file(identity: Identity, packed: bool) -> Path | None:
    return figures_file({**identity, "kv_len": MEASURED_KV_LEN, "costs": "packed rows" if packed else "padded rows"})


def _fit(curves: Mapping[int, CostCurve], lengths: Mapping[int, int]) -> bool:
    """True if the curve of each number of sequences has its length."""
    return all(curve.largest == lengths[n] for n, curve in curves.items())


def _curves(part: Any) -> dict[int, CostCurve] | None:
    try:
        return {int(n): CostCurve.from_points(dict(enumerate(map(float, ms), 1))) for n, ms in part.items()} or None
    except (ValueError, TypeError, AttributeError):
        return None


class TimedDrafter(Protocol):
    """A drafter with engines, whose calls can be timed."""

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """Return milliseconds of a draft with `rows` pending rows after `kv_len` ones, and of a resampling."""

    def load_one_thread(self) -> None:
        """Load what drafts on one of the host's threads need."""

    def draft_on_one_thread(self, one: bool) -> None:
        """Draft on one of the host's threads, or on all."""


def cached_costs(verifier: Verifier, drafter: TimedDrafter, identity: Identity, idle: bool = True) -> Costs | None:
    """Return the costs of a drafter's calls with this `identity` on this machine, measured once and saved.

    On a host with several threads, drafts have one from now on, unless all take clearly less time.
    idle: False if a request has a slot. Then nothing is measured, and unknown costs are None.
    """
    path, several = figures_file({**identity, "kv_len": MEASURED_KV_LEN}), verifier.device.host_threads > 1
    saved = _saved_draft(read_figures(path) or {})
    if saved is None and not idle:
        return None
    if several and (saved is None or saved[1]):
        drafter.load_one_thread()
    costs, one_thread = saved or _measured(verifier, drafter, several)
    if several:
        drafter.draft_on_one_thread(one_thread)
    if saved is None:
        write_figures(path, {**asdict(costs), "one_thread": one_thread})
    return costs


def _saved_draft(values: Mapping[str, Any]) -> tuple[Costs, bool] | None:
    """Return a drafter's costs and whether it drafts on one thread, from a file's JSON; None if it has another form."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        costs, one_thread = Costs(float(values["fresh_ms"]), float(values["resample_ms"])), values["one_thread"]
        if all(math.isfinite(ms) and ms >= 0 for ms in (costs.fresh_ms, costs.resample_ms)):
            return (costs, one_thread) if isinstance(one_thread, bool) else None
    return None


def _measured(verifier: Verifier, drafter: TimedDrafter, several: bool) -> tuple[Costs, bool]:
    """Return the least costs of a drafter's calls, and whether one thread is better than several.

    Calls of both kinds take turns, and alternate with the verifier's, as in decoding: there each call evicts the
    other's weights from the caches, and the host works in between. Decoding corrects times that are too low.
    """
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    start = time.perf_counter()
    while len(taken[False]) < _TURNS.stop and (
        len(taken[False]) < _TURNS.start or time.perf_counter() - start < _DRAFT_SECONDS * (1 + several)
    ):
        for one_thread in (False, True) if several else (False,):
            drafter.draft_on_one_thread(one_thread)
            verifier.measure_ms(1, _TYPICAL_NODES, MEASURED_KV_LEN)
            ready = time.perf_counter() + _HOST_SECONDS
            while time.perf_counter() < ready:
                pass
            taken[one_thread].append(drafter.measure_ms(_TYPICAL_ROWS, MEASURED_KV_LEN))
    usual = {kind: statistics.median([fresh for fresh, _ in times]) for kind, times in taken.items() if times}
    better = several and usual[False] > _CLEARLY_LESS * usual[True]
    return Costs(*(min(times) for times in zip(*taken[better], strict=True))), better
