"""Prometheus metrics of a server: docs/serving-metrics.md says what each one means.

The loop's thread only notes times. Counts are read from the requests when the metrics are rendered.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import get_args

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.requests.request import FinishReason, Request
from redraft.runtime.server.served import Served

PREFIX = "redraft:"
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
"""Of `ServerMetrics.render`."""
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
            80.0, 160.0, 640.0, 2560.0)  # fmt: skip
"""Bounds of buckets: those of vLLM's time to first token."""
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
"""Bounds of buckets: those of vLLM's inter-token latency, and smaller ones, since small models take less on a CPU."""


@dataclass(slots=True)
class Sums:
    """Sums over requests.

    accepted_at: accepted tokens by depth, from 0.   ends: requests that ended, by reason.
    """

    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, request: Request) -> None:
        """Add a request that ran or runs."""
        counters = request.counters
        self.steps += counters.steps
        self.tokens += len(request.tokens) - request.prompt_length
        if request.admitted:
            self.prompt_tokens += request.prompt_length
            self.cached_tokens += request.cached_tokens
        self.drafts += counters.spec_steps
        self.drafted += counters.drafted
        self.accepted += counters.accepted
        for accepted, steps in enumerate(tuple(counters.histogram)):
            self.accepted_at += [0] * (accepted - len(self.accepted_at))
            for depth in range(accepted):
                self.accepted_at[depth] += steps


class ServerMetrics:
    """The metrics of one server, in a registry of its own. All methods may be called from any thread."""

    def __init__(self, runtime: Served, model_name: str) -> None:
        self._model_name = model_name
        self._runtime = runtime
        self._ended = Sums()
        self._latest: dict[Request, float] = {}
        """When running requests got their latest tokens."""
        self._lock = threading.Lock()
        """Of both. Only the loop's thread goes without it, to add a request or to change its time."""
        self.registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", _SECONDS
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Time between two outputs of a request. An output has all tokens of a step.",
            _STEP_SECONDS,
        )  # fmt: skip
        self._queued = self._histogram("request_queue_time_seconds", "Time from arrival to a slot.", _SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Time from arrival to the end.", _SECONDS)
        self._prompt_tokens = prometheus_client.Counter(
            PREFIX + "prompt_tokens", "Tokens of prompts that arrived.", ["model_name"], registry=self.registry
        ).labels(model_name)
        self._refused = prometheus_client.Counter(
            PREFIX + "requests_refused", "Requests that were refused.", ["model_name", "reason"],
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> prometheus_client.Histogram:
        metric = prometheus_client.Histogram(
            PREFIX + name, text, ["model_name"], buckets=bounds, registry=self.registry
        )
        return metric.labels(self._model_name)

    def arrived(self, prompt_tokens: int) -> None:
        """Count a request that was accepted."""
        self._prompt_tokens.inc(prompt_tokens)

    def refused(self, reason: str) -> None:
        """Count a request that was refused. `reason` is one of few words, since each one is a series."""
        self._refused.labels(self._model_name, reason).inc()

    def output(self, request: Request, output: RequestOutput) -> None:
        """Note the time of an output, in the loop's thread. It takes 2 µs, and 3 µs at the end of a request."""
        now = time.perf_counter()
        if output.token_ids:
            if len(request.tokens) - request.prompt_length == len(output.token_ids):
                self._first_token.observe(now - request.started)
            elif (before := self._latest.get(request)) is not None:
                self._between.observe(now - before)
            if output.finish_reason is None:
                self._latest[request] = now
        if output.finish_reason is not None:
            self._queued.observe((request.admitted or now) - request.started)
            self._whole.observe(now - request.started)

    def ended(self, request: Request) -> None:
        """Count a request that has ended. To be called once for each, before or after its last `output`."""
        with self._lock:
            self._latest.pop(request, None)
            self._ended.add(request)
            self._ended.ends[str(request.finish_reason)] += 1

    def render(self) -> bytes:
        """Return the text of /metrics, of CONTENT_TYPE. Raises UsageError if the runtime is closed."""
        return prometheus_client.generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read when they are rendered."""
        health, gain, sums = self._runtime.health, self._runtime.gain, self.sums()
        waiting = min(health.waiting, health.requests)  # it was read later
        yield self._gauge("num_requests_running", "Requests with a slot.", health.requests - waiting)
        yield self._gauge("num_requests_waiting", "Requests without a slot.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Filled share of the KV rows of requests.", health.kv_usage)
        for name, text, count in (
            ("generation_tokens", "Tokens of answers.", sums.tokens),
            ("request_steps", "Steps of requests. A step verifies one tree of each request.", sums.steps),
            ("prefix_cache_queries", "Tokens of prompts that were looked up among earlier ones.", sums.prompt_tokens),
            ("prefix_cache_hits", "Tokens of prompts whose rows were there.", sums.cached_tokens),
            ("spec_decode_num_drafts", "Steps of requests that verified a draft.", sums.drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens that were verified.", sums.drafted),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", sums.accepted),
            ("decode_seconds", "Time of steps whose drafts adapt.", gain.spent_ms / 1e3),
            ("plain_decode_seconds", "Time in which plain steps would bring their tokens.", gain.plain_ms / 1e3),
        ):
            yield self._counter(name, text, {"": count})
        if (lost := self._runtime.calls_lost) is not None:
            yield self._counter(
                "replica_calls_lost", "Requests that lost their replica, and went on or failed.", {"": lost}
            )
        at = {str(depth): count for depth, count in enumerate(sums.accepted_at)}
        text = "Accepted tokens by their depth in the draft, from 0."
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", text, at, "position")
        ends = {reason: sums.ends[reason] for reason in get_args(FinishReason)}
        yield self._counter("request_success", "Requests that ended, failed ones too.", ends, "finished_reason")

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, counts: Mapping[str, float], label: str | None = None) -> Metric:
        """Return a counter with one series for each value of `label`."""
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", *([label] if label else [])])
        for value, count in counts.items():
            family.add_metric([self._model_name, *([value] if label else [])], count)
        return family

    def sums(self) -> Sums:
        """Return the sums over all requests, running ones included. They never decrease."""
        with self._lock:
            sums, running = deepcopy(self._ended), list(self._latest)
        for request in running:
            sums.add(request)
        return sums
