"""Changes of a live application of Ray Serve under load: its bundle, its number of replicas. No request may fail.

`python -m redraft.bench.rollout --engines BUNDLE --other BUNDLE` prints a JSON object, and ends with status 1 if one of
`checks` is false. Each answer must be that of the same request alone by the build which the answer names. It needs two
cores, and the bundles should differ in precision only.

`serve run` starts two replicas of the first bundle. Under the load of `redraft.bench.soak` the application changes:
to the other bundle, to one replica, and to a number of replicas that follows the load.

`stages`: seconds that each change took. `processors`: those of each replica's threads. `router`: milliseconds until a
replica has taken a call and until its first tokens, through `PrefixRouter` and through Serve's own router, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from redraft import __version__
from redraft.bench.command import as_json, one_line_errors
from redraft.bench.failover import gaps, replicas_of
from redraft.bench.http_client import Client, Json
from redraft.bench.server_process import serving
from redraft.bench.soak import MODEL, figure, wait_until_idle
from redraft.bench.soak_answers import Choices, oracle
from redraft.bench.soak_load import Load
from redraft.bench.soak_requests import Asked, requests_of
from redraft.cpus import cores_of
from redraft.engines.manifest import load_manifest
from redraft.errors import BackendError, UsageError
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.runtime.replicas.calls import Call, Started, identity_of
from redraft.runtime.server.ray_app import AppSettings, build, required_ray

_ENGINE, _WAIT_SECONDS, _SETTLED_SECONDS = "engine-0", 240.0, 5.0
_SPARE_PROCESSORS = 4
"""More than Ray counts here: the front's, and a second front's while they change."""


def rollout(bundle: Path, other: Path, clients: int, count: int, calls: int, report: Callable[[str], None]) -> Json:
    """Return the figures. Raises UsageError for one core, and BackendError if the application does not start."""
    if len(cores_of(os.sched_getaffinity(0))) < 2:
        raise UsageError("two replicas need two cores")
    report(f"asking {count} requests of each bundle alone")
    requests: list[Asked] = []
    answers = []
    for folder in (bundle, other):
        with serving(folder, MODEL) as server:
            requests = requests or requests_of(MODEL, count, 0, 48)
            answers.append(oracle(server.url, requests))
    if answers[0][0].build == answers[1][0].build:
        raise UsageError(f"{bundle} and {other} are one build", "give bundles of two precisions")
    ray = required_ray()
    ray.init(
        "local", num_cpus=len(os.sched_getaffinity(0)) + _SPARE_PROCESSORS, include_dashboard=False,
        log_to_driver=False, logging_level="ERROR", object_store_memory=100 << 20, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        found = _changes(ray, (bundle, other), clients, requests, answers, report)
        if calls:
            report(f"{calls} calls through each router")
            found["router"] = _routers(bundle, calls)
        return found
    finally:
        ray.shutdown()


def _changes(
    ray: Any, bundles: tuple[Path, Path], clients: int, requests: list[Asked], answers: list[list[Choices]],
    report: Callable[[str], None],
) -> Json:  # fmt: skip
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    url, stages, checks = f"http://127.0.0.1:{port}", dict[str, float](), dict[str, bool]()

    def build_of() -> str | None:
        choices = Choices()
        try:
            with Client(url) as client:
                choices.add(client.ask(requests[0].path, requests[0].fields))
        except BackendError:
            return None
        return choices.build

    def change(stage: str, bundle: Path, is_done: Callable[[], bool], **more: Any) -> None:
        begun = time.monotonic()
        report(stage)
        settings = AppSettings.model_validate({"bundle": bundle, "name": MODEL, **more})
        serve.run(build(settings), name="default", blocking=False)
        checks[stage] = _until(is_done)
        stages[stage] = round(time.monotonic() - begun, 1)
        time.sleep(_SETTLED_SECONDS)  # answers after the change count, too

    def all_changes() -> None:
        first, other = bundles
        change("bundle", other, lambda: build_of() == answers[1][0].build and _count() == 2, replicas=2)
        change("fewer", other, lambda: _count() == 1, replicas=1)
        change("load", other, lambda: _count() == 2, replicas=1, max_replicas=2, max_num_seqs=4)
        change("back", first, lambda: build_of() == answers[0][0].build and _count() == 1, replicas=1)

    with _serve_run(ray, bundles[0], url) as process:
        report("started by `serve run`")
        checks["run"] = build_of() == answers[0][0].build and _until(lambda: _count() == 2)
        processors = {pid: allowed_processors(pid) for pid in _replicas()}
        checks["processors"] = apart(processors)
        with Client(url) as client:
            methods = [str(one) for one in _model(client)["methods"]]
        load = Load(url, requests, [list(pair) for pair in zip(*answers, strict=True)], methods)
        with ThreadPoolExecutor(1) as pool:
            changing = pool.submit(all_changes)
            load.run(clients, changing.done, lambda tally: None)
            changing.result()
        with Client(url) as client:
            checks["idle"] = not any(wait_until_idle(client).values())
            lost = figure(client.get("/metrics"), "replica_calls_lost_total")
        process.send_signal(signal.SIGINT)
        checks["end"] = _until(lambda: process.poll() is not None and not _replicas()) and not process.returncode
    counts = {name: load.tally.counts[name] for name in ("answers", "left", "refused", "different", "errors")}
    checks["texts"] = bool(counts["answers"]) and not (counts["different"] or counts["errors"])
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "stages": stages,
        "processors": {pid: sorted(map(sorted, found)) for pid, found in processors.items()},
        "calls_lost": lost,
        **counts,
        "gap_s": gaps(load.tally.gaps),
        "reasons": load.tally.wrong,
    }


@contextmanager
def _serve_run(ray: Any, bundle: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start an application as a user does, and wait until it is ready."""
    command = [
        str(Path(sys.executable).with_name("serve")), "run", "--address", ray.get_runtime_context().gcs_address,
        "redraft.runtime.server.ray_app:build", f"bundle={bundle}", f"name={MODEL}", "replicas=2",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            if not _until(lambda: process.poll() is not None or _is_ready(url)) or process.poll() is not None:
                raise BackendError(f"`serve run` did not start the application: status {process.poll()}")
            yield process
        finally:
            process.kill()


def _is_ready(url: str) -> bool:
    try:
        with Client(url) as client:
            client.get("/ready")
    except BackendError:
        return False
    return True


def _model(client: Client) -> Json:
    found: Json = json.loads(client.get("/v1/models"))["data"][0]
    return found


def _until(is_done: Callable[[], bool]) -> bool:
    """Wait until something is so. Returns false if that takes too long."""
    end = time.monotonic() + _WAIT_SECONDS
    while not (found := is_done()) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def _replicas() -> list[int]:
    return replicas_of(os.getpid(), _ENGINE)


def _count() -> int:
    return len(_replicas())


def allowed_processors(pid: int) -> set[frozenset[int]]:
    """Return the processors on which threads of a process may run, each set of them once."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.add(frozenset(os.sched_getaffinity(int(thread.name))))
        except ProcessLookupError:
            continue  # it has ended
    return found


def apart(processors: Mapping[int, set[frozenset[int]]]) -> bool:
    """Return true if all threads of each process have one set of processors, and no two processes share one."""
    sets = [one for found in processors.values() for one in found]
    each_has_one = all(len(found) == 1 for found in processors.values())
    return each_has_one and len(frozenset().union(*sets)) == sum(map(len, sets))


def _routers(bundle: Path, calls: int) -> Json:
    """Return the milliseconds of calls by our router and Serve's own, two replicas each, in turns."""
    from ray import serve

    from redraft.runtime.replicas.ray_serve import Engine, ServeReplicas, engine_deployment

    manifest = load_manifest(bundle)
    options = {"max_num_seqs": 4, "threads": 1}
    ours = engine_deployment(bundle, options, replicas=2, cores=1, name="ours")
    own: Any = serve.deployment(Engine, name="own", num_replicas=2, max_ongoing_requests=1 << 20)
    default = own.bind(str(bundle.resolve()), manifest.build_key, options, 0, 30.0)
    routers = {
        name: ServeReplicas(serve.run(application, name=name, route_prefix=None))
        for name, application in (("prefix", ours), ("serve", default))
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in routers}

    async def one(replicas: ServeReplicas, number: int) -> tuple[float, float]:
        prompt = tuple(3 + (number * 31 + place) % 500 for place in range(40))
        call = Call(
            prompt, SamplingParams(max_tokens=2), SpeculationParams(), __version__, identity_of(manifest, "").tokens
        )  # fmt: skip
        begun, taken = time.perf_counter(), 0.0
        async with aclosing(replicas.run(call)) as answers:
            async for answer in answers:
                if isinstance(answer, Started):
                    taken = time.perf_counter() - begun
                elif not taken:
                    raise BackendError(f"a call was not taken: {answer}")
                else:
                    break
        return taken * 1e3, (time.perf_counter() - begun) * 1e3

    async def turns() -> None:
        for number in range(-4, calls):  # the first ones open connections
            for name in sorted(routers, reverse=number % 2 == 0):
                found = await one(routers[name], number)
                if number >= 0:
                    times[name].append(found)

    asyncio.run(turns())
    return {
        name: dict(zip(("taken_ms", "first_ms"), np.median(np.array(found), axis=0).round(2).tolist(), strict=True))
        for name, found in times.items()
    }


def main() -> None:
    """Change an application under load, print the figures, and end with status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("--other", type=Path, required=True, help="another bundle, of the same tokenizer")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=60, help="different ones")
    parser.add_argument("--calls", type=int, default=100, help="to measure the router with; 0 to leave that out")
    asked = parser.parse_args()
    if min(asked.clients, asked.requests) < 1 or asked.calls < 0:
        raise UsageError("--clients and --requests must be positive, and --calls not negative")
    with redirect_stdout(sys.stderr):  # Ray prints what its actors say
        figures = rollout(
            asked.engines, asked.other, asked.clients, asked.requests, asked.calls,
            lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
    print(as_json(figures))
    sys.exit(not figures["ok"])


if __name__ == "__main__":
    with one_line_errors():
        main()
