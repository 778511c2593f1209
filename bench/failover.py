"""Failover: replicas of a real `redraft serve --replicas N` are killed under load. No text may differ, no request fail.

`python -m redraft.bench.failover --engines BUNDLE [--kills 20]` prints a JSON object, and ends with status 1 if

- an answer differs from the oracle's: that of the same request alone, without speculation, before the first kill.
  The text of a client that leaves must begin the oracle's.
- a right request fails.
- a replica was killed less often than asked.

Clients are those of the soak (`redraft.bench.soak`). A kill is SIGKILL at a random moment at which all replicas work.
`at_kills` counts the states of all requests at the kills: `waiting` before the first token. `calls_lost` counts
requests that lost their replica. `gap_s` is the longest wait between two events of a stream.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from redraft.bench.command import as_json, one_line_errors
from redraft.bench.http_client import Client, Json
from redraft.bench.server_process import serving
from redraft.bench.soak import MODEL, figure, wait_until_idle
from redraft.bench.soak_answers import oracle
from redraft.bench.soak_load import Load, Tally
from redraft.bench.soak_requests import requests_of
from redraft.errors import UsageError

_REPLICA = b"ray::ServeReplica"
_PAUSE_SECONDS = (0.5, 3.0)
"""Between the moment when all replicas live, and a kill, at least."""
_RESTART_SECONDS = 120.0


@dataclass
class Killer:
    """Kills replicas of a server.   at: states of requests at the kills."""

    server: int
    replicas: int
    kills: int
    draw: random.Random
    at: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    _next: float = 0.0
    _begun: float = field(default_factory=time.monotonic)

    def over(self) -> bool:
        """Return true if all kills are done, and all replicas are back, or if they do not come back in time."""
        now = time.monotonic()
        if now - self._begun > _RESTART_SECONDS * (1 + self.kills):
            return True
        return self.killed >= self.kills and now > self._next and len(replicas_of(self.server)) >= self.replicas

    def kill(self, rows: Callable[[], list[Json]]) -> None:
        """Kill a replica if it is time to.   rows: of the requests that run."""
        now, found = time.monotonic(), replicas_of(self.server)
        if len(found) < self.replicas or self.killed >= self.kills:
            return
        if not self._next:
            self._next = now + self.draw.uniform(*_PAUSE_SECONDS)
        if now < self._next:
            return
        states = rows()
        if len({row["replica"] for row in states} - {""}) < self.replicas:
            return  # an idle one would lose nothing
        os.kill(self.draw.choice(found), signal.SIGKILL)
        self.at.update(row["state"] for row in states)
        self.killed += 1
        self._next = 0.0 if self.killed < self.kills else now + _PAUSE_SECONDS[1]


def replicas_of(server: int, deployment: str = "") -> list[int]:
    """Return the process ids of the replicas that a server has started, of one deployment or of all."""
    parents: dict[int, int] = {}
    named = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            title = (folder / "cmdline").read_bytes()
            if title.startswith(_REPLICA) and deployment.encode() in title:
                named.append(pid)
        except (OSError, ValueError):
            continue  # it has ended
    return [pid for pid in named if server in _ancestors(pid, parents)]


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while pid in parents:
        pid = parents[pid]
        found.append(pid)
    return found


def failover(bundle: Path, replicas: int, kills: int, clients: int, count: int, report: Callable[[str], None]) -> Json:
    """Return the figures. Raises BackendError if the server cannot start, or ends badly."""
    with serving(bundle, MODEL, ["--replicas", str(replicas)]) as server:
        report(f"asking {count} requests alone")
        with Client(server.url) as client:
            model = json.loads(client.get("/v1/models"))["data"][0]
            requests = requests_of(MODEL, count, 0, min(96, max(1, model["max_model_len"] // 4)))
        expected = [[one] for one in oracle(server.url, requests)]
        killer = Killer(server.pid, replicas, kills, random.Random(0))
        load = Load(server.url, requests, expected, model["methods"])
        report(f"{clients} clients, {kills} kills")
        with Client(server.url) as client:

            def watch(tally: Tally) -> None:
                before = killer.killed
                killer.kill(lambda: json.loads(client.get("/batch"))["requests"])
                if killer.killed > before:
                    report(f"killed {killer.killed}: {tally.counts['answers']} answers so far")

            load.run(clients, killer.over, watch)
        with Client(server.url) as client:
            left = wait_until_idle(client)
            metrics = client.get("/metrics")
    counts = {name: load.tally.counts[name] for name in ("answers", "left", "refused", "different", "errors")}
    return {
        "ok": killer.killed == kills and bool(counts["answers"])
              and not (counts["different"] or counts["errors"] or any(left.values())),
        "kills": killer.killed,
        "at_kills": dict(killer.at),
        "calls_lost": figure(metrics, "replica_calls_lost_total"),
        **counts,
        "left_at_the_end": left,
        "gap_s": gaps(load.tally.gaps),
        "reasons": load.tally.wrong,
    }  # fmt: skip


def gaps(seconds: Sequence[float]) -> Json:
    """Return percentiles of the streams' longest waits, in seconds."""
    shares = (("p50", 50), ("p99", 99), ("max", 100))
    return {name: round(float(np.percentile(seconds, share)), 3) for name, share in shares} if seconds else {}


def main() -> None:
    """Kill replicas under load, print the figures, and end with status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=60, help="different ones")
    asked = parser.parse_args()
    if asked.replicas < 2 or min(asked.kills, asked.requests) < 1 or asked.clients < asked.replicas:
        raise UsageError(
            "--replicas must be at least 2, --kills and --requests positive, --clients at least --replicas"
        )
    figures = failover(
        asked.engines, asked.replicas, asked.kills, asked.clients, asked.requests,
        lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    print(as_json(figures))
    sys.exit(not figures["ok"])


if __name__ == "__main__":
    with one_line_errors():
        main()
