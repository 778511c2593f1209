"""What a server costs: throughput over HTTP against the same runtime in the process, latencies, and texts under load.

`python -m redraft.bench.serving --engines BUNDLE --prompts FILE…` opens the bundle once, and serves it in a thread. The
load driver is a process of its own on the same cores. Blocks of equal requests alternate between both ways, and the
ratio comes from pairs of blocks. First, one client asks for every prompt alone: the quiet load.

`--url URL --model NAME` instead of `--engines` measures any server with OpenAI's completions, without the ratio.

- `ratio`: throughput over HTTP / in the process, with its 95 % interval.
- `gap_ms`: between two events of a stream. `p99_over_quiet_p50` is that of the load over the median of the quiet load.
- `first_event_ms`: from sending a request to its first event.
- `changed`: share of texts that differ from those of the quiet load.
- `cache_salt`: of `--url`; false if the server is none of redraft. Others may then find rows of earlier prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from redraft.bench.command import run
from redraft.bench.compare import Settings
from redraft.bench.http_client import Client
from redraft.bench.http_load import Answered, Driver, timing
from redraft.bench.load import Traffic, in_blocks, requests_of_blocks, spread, times_ms
from redraft.bench.prompts import load_prompts
from redraft.bench.statistics import Timing, rate_of, speedup
from redraft.errors import UsageError
from redraft.runtime import Runtime
from redraft.runtime.server.process import serve_in_thread
from redraft.runtime.server.settings import ServerSettings

MODEL = "served"
IN_PROCESS, OVER_HTTP = "in process", "http"


def measure(
    runtime: Runtime, prompts: Sequence[Sequence[int]], max_new_tokens: int, method: str, driver: Driver
) -> dict[str, Any]:
    """Return the figures of a bundle. prompts: token ids.   method: of speculation, `none` for none."""
    clients, limits = runtime.verifier.max_num_seqs, spread(max_new_tokens, len(prompts))
    bodies = [
        {"model": MODEL, "prompt": list(ids), "max_tokens": limit, "temperature": 0, "ignore_eos": True,
         "speculative_config": {"method": method}}
        for ids, limit in zip(prompts, limits, strict=True)
    ]  # fmt: skip
    with serve_in_thread(runtime, ServerSettings(MODEL, port=0)) as (url, server):
        settings = Settings(replace(server.service.defaults, max_tokens=max_new_tokens, temperature=0, ignore_eos=True))
        quiet = driver.run(url, _salted(bodies), 1)
        timings: dict[str, list[Timing]] = {IN_PROCESS: [], OVER_HTTP: []}
        loaded: list[tuple[int, Answered]] = []
        for number, way, requests in in_blocks([*timings], len(prompts), clients):
            print(f"block {number + 1}, {way}", file=sys.stderr)
            if way == IN_PROCESS:
                block = Traffic(runtime, prompts, method, settings, limits).run(requests, clients)
                timings[way].append(block.timing)
            else:
                answers = driver.run(url, _salted([bodies[one] for one in requests]), clients)
                timings[way].append(timing(answers))
                loaded += zip(requests, answers, strict=True)
    found = speedup(timings[IN_PROCESS], timings[OVER_HTTP])
    return {
        "clients": clients, "method": method, "ratio": found.ratio, "ratio_interval": found.interval,
        "tokens_per_second": found.rate, "in_process_tokens_per_second": found.base_rate, **latencies(quiet, loaded),
    }  # fmt: skip


def measure_url(
    url: str, model: str, prompts: Sequence[str], max_new_tokens: int, clients: int, driver: Driver
) -> dict[str, Any]:
    """Return the figures of a server that runs already."""
    limits = spread(max_new_tokens, len(prompts))
    bodies = [
        {"model": model, "prompt": text, "max_tokens": limit, "temperature": 0}
        for text, limit in zip(prompts, limits, strict=True)
    ]
    with Client(url) as client:
        is_salted = any("default_method" in one for one in json.loads(client.get("/v1/models"))["data"])
    prepared = _salted if is_salted else list
    quiet = driver.run(url, prepared(bodies), 1)
    timings, loaded = list[Timing](), list[tuple[int, Answered]]()
    for requests in requests_of_blocks(len(prompts), clients):
        answers = driver.run(url, prepared([bodies[one] for one in requests]), clients)
        timings.append(timing(answers))
        loaded += zip(requests, answers, strict=True)
    return {
        "clients": clients, "cache_salt": is_salted, "tokens_per_second": rate_of(timings), **latencies(quiet, loaded)
    }  # fmt: skip


def _salted(bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return bodies that share no rows of earlier prompts."""
    return [{**body, "cache_salt": uuid4().hex} for body in bodies]


def latencies(quiet: Sequence[Answered], loaded: Sequence[tuple[int, Answered]]) -> dict[str, Any]:
    """Return latencies of both loads, and the share of texts that changed.

    loaded: answers with the index of their prompts.
    """
    answers = [answer for _, answer in loaded]
    found = {name: _times(each) for name, each in (("quiet", quiet), ("loaded", answers))}
    gaps = [found[name]["gap_ms"] for name in ("quiet", "loaded")]
    changed = [quiet[prompt].text != answer.text for prompt, answer in loaded]
    return {
        **found,
        "p99_over_quiet_p50": gaps[1]["p99"] / gaps[0]["p50"] if all(gaps) else None,
        "changed": sum(changed) / len(changed),
        "texts": len(changed),
    }


def _times(answers: Sequence[Answered]) -> dict[str, Any]:
    return {
        "first_event_ms": times_ms([one.outputs[0] - one.submitted for one in answers if one.outputs]),
        "gap_ms": times_ms([gap for one in answers for gap in np.diff(one.outputs)]),
    }


def main() -> dict[str, Any]:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, help="an engine bundle")
    parser.add_argument("--url", help="of a server to measure instead, without /v1")
    parser.add_argument("--model", help="the model's name on that server")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--limit", type=int, default=8, help="at most this many prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--method", help="of speculation; the bundle's default")
    parser.add_argument("--threads", type=int, help="of the engine")
    asked = parser.parse_args()
    if (asked.engines is None) == (asked.url is None) or (asked.url is None) != (asked.model is None):
        raise UsageError("give --engines, or --url with --model")
    texts = [prompt.text for prompt in load_prompts(asked.prompts, asked.limit)]
    with Driver() as driver:
        if asked.url is not None:
            return measure_url(asked.url, asked.model, texts, asked.max_new_tokens, asked.clients, driver)
        with Runtime.open(asked.engines, threads=asked.threads, max_num_seqs=asked.clients) as runtime:
            runtime.warm()
            most = runtime.max_model_len - asked.max_new_tokens
            prompts = [runtime.tokenizer.encode(text)[:most] for text in texts]
            return measure(runtime, prompts, asked.max_new_tokens, asked.method or runtime.default_method, driver)


if __name__ == "__main__":
    run(main)
