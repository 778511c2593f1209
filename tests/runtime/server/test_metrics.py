"""What /metrics shows, next to the requests themselves, over the toy verifier."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from redraft.errors import UsageError
from redraft.runtime import Runtime, SpeculationParams, Submission
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.requests.request import Request
from redraft.runtime.server.metrics import ServerMetrics
from tests.runtime.fakes import greedy, make_runtime, script
from tests.runtime.server.serving import WAIT, Gate

VLLM = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "request_success_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket")  # fmt: skip
"""Names as vLLM's server shows them, without its prefix."""
OWN = ("request_steps_total", "requests_refused_total", "decode_seconds_total", "plain_decode_seconds_total")
CYCLE = b"abcdefgh" * 40


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime(script(CYCLE, 9), max_model_len=400, max_num_seqs=2) as found:
        yield found


def shown(metrics: ServerMetrics, **labels: str) -> dict[str, float]:
    """Return the series that have all of these labels, by name without the prefix."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "toy"
            if labels.items() <= sample.labels.items():
                found[sample.name.removeprefix("redraft:")] = sample.value
    return found


def served(
    runtime: Runtime, metrics: ServerMetrics, prompt: list[int], tokens: int = 60, method: str = "ngram"
) -> Submission:
    """Submit a request as a server does."""
    metrics.arrived(len(prompt))
    return runtime.submit(
        prompt, greedy(tokens), method, on_output=lambda output: metrics.output(output.request, output)
    )


def unserved(runtime: Runtime) -> Request:
    """Return a request that no loop knows."""
    return runtime.requests([[97, 98]], [(greedy(9), SpeculationParams("none"))])[0]


def wait_for_outputs(runtime: Runtime) -> None:
    """Wait until all outputs were delivered, also those of requests that are done."""
    with runtime._thread.paused():
        pass


def test_names_are_those_of_vllm_where_it_has_them(runtime: Runtime) -> None:
    metrics = ServerMetrics(runtime, "toy")
    served(runtime, metrics, [*b"abcdefgh "]).result(30)
    metrics.refused("queue")
    wait_for_outputs(runtime)
    assert set(shown(metrics)) >= {*VLLM, *OWN}


def test_counts_are_those_of_the_requests(runtime: Runtime) -> None:
    metrics, prompt = ServerMetrics(runtime, "toy"), [*b"abcdefgh "]
    requests = [served(runtime, metrics, prompt, tokens, method) for tokens, method in ((60, "ngram"), (40, "none"))]
    done = [one.result(30) for one in requests]
    requests.append(served(runtime, metrics, [*prompt, *CYCLE[:50]], 7))
    done.append(requests[2].result(30))
    wait_for_outputs(runtime)
    for one in requests:
        metrics.ended(one.request)
    found = shown(metrics)
    assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"] == 9 + 9 + 59
    assert found["prefix_cache_hits_total"] == done[2].cached_tokens >= 32
    assert found["generation_tokens_total"] == 60 + 40 + 7
    assert found["request_steps_total"] == sum(one.metrics.num_steps for one in done) < 60 + 40 + 7
    assert found["spec_decode_num_drafts_total"] == sum(one.metrics.num_spec_steps for one in done) > 0
    assert found["spec_decode_num_draft_tokens_total"] == sum(one.metrics.num_draft_tokens for one in done)
    accepted = sum(one.metrics.num_accepted_draft_tokens for one in done)
    assert found["spec_decode_num_accepted_tokens_total"] == accepted > 0
    histograms = [one.metrics.acceptance_histogram for one in done]
    for depth in range(max(map(len, histograms)) - 1):
        at_depth = shown(metrics, position=str(depth))["spec_decode_num_accepted_tokens_per_pos_total"]
        assert at_depth == sum(sum(histogram[depth + 1 :]) for histogram in histograms) > 0
    assert shown(metrics, finished_reason="length")["request_success_total"] == 3
    assert shown(metrics, finished_reason="abort")["request_success_total"] == 0
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_count"] == found["request_steps_total"] - 3


def test_running_requests_count_when_the_metrics_are_read_and_once() -> None:
    gate = Gate(free=12)
    with make_runtime(gate, max_model_len=100) as runtime:
        metrics = ServerMetrics(runtime, "toy")
        running, waiting = (served(runtime, metrics, [97] * 10, 20, "none") for _ in range(2))
        assert gate.reached.wait(WAIT)
        found = shown(metrics)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (1, 1)
        assert found["kv_cache_usage_perc"] == 12 / 100
        assert found["generation_tokens_total"] == found["request_steps_total"] == 3
        waiting.abort()
        gate.opened.set()
        running.result(30)
        waiting.result(30)
        wait_for_outputs(runtime)
        assert shown(metrics)["generation_tokens_total"] >= 3
        for one in (running, waiting):
            metrics.ended(one.request)
        found = shown(metrics)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)
        assert found["generation_tokens_total"] == 20
        assert found["prefix_cache_queries_total"] == 10  # the other one was never looked up
        assert shown(metrics, finished_reason="abort")["request_success_total"] == 1


def test_times_are_from_arrival_and_between_outputs(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output has several tokens, which come together. The time in the queue ends with the slot."""
    metrics, clock = ServerMetrics(runtime, "toy"), iter([10.5, 10.75, 11.75])
    request = unserved(runtime)
    request.started, request.admitted = 10.0, 10.125
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for made, reason in ((1, None), (3, None), (2, "length")):
        request.tokens += [97] * made
        metrics.output(request, RequestOutput(request, (97,) * made, None, reason))
    monkeypatch.undo()
    found = shown(metrics)
    names = ("request_queue_time", "time_to_first_token", "inter_token_latency", "e2e_request_latency")
    assert [found[f"{name}_seconds_sum"] for name in names] == [0.125, 0.5, 1.25, 1.75]
    assert [found[f"{name}_seconds_count"] for name in names] == [1, 1, 2, 1]
    assert shown(metrics, le="0.2")["inter_token_latency_seconds_bucket"] == 0
    assert shown(metrics, le="0.3")["inter_token_latency_seconds_bucket"] == 1


def test_a_request_that_never_got_a_slot_was_in_the_queue_all_the_time(runtime: Runtime) -> None:
    metrics = ServerMetrics(runtime, "toy")
    request = unserved(runtime)
    request.started = time.perf_counter() - 5
    metrics.output(request, RequestOutput(request, (), None, "timeout"))
    found = shown(metrics)
    assert 5 <= found["request_queue_time_seconds_sum"] == found["e2e_request_latency_seconds_sum"] < 60
    assert found["time_to_first_token_seconds_count"] == 0


def test_a_server_may_count_the_end_before_the_last_output_arrives(runtime: Runtime) -> None:
    """Its thread wakes up before the loop's thread calls back. The last output must not begin the request anew."""
    metrics = ServerMetrics(runtime, "toy")
    request = unserved(runtime)
    request.tokens.append(97)
    metrics.output(request, RequestOutput(request, (97,)))
    request.tokens.append(97)
    request.finish_reason = "stop"
    metrics.ended(request)
    metrics.output(request, RequestOutput(request, (97,), None, "stop"))
    found = shown(metrics)
    assert found["generation_tokens_total"] == 2
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 1


def test_refused_requests_count_by_reason(runtime: Runtime) -> None:
    metrics = ServerMetrics(runtime, "toy")
    for reason in ("queue", "queue", "prompt"):
        metrics.refused(reason)
    assert shown(metrics, reason="queue")["requests_refused_total"] == 2
    assert shown(metrics, reason="prompt")["requests_refused_total"] == 1


def test_the_gain_is_that_of_the_runtime(runtime: Runtime) -> None:
    metrics = ServerMetrics(runtime, "toy")
    served(runtime, metrics, [*b"abcdefgh "], 200).result(30)
    found, gain = shown(metrics), runtime.gain
    assert found["decode_seconds_total"] == pytest.approx(gain.spent_ms / 1e3)
    assert found["plain_decode_seconds_total"] == pytest.approx(gain.plain_ms / 1e3)
    assert gain.spent_ms > 0 < gain.plain_ms


def test_two_servers_of_a_process_do_not_share_counts(runtime: Runtime) -> None:
    first, second = ServerMetrics(runtime, "toy"), ServerMetrics(runtime, "toy")
    first.arrived(5)
    assert (shown(first)["prompt_tokens_total"], shown(second)["prompt_tokens_total"]) == (5, 0)


def test_a_closed_runtime_has_no_metrics() -> None:
    runtime = make_runtime()
    metrics = ServerMetrics(runtime, "toy")
    runtime.close()
    with pytest.raises(UsageError, match="this runtime is closed"):
        metrics.render()
