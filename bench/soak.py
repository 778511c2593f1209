"""Soak: mixed load on a real `redraft serve` for minutes. Its texts, errors, memory and slots must stay as they should.

`python -m redraft.bench.soak --engines BUNDLE [--minutes 10]` prints a JSON object, and ends with status 1 if

- an answer differs from the oracle's: that of another server, which had the same request alone, without speculation.
  The text of a client that leaves must begin the oracle's.
- a right request fails, or a wrong one gets another status than it should.
- the server's memory grows by more than 1 MB a minute after the second minute (least squares).
- a request, a queued one or a row of the KV cache is left at the end, or the server counted a request that failed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from redraft.bench.command import as_json, one_line_errors
from redraft.bench.http_client import Client, Json
from redraft.bench.server_process import serving
from redraft.bench.soak_answers import oracle
from redraft.bench.soak_load import Load, Tally
from redraft.bench.soak_requests import requests_of
from redraft.errors import BackendError, UsageError

MODEL = "soak"
MOST_MB_A_MINUTE = 1.0
WARM_MINUTES = 2.0
"""Memory before this is not counted: buffers, caches and allocators grow to their sizes."""
_LEAST_MINUTES = 0.9
"""Time between the first and the last value of a slope. A run of three minutes has almost a minute."""
_IDLE_SECONDS = 60
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def soak(bundle: Path, minutes: float, clients: int, count: int, report: Callable[[str], None]) -> Json:
    """Return the figures of a soak. Raises BackendError if a server cannot start, or ends badly."""
    with serving(bundle, MODEL) as server:
        report(f"asking {count} requests alone")
        with Client(server.url) as client:
            most_tokens = min(48, max(1, _model(client)["max_model_len"] // 8))
        requests = requests_of(MODEL, count, 0, most_tokens)
        expected = [[one] for one in oracle(server.url, requests)]
    with serving(bundle, MODEL) as server:
        with Client(server.url) as client:
            methods = _model(client)["methods"]
        load = Load(server.url, requests, expected, methods)
        begun = time.monotonic()
        report(f"{clients} clients for {minutes:g} minutes, with the methods {', '.join(methods)}")

        def watch(tally: Tally) -> None:
            tally.memory.append((time.monotonic() - begun, resident_mb(server.pid)))

        load.run(clients, lambda: time.monotonic() - begun > minutes * 60, watch)
        with Client(server.url) as client:  # the server closes connections that are silent for some seconds
            left = wait_until_idle(client)
            metrics = client.get("/metrics")
    return summary(load.tally, left, metrics)


def _model(client: Client) -> Json:
    """Return the description of the served model."""
    found: Json = json.loads(client.get("/v1/models"))["data"][0]
    return found


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process, in MB of 10^6 bytes."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise BackendError("the server's process has ended")
    return int(found[1]) * 1024 / 1e6


def figure(metrics: str, name: str, **labels: str) -> float:
    """Return the sum of those series of a metric that have these labels."""
    samples = [one for family in text_string_to_metric_families(metrics) for one in family.samples]
    return sum(
        one.value for one in samples if one.name == f"redraft:{name}" and labels.items() <= one.labels.items()
    )  # fmt: skip


def wait_until_idle(client: Client, seconds: float = _IDLE_SECONDS) -> Json:
    """Wait until no request runs or waits, for so many seconds at most. Returns the gauges."""
    end = time.monotonic() + seconds
    while True:
        metrics = client.get("/metrics")
        left = {name: figure(metrics, name) for name in _GAUGES}
        if not any(left.values()) or time.monotonic() > end:
            return left
        time.sleep(0.1)


def slope(memory: Sequence[tuple[float, float]], after: float) -> float | None:
    """Return the growth in MB a minute after so many seconds by least squares; None if those are too few to tell."""
    found = [(seconds / 60, mb) for seconds, mb in memory if seconds >= after]
    if not found or found[-1][0] - found[0][0] < _LEAST_MINUTES:
        return None
    minutes, mb = zip(*found, strict=True)
    return float(np.polyfit(minutes, mb, 1)[0])


def by_minute(memory: Sequence[tuple[float, float]]) -> list[float]:
    """Return the first value of each minute, and the last value."""
    firsts = {int(seconds // 60): mb for seconds, mb in reversed(memory)}
    return [firsts[minute] for minute in sorted(firsts)] + [mb for _, mb in memory[-1:]]


def summary(tally: Tally, left: Json, metrics: str) -> Json:
    """Return the figures. `ok` is true if all is as it should be.

    left: gauges at the end.   metrics: the server's last page of metrics.
    """
    growth = slope(tally.memory, WARM_MINUTES * 60)
    failed = sum(figure(metrics, "request_success_total", finished_reason=reason) for reason in ("error", "timeout"))
    counts = {name: tally.counts[name] for name in ("answers", "left", "refused", "different", "errors")}
    return {
        "ok": bool(counts["answers"]) and not (counts["different"] or counts["errors"] or any(left.values()) or failed)
              and (growth is None or growth < MOST_MB_A_MINUTE),
        **counts,
        "failed_in_the_server": failed,
        "left_at_the_end": left,
        "memory_mb": by_minute(tally.memory),
        "memory_mb_a_minute": growth,
        "reasons": tally.wrong,
    }  # fmt: skip


def main() -> None:
    """Run a soak, print its figures, and end with status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12, help="more than the server's slots, so that some wait")
    parser.add_argument("--requests", type=int, default=200, help="different ones")
    asked = parser.parse_args()
    if asked.minutes <= 0 or asked.clients < 1 or asked.requests < 1:
        raise UsageError("--minutes, --clients and --requests must be positive")
    figures = soak(
        asked.engines, asked.minutes, asked.clients, asked.requests, lambda line: print(line, file=sys.stderr)
    )
    print(as_json(figures))
    sys.exit(not figures["ok"])


if __name__ == "__main__":
    with one_line_errors():
        main()
