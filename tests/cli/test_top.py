"""`redraft top`: figures of windows between readings, and one line for what is no server of redraft."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tests.runtime.fakes import greedy, make_runtime, script

from redraft.cli import main
from redraft.cli.top import Window, figures, metrics_url, parse
from redraft.errors import UsageError
from redraft.runtime.server.metrics import ServerMetrics

Output = pytest.CaptureFixture[str]


def text_of(prefix: str = "redraft:", **values: float) -> str:
    return "".join(f'{prefix}{name}{{model_name="toy"}} {value}\n' for name, value in values.items())


RUNNING = text_of(num_requests_running=0)


def buckets_of(name: str, counts: Sequence[tuple[str, float]]) -> str:
    return "".join(f'redraft:{name}_bucket{{le="{bound}",model_name="toy"}} {count}\n' for bound, count in counts)


def window(before: str, after: str, seconds: float = 2.0) -> Window:
    return Window(parse(RUNNING + before, 100.0), parse(RUNNING + after, 100.0 + seconds))


BEFORE = text_of(
    num_requests_running=0, generation_tokens_total=1000, request_steps_total=500,
    spec_decode_num_draft_tokens_total=800, spec_decode_num_accepted_tokens_total=500,
    decode_seconds_total=5, plain_decode_seconds_total=8,
)  # fmt: skip
AFTER = text_of(
    num_requests_running=3, num_requests_waiting=1, kv_cache_usage_perc=0.254, generation_tokens_total=1300,
    request_steps_total=620, spec_decode_num_draft_tokens_total=1000, spec_decode_num_accepted_tokens_total=680,
    decode_seconds_total=6, plain_decode_seconds_total=10.25,
)  # fmt: skip


def test_figures_are_of_the_window() -> None:
    assert figures(window(BEFORE, AFTER)) == {
        "requests": "3 running, 1 waiting",
        "tokens per second": "150.0",
        "time to first token": "-",
        "time between outputs": "-",
        "accepted of drafted tokens": "90 %",
        "tokens per step": "2.50",
        "speed over plain decoding": "2.25 ×",
        "KV cache": "25 %",
    }


def test_an_idle_server_has_no_ratios() -> None:
    found = figures(window(AFTER, AFTER))
    assert (found["tokens per second"], found["tokens per step"], found["speed over plain decoding"]) == (
        "0.0",
        "-",
        "-",
    )


def test_a_server_that_began_anew_counts_from_its_start() -> None:
    assert window(AFTER, BEFORE).grown("generation_tokens_total") == 1000
    assert window(buckets_of("x", [("1.0", 9), ("+Inf", 9)]), buckets_of("x", [("1.0", 4), ("+Inf", 4)])).quantile(
        "x", 0.5
    ) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.1, 0.05), (0.2, 0.1), (0.5, 0.2), (0.8, 0.3), (0.9, 0.3 + 0.7 / 1.5), (0.95, 1.0), (1.0, 1.0)],
)
def test_quantiles_are_inside_their_buckets(share: float, expected: float) -> None:
    """Counts are of the window: 2 up to 0.1, 6 up to 0.3, 1.5 up to 1, and 0.5 beyond, which are shown as 1."""
    before = buckets_of("x", [("0.1", 10), ("0.3", 20), ("1.0", 30), ("+Inf", 40)])
    after = buckets_of("x", [("0.1", 12), ("0.3", 28), ("1.0", 39.5), ("+Inf", 50)])
    assert window(before, after).quantile("x", share) == pytest.approx(expected)


def test_percentiles_are_shown_in_their_unit() -> None:
    after = buckets_of(
        "time_to_first_token_seconds", [("0.02", 60), ("0.04", 90), ("1.0", 90), ("2.5", 100), ("+Inf", 100)]
    )
    assert figures(window("", after))["time to first token"] == "p50 16.7 ms, p90 40 ms, p99 2.35 s"


def test_names_are_those_of_the_server() -> None:
    """With another name, a figure would be missing for ever."""
    with make_runtime(script(b"abcdefgh" * 30, 9), max_model_len=300) as runtime:
        metrics = ServerMetrics(runtime, "toy")
        before = metrics.render().decode()
        done = runtime.submit([*b"abcdefgh "], greedy(200), on_output=lambda one: metrics.output(one.request, one))
        done.result(30)
        with runtime._thread.paused():  # all outputs were delivered
            metrics.ended(done.request)
        shown = figures(window(before, metrics.render().decode()))
    assert shown["requests"] == "0 running, 0 waiting"
    assert {name for name, value in shown.items() if value in ("-", "0.0")} == set()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://host:1/", "http://host:1/metrics"),
        ("https://host/inner/metrics", "https://host/inner/metrics"),
    ],
)
def test_addresses(url: str, expected: str) -> None:
    assert metrics_url(url) == expected


@pytest.mark.parametrize(
    "url", ["file://host/etc/passwd", "ftp://host", "http://", "http://[::1", "http://host:port", ""]
)
def test_what_is_no_address_of_http_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server; give one such as"):
        metrics_url(url)


@contextmanager
def answering(*answers: bytes | int) -> Iterator[str]:
    """Serve these bodies, or statuses without a body, one a request; the last one again and again."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            if isinstance(answer, bytes):
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def test_once_prints_one_table(capsys: Output) -> None:
    with answering(BEFORE.encode(), AFTER.encode()) as url:
        assert main.run(["top", url, "--once", "--interval", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == f"toy at {url}"
    assert sum("3 running, 1 waiting" in line for line in lines) == 1
    assert sum("2.25 ×" in line for line in lines) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_tables_come_until_the_server_goes(terminal: bool, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    with answering(BEFORE.encode(), BEFORE.encode(), AFTER.encode(), 503) as url:
        assert main.run(["top", url, "--interval", "0.01"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("toy at") >= 2
    assert "0 running" in shown.out
    assert "3 running" in shown.out
    assert shown.err == f"redraft: error: {url}/metrics answers with status 503; give the address of `redraft serve`\n"


@pytest.mark.parametrize(
    "answer",
    [b"<html><body>Welcome!</body></html>", b"", b"\xff\xfe", b"{}", text_of("vllm:", num_requests_running=1).encode(),
     b'redraft:x{le="1"', b'redraft:x_bucket{le="y"} 1\n', b"redraft:x_bucket 1\n", b"redraft:x 1\n"],
)  # fmt: skip
def test_other_answers_are_one_line(answer: bytes, capsys: Output) -> None:
    with answering(answer) as url:
        assert main.run(["top", url, "--once"]) == 1
    error = f"redraft: error: {url}/metrics has no metrics of redraft; give the address of `redraft serve`\n"
    assert capsys.readouterr() == ("", error)


def closed_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


@contextmanager
def talking(answer: bytes) -> Iterator[str]:
    """A server that does not speak HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_once() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(30)


def test_what_cannot_be_reached_is_one_line(capsys: Output) -> None:
    def refused(url: str) -> str:
        assert main.run(["top", url, "--once"]) == 1
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1)
        return error

    assert "cannot be reached: [Errno 111] Connection refused; start `redraft serve` first" in refused(closed_port())
    for answer in (b"SSH-2.0-OpenSSH_9.9\r\n", b""):
        with talking(answer) as url:
            assert "/metrics cannot be reached: " in refused(url)
