"""Soak: it accepts a server that works, and finds other texts, errors, growing memory and slots that stay taken."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.runtime.fakes import know_costs, mixing_rule
from tests.runtime.server.serving import WAIT, listening, toy

from redraft.bench import server_process, soak, soak_load
from redraft.bench.http_client import Client
from redraft.bench.soak import by_minute, figure, slope, summary, wait_until_idle
from redraft.bench.soak_answers import Choices, oracle
from redraft.bench.soak_load import Load, Tally
from redraft.bench.soak_requests import Asked, requests_of, varied
from redraft.errors import BackendError

IDLE = {"num_requests_running": 0.0}


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that decodes by the toy model."""
    know_costs(monkeypatch)
    monkeypatch.setattr(soak_load, "_SAMPLE_SECONDS", 0.01)
    with toy() as runtime, listening(runtime) as (found, _):
        yield found


def run(url: str, requests: Sequence[Asked]) -> tuple[Tally, str]:
    """Run a load until each kind of request was sent several times. Returns the tally and the metrics."""
    load = Load(url, requests, [[one] for one in oracle(url, requests)], ["none", "ngram"])

    def is_over() -> bool:
        counts = load.tally.counts
        return bool(load.tally.wrong) or (counts["answers"] > 40 and min(counts["left"], counts["refused"]) > 3)

    load.run(6, is_over, lambda tally: tally.memory.append((0.0, soak.resident_mb(os.getpid()))))
    with Client(url, WAIT) as client:
        assert not any(wait_until_idle(client, WAIT).values())
        return load.tally, client.get("/metrics")


def test_a_server_that_works_is_ok(url: str) -> None:
    tally, metrics = run(url, requests_of("toy", 30, 0, 12))
    found = summary(tally, IDLE, metrics)
    assert found["ok"], found["reasons"]
    assert min(found[name] for name in ("answers", "left", "refused")) > 0
    assert found["memory_mb"][0] > 1
    assert figure(metrics, "request_success_total", finished_reason="length") > 0


@pytest.mark.parametrize("way", ["_whole", "_stream", "_leave_stream"])
def test_texts_that_neighbours_change_are_found(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    know_costs(monkeypatch)
    alone, fields = [True], {"model": "toy", "prompt": "a", "max_tokens": 9}
    with toy(lambda tokens: mixing_rule(tokens) if alone[0] else ord("z")) as runtime, listening(runtime) as (url, _):
        requests = [Asked("/v1/completions", fields)]
        load = Load(url, requests, [[one] for one in oracle(url, requests)], ["none"])
        with Client(url, WAIT) as client:
            getattr(load, way)(client, random.Random(0))
            assert not load.tally.wrong
            alone[0] = False
            getattr(load, way)(client, random.Random(0))
    found = summary(load.tally, IDLE, "")
    assert (found["ok"], found["different"]) == (False, 1)
    assert "alone" in found["reasons"][0]


def test_an_answer_is_that_of_its_build() -> None:
    def answer(build: str, *texts: str) -> Choices:
        found = Choices()
        choices = [{"index": index, "text": text, "finish_reason": "stop"} for index, text in enumerate(texts)]
        found.add({"system_fingerprint": f"redraft-{build}-1", "choices": choices})
        return found

    known = [answer("old", "one"), answer("new", "two")]
    assert answer("old", "one").among(known)
    assert answer("new", "two").among(known)
    assert not answer("old", "two").among(known)
    assert not answer("other", "one").among(known)
    assert answer("old", "on").begin(known)
    assert not answer("old", "onto").begin(known)
    several = [answer("old", "a", "b"), answer("new", "c", "d")]
    assert answer("old", "a", "d").among(several)
    assert not answer("old", "a", "a").among(several)
    assert not answer("old", "a").among(several)
    assert not answer("old", "a", "b", "c").among(several)


def test_errors_are_found(url: str) -> None:
    requests = [Asked("/v1/completions", {"model": "toy", "prompt": "a", "max_tokens": 1})]
    load = Load(url, requests, [[one] for one in oracle(url, requests)], ["a method that the server lacks"])
    load.run(2, lambda: load.tally.counts["errors"] >= 3, lambda tally: None)
    found = summary(load.tally, IDLE, "")
    assert not found["ok"]
    assert any("status 400" in reason for reason in found["reasons"])


def test_a_right_answer_to_a_wrong_request_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of("toy", 1, 0, 2)
    load = Load(url, requests, [], [])
    for wrong, told in ((({"max_tokens": 1}, 400), "was answered"), (({"n": 0}, 404), "should have status 404")):
        monkeypatch.setattr(soak_load, "WRONG", [wrong])
        with Client(url, WAIT) as client:
            load._wrong(client, random.Random(0))
        assert told in load.tally.wrong[-1]


def test_memory_and_slots_are_part_of_the_result() -> None:
    def tally(mb_a_minute: float) -> Tally:
        memory = [
            (second, 100 + (50 if second > 60 else 0) + mb_a_minute * second / 60) for second in range(0, 600, 10)
        ]
        found = Tally(memory=memory)
        found.count("answers")
        return found

    assert summary(tally(0.9), IDLE, "")["ok"]
    assert summary(tally(0.9), IDLE, "")["memory_mb_a_minute"] == pytest.approx(0.9)
    assert not summary(tally(1.1), IDLE, "")["ok"]
    assert not summary(tally(0.0), {"num_requests_running": 1.0}, "")["ok"]
    ended = '# TYPE redraft:request_success counter\nredraft:request_success_total{finished_reason="error"} 1.0\n'
    assert not summary(tally(0.0), IDLE, ended)["ok"]
    assert not summary(Tally(), IDLE, "")["ok"]
    assert by_minute([(0.5, 1.0), (59.0, 2.0), (60.0, 3.0), (130.0, 4.0), (140.0, 5.0)]) == [1.0, 3.0, 4.0, 5.0]
    assert slope([(0.0, 1.0), (130.0, 2.0), (170.0, 3.0)], 120) is None
    assert slope([(0.0, 9.0), (120.4, 1.0), (179.5, 2.0)], 120) == pytest.approx(60 / 59.1)  # three minutes


def test_requests_differ_and_variations_keep_their_text() -> None:
    requests = requests_of("toy", 200, 0, 12)
    assert requests == requests_of("toy", 200, 0, 12)
    assert len({json.dumps(one.fields, sort_keys=True) for one in requests}) == 200
    kinds = {name for one in requests for name in one.fields}
    assert {"prompt", "messages", "response_format", "n", "stop", "logprobs", "top_k"} <= kinds
    draw = random.Random(0)
    for asked in requests:
        fields = varied(draw, asked, ["ngram"])
        assert fields.items() >= asked.fields.items() or fields.keys() > asked.fields.keys()
        assert fields.keys() - asked.fields.keys() <= {
            "speculative_config",
            "priority",
            "user",
            "cache_salt",
            "prediction",
        }


def test_a_server_that_cannot_start_or_ends_badly_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = "import time; print('listening on http://127.0.0.1:1', flush=True); time.sleep(60)"
    for command, told in (
        ("raise SystemExit('no memory')", "did not start: no memory"),
        (started, "ended with status -15"),
    ):
        monkeypatch.setattr(server_process, "_COMMAND", command)
        with pytest.raises(BackendError, match=told), server_process.serving(tmp_path, "x") as server:
            assert server.url == "http://127.0.0.1:1"


@pytest.mark.slow
def test_half_a_minute_on_a_real_server(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", "--engines", str(tiny_bundle), "--minutes", "0.3", "--requests", "25"])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, found["reasons"]
    assert found["answers"] > 20
