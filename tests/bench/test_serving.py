"""What a server costs: both ways decode the same tokens in equal blocks, and changed texts are counted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from tests.runtime.fakes import NO_NUMBERS, know_costs, mixing_rule
from tests.runtime.server.serving import listening, toy

from redraft.bench import serving
from redraft.bench.http_client import Client, Refused
from redraft.bench.http_load import Answered, Driver, closed_loop, timing
from redraft.bench.load import BLOCKS, TURNS
from redraft.bench.serving import latencies, measure, measure_url
from redraft.bench.statistics import Speedup, Timing
from redraft.errors import BackendError
from redraft.runtime import Runtime, SamplingParams

PROMPTS = [list(b"abcdefgh" * 2), list(b"bcdefgha" * 2), list(b"cdefghab" * 2), list(b"x"), list(b"yx"), list(b"zyx")]


class InThread(Driver):
    """The driver without its process."""

    def __init__(self) -> None:
        self.clients: list[int] = []
        self.salts: list[str | None] = []

    def run(self, url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> list[Answered]:
        self.clients.append(clients)
        self.salts += [body.get("cache_salt") for body in bodies]
        return closed_loop(url, bodies, clients)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    know_costs(monkeypatch)
    with toy(max_num_seqs=2) as found:
        yield found


def test_both_ways_decode_the_same_tokens(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Sequence[Timing], Sequence[Timing]]] = []

    def speedup(base: Sequence[Timing], other: Sequence[Timing]) -> Speedup:
        compared.append((base, other))
        return Speedup(0.5, None, 1.0, 2.0, len(base))

    monkeypatch.setattr(serving, "speedup", speedup)
    driver = InThread()
    found = measure(runtime, PROMPTS, 8, "ngram", driver)
    ((base, other),) = compared
    assert len(base) == BLOCKS
    assert [one.tokens for one in base] == [one.tokens for one in other]
    assert driver.clients == [1] + [2] * BLOCKS
    assert (found["ratio"], found["changed"], found["texts"]) == (0.5, 0.0, BLOCKS * TURNS * 2)
    assert found["quiet"]["gap_ms"]["p50"] > 0


def test_both_ways_have_the_sampling_defaults_of_the_model(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults, submitted, submit = SamplingParams(temperature=0.5, repetition_penalty=1.3), [], Runtime.submit
    monkeypatch.setattr(Runtime, "model_sampling", lambda self: defaults)

    def noted(self: Runtime, prompt: Any, params: SamplingParams, *args: Any, **options: Any) -> Any:
        submitted.append((tuple(prompt), replace(params, seed=0)))
        return submit(self, prompt, params, *args, **options)

    monkeypatch.setattr(Runtime, "submit", noted)
    measure(runtime, PROMPTS, 8, "ngram", InThread())
    assert {params.repetition_penalty for _, params in submitted} == {1.3}
    assert len(set(map(str, submitted))) == len(PROMPTS)  # over HTTP as in the process


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_servers_of_redraft_get_salts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    if not is_ours:
        monkeypatch.setattr(Client, "get", lambda self, path: json.dumps({"data": [{"id": "toy"}]}))
    driver = InThread()
    with listening(runtime) as (url, _):
        found = measure_url(url, "toy", ["abc", "bcd", "cde", "d", "ed", "fed"], 6, 2, driver)
    assert (found["cache_salt"], found["changed"]) == (is_ours, 0)
    assert found["tokens_per_second"] > 0
    assert len(set(driver.salts)) == (len(driver.salts) if is_ours else 1)
    assert (None in driver.salts) != is_ours


def test_gaps_are_between_events_of_one_stream() -> None:
    quiet = [Answered(0, 0.0, [1.0, 1.1, 1.2], "a", 3, 1.2)]
    loaded = [Answered(0, 0.0, [2.0, 2.2, 2.4], "a", 3, 2.4), Answered(0, 5.0, [9.0], "b", 1, 9.5)]
    found = latencies(quiet, [(0, one) for one in loaded])
    assert found["quiet"]["gap_ms"]["p50"] == pytest.approx(100)
    assert found["p99_over_quiet_p50"] == pytest.approx(2)
    assert found["loaded"]["first_event_ms"]["p50"] == pytest.approx(3000)
    assert found["changed"] == 0.5
    assert timing(loaded) == (4, 9.5)


def test_the_driver_is_another_process(runtime: Runtime) -> None:
    bodies = [{"model": "toy", "prompt": "abc", "max_tokens": 5}] * 3
    with listening(runtime) as (url, _), Driver() as driver:
        assert driver._pool.submit(os.getpid).result() != os.getpid()
        found = driver.run(url, bodies, 2)
    tokens = list(b"abc")
    for _ in range(5):
        tokens.append(mixing_rule(tokens))
    assert [one.text for one in found] == [bytes(tokens[3:]).decode()] * 3
    assert [one.tokens for one in found] == [5] * 3
    assert all(one.submitted < one.outputs[0] <= one.outputs[-1] <= one.ended for one in found)


def test_an_error_in_a_stream_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    know_costs(monkeypatch)
    asked = {"model": "toy", "prompt": "a", "temperature": 1.0, "speculative_config": False}
    with (
        toy(lambda tokens: NO_NUMBERS if len(tokens) > 5 else mixing_rule(tokens)) as runtime,
        listening(runtime) as (url, _),
        Client(url) as client,
        pytest.raises(Refused, match="status 200"),
    ):
        list(client.events("/v1/completions", asked))


def test_refusals_and_broken_connections_raise(runtime: Runtime) -> None:
    with listening(runtime) as (url, _), Client(url) as client:
        with pytest.raises(Refused, match="status 404: the model 'x'"):
            client.ask("/v1/completions", {"model": "x", "prompt": "a"})
        with pytest.raises(Refused, match="status 400"):
            list(client.events("/v1/completions", {"model": "toy", "prompt": "a", "n": 0}))
        assert client.ask("/v1/completions", {"model": "toy", "prompt": "a", "max_tokens": 1})["choices"]
    with Client(url) as client, pytest.raises(BackendError, match="connection failed"):
        client.get("/health")


def test_a_client_connects_again_if_the_server_closes_without_a_word() -> None:
    class Closing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
            self.close_connection = True

    with HTTPServer(("127.0.0.1", 0), Closing) as server, Client(f"http://127.0.0.1:{server.server_port}") as client:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            assert [client.get("/") for _ in range(3)] == ["{}"] * 3
        finally:
            server.shutdown()
