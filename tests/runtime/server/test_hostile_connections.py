"""Hostile connections: each gets the right status or an end, and a request that runs meanwhile gets its own text."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2 as httpx
import pytest

from redraft.runtime.server.process import DrainingServer
from tests.runtime.fakes import know_costs, mixing_rule
from tests.runtime.server.serving import WAIT, Gate, listening, toy, wait_until

BODY = json.dumps({"model": "toy", "prompt": "abc", "max_tokens": 3}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
WITNESS = {"model": "toy", "prompt": "witness", "max_tokens": 20}
END = b"Connection: close\r\n\r\n"


def at(path: bytes) -> bytes:
    """Return a request for a path."""
    return GET.replace(b"/health", path) + END


def text_of_witness() -> str:
    """Return what the rule of the toy model says after the witness' prompt."""
    tokens = list(b"witness")
    for _ in range(20):
        tokens.append(mixing_rule(tokens))
    return bytes(tokens[7:]).decode()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[tuple[str, int], DrainingServer]]:
    """The address of a server whose bodies have a second to arrive."""
    with pytest.MonkeyPatch.context() as patch:
        know_costs(patch)
        with toy() as runtime, listening(runtime, body_timeout=1.0, max_body_bytes=1 << 20) as (url, server):
            host, _, port = url.removeprefix("http://").partition(":")
            yield (host, int(port)), server


@pytest.fixture
def address(served: tuple[tuple[str, int], DrainingServer]) -> Iterator[tuple[str, int]]:
    """The server's address. After the test, all its requests end, and it still answers as it should."""
    (host, port), server = served
    yield host, port
    wait_until(lambda: server.service.open_answers == 0 and server.service.runtime.health.requests == 0)
    answer = httpx.post(f"http://{host}:{port}/v1/completions", json=WITNESS, timeout=WAIT)
    assert answer.json()["choices"][0]["text"] == text_of_witness()


@contextmanager
def connected(address: tuple[str, int], data: bytes) -> Iterator[socket.socket]:
    """Connect and send."""
    with socket.create_connection(address, WAIT) as connection:
        connection.sendall(data)
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server ends the connection."""
    try:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
    except ConnectionResetError:
        return b""


def statuses(answers: bytes) -> list[int]:
    """Return the status of each answer on a connection."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x00\x01\x02\x03\r\n\r\n", 400), (b"GET\r\n\r\n", 400), (b"FOO /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 400), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (GET + b"no colon\r\n\r\n", 400), (GET + b"X: a\x00b\r\n\r\n", 400), (GET + b" : folded\r\n\r\n", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400), (POST + b"Content-Length: 1e3\r\n\r\n", 400),
        (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde", 400),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", 400),
        (POST + b"Content-Length: 999999999999\r\n" + END, 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n200000\r\n" + b" " * 0x200000 + b"\r\n0\r\n\r\n" + GET + END, 413),
        (POST.replace(b"json", b"xml") + LENGTH + END + BODY, 415),
        (POST.replace(b"application/json", b"") + LENGTH + END + BODY, 415),
        (POST + b"Content-Type: text/plain\r\n" + LENGTH + END + BODY, 200),  # the first of both counts
        (POST + b"Content-Length: 9\r\n" + END + b'{"a": "\xff', 408), (POST + LENGTH + END + BODY[:5], 408),
        (GET.replace(b"localhost", b"\xff\xfe") + END, 403),
        (GET.replace(b"localhost", b"localhost@evil.test") + END, 403),
        (GET.replace(b"Host: localhost\r\n", b"") + END, 403), (GET + b"Host: evil.test\r\n" + END, 200),
        (at(b"http://evil.test/health"), 200),
        (GET + b"Authorization: Bearer \xff\xfe\r\n" + END, 200),
        (GET + b"X-Forwarded-For: 1.2.3.4\r\nX: \xff\r\n" + END, 200),
        (GET.replace(b"GET", b"DELETE") + END, 405),
        (GET.replace(b"GET", b"TRACE") + END, 405),
        (POST.replace(b"POST", b"GET") + END, 405),
        (at(b"*"), 404), (at(b"//health"), 404), (at(b"/health/"), 404),
        (at(b"/v1/../health"), 404), (at(b"/health%00"), 404),
        (at(b"/%2e%2e/%2e%2e/etc/passwd"), 404), (at(b"/health\\..\\x"), 404),
        (at(b"/v1/models/..%2f..%2fetc%2fpasswd"), 404), (at(b"/v1/models/%ff%fe"), 404),
        (at(b"/v1/models/toy%0d%0aX:%20y"), 404), (at(b"/health?a=%ff&b[]="), 200),
        (at(b"/" + b"a" * 60_000), 404),
    ],
    ids=lambda value: ascii(value)[:60],
)  # fmt: skip
def test_each_request_gets_its_status(address: tuple[str, int], sent: bytes, status: int) -> None:
    with connected(address, sent) as connection:
        answer = read_all(connection)
    assert statuses(answer)[:1] == [status], answer[:500]
    assert len(answer) < 5000
    assert b"root:" not in answer
    assert b"\r\nX: y" not in answer


@pytest.mark.parametrize(
    "sent", [b"", GET[:10], GET, POST + LENGTH + b"\r\n" + BODY[:5], POST + LENGTH + b"\r\n" + BODY]
)
@pytest.mark.parametrize("how", [socket.SHUT_WR, socket.SHUT_RDWR])
def test_a_connection_that_is_half_closed_ends(address: tuple[str, int], sent: bytes, how: int) -> None:
    """The answer to a whole request may still come, since it may be ready before the end is seen."""
    with connected(address, sent) as connection:
        connection.shutdown(how)
        assert statuses(read_all(connection)) in ([], [200])


def test_requests_in_one_packet_are_answered_in_order(address: tuple[str, int]) -> None:
    whole = POST + LENGTH + b"\r\n" + BODY
    with connected(
        address, GET + b"\r\n" + whole + GET.replace(b"/health", b"/nowhere") + b"\r\n" + GET + END
    ) as connection:
        assert statuses(read_all(connection)) == [200, 200, 404, 200]


def test_a_body_may_come_byte_by_byte(address: tuple[str, int]) -> None:
    with connected(address, POST + b"Transfer-Encoding: chunked\r\n" + END) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in BODY:
            connection.sendall(b"1\r\n%c\r\n" % byte)
        connection.sendall(b"0\r\n\r\n")
        assert statuses(read_all(connection)) == [200]


def test_connections_that_say_nothing_harm_nobody(address: tuple[str, int]) -> None:
    """Their bodies never come either; the fixture's own request is answered while they are open."""
    silent = [socket.create_connection(address, WAIT) for _ in range(50)]
    try:
        for connection in silent[::2]:
            connection.sendall(POST + LENGTH + b"\r\n")
        answer = httpx.post(f"http://{address[0]}:{address[1]}/v1/completions", json=WITNESS, timeout=WAIT)
        assert answer.json()["choices"][0]["text"] == text_of_witness()
    finally:
        for connection in silent:
            connection.close()


def test_a_request_that_runs_meanwhile_gets_its_own_text() -> None:
    gate = Gate(free=15)
    with toy(gate) as runtime, listening(runtime, body_timeout=0.2) as (url, server), ThreadPoolExecutor(1) as pool:
        host, _, port = url.removeprefix("http://").partition(":")
        running = pool.submit(httpx.post, f"{url}/v1/completions", json=WITNESS, timeout=WAIT)
        assert gate.reached.wait(WAIT)
        expected = [
            (b"\xff" * 100 + b"\r\n\r\n", 400), (POST + LENGTH + END + b"\xff" * len(BODY), 400),
            (POST + b"Content-Length: 9\r\n" + END, 408), (POST + b"Content-Length: 99999999999\r\n" + END, 413),
            (at(b"/.."), 404), (GET + b"\r\n", None), (POST + LENGTH + b"\r\n" + BODY, None),
        ]  # fmt: skip
        for sent, status in expected:  # None: the client leaves at once
            with connected((host, int(port)), sent) as connection:
                assert status is None or statuses(read_all(connection)) == [status]
        wait_until(lambda: server.service.open_answers == 1)
        gate.opened.set()
        assert running.result(WAIT).json()["choices"][0]["text"] == text_of_witness()
        wait_until(lambda: runtime.health.requests == 0)
