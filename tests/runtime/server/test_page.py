"""The page's files and their headers, and the batch that it shows."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.resources import files

import pytest
from starlette.testclient import TestClient

from redraft.runtime.server import batch
from redraft.runtime.server.page import HEADERS
from tests.runtime.server.serving import USER, WAIT, Gate, client_of, error_of, toy

NAMES = sorted(path.name for path in files("redraft.runtime.server").joinpath("page").iterdir())


def test_the_page_loads_only_its_own_files(shared: TestClient) -> None:
    page = shared.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    texts = {name: shared.get(f"/page/{name}").text for name in NAMES}
    assert texts["index.html"] == page.text
    wanted = {name for text in (page.text,) for name in re.findall(r'(?:href|src)="([^"]+)"', text)}
    wanted |= {name for text in texts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert {name.removeprefix("page/") for name in wanted} == set(NAMES) - {"index.html"}
    for name, text in texts.items():
        assert re.findall(r"https?://[^\s\"]+", text.replace("http://www.w3.org/2000/svg", "")) == [], name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\b|\sstyle=|\son\w+=", text), name


@pytest.mark.parametrize("path", ["/", *[f"/page/{name}" for name in NAMES]])
def test_every_file_has_the_headers_and_is_sent_once(shared: TestClient, path: str) -> None:
    first = shared.get(path)
    again = shared.get(path, headers={"If-None-Match": first.headers["etag"]})
    head = shared.head(path)
    assert [answer.status_code for answer in (first, again, head)] == [200, 304, 200]
    assert again.content == b""
    for answer in (first, again, head):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = dict(part.strip().split(" ", 1) for part in first.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"


@pytest.mark.parametrize(
    "path",
    [
        "/page/", "/page/x.js", "/page/page.py", "/page/../page.py", "/page/%2e%2e/page.py", "/page/..%2fpage.py",
        "/page/%2e%2e%2fpage.py", "/page/..%5cpage.py", "/page//etc/passwd", "/page/%2fetc%2fpasswd", "/page/app.js%00",
        "/page/APP.JS", "/page/./app.js/..", "/index.html",
    ],
)  # fmt: skip
def test_no_other_path_is_a_file(shared: TestClient, path: str) -> None:
    raw = shared.build_request("GET", "/")
    raw.url = raw.url.copy_with(raw_path=path.encode())
    assert error_of(shared.send(raw), 404)
    assert shared.post("/", json={}).status_code == 405


def test_the_page_needs_no_key_and_the_batch_does() -> None:
    with toy() as runtime:
        client = client_of(runtime, api_keys=("abc",))
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 200
        assert "toy" not in client.get("/").text
        assert error_of(client.get("/batch"), 401)
        assert client.get("/batch", headers={"Authorization": "Bearer abc"}).json()["running"] == 0


def test_the_batch_has_a_row_for_each_request_and_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(free=35)
    with toy(gate, max_num_seqs=1) as runtime, ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        stack.callback(gate.opened.set)  # also if the test fails
        client = client_of(runtime)
        body = {"model": "toy", "messages": [USER], "user": "me", "max_tokens": 40}
        first = pool.submit(client.post, "/v1/chat/completions", json={**body, "speculative_config": False})
        assert gate.reached.wait(WAIT)
        second = pool.submit(client.post, "/v1/chat/completions", json=body)
        while (found := client.get("/batch").json())["waiting"] == 0:
            assert not second.done()
        running, waiting = found["requests"]
        assert (found["slots"], found["running"], found["waiting"]) == (1, 1, 1)
        assert (running["state"], running["method"], running["prompt_tokens"]) == ("decoding", "none", 20)
        assert running["tokens"] == running["steps"] == 16
        assert running["rows"] == 35
        assert (waiting["state"], waiting["method"], waiting["rows"]) == ("waiting", "ngram", 0)
        texts = {value for row in found["requests"] for value in row.values() if isinstance(value, str)}
        assert texts == {"decoding", "none", "waiting", "ngram"}
        monkeypatch.setattr(batch, "MOST_REQUESTS", 1)
        assert len(client.get("/batch").json()["requests"]) == 1
        gate.opened.set()
        assert [one.result(WAIT).status_code for one in (first, second)] == [200, 200]
        ended = client.get("/batch").json()
    assert ended["requests"] == []
    assert ended["tokens"] == 80
    assert ended["tokens"] > ended["steps"] > 40
