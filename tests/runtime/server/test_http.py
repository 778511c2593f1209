"""Around the endpoints: bodies that are too large, keys, hosts and origins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from redraft.errors import UsageError
from redraft.runtime.server.settings import read_api_keys
from tests.runtime.server.serving import ask, client_of, error_of, toy


def test_a_body_that_is_too_large_is_refused_however_it_is_sent(pool: ThreadPoolExecutor) -> None:
    with toy() as runtime:
        client = client_of(runtime, max_body_bytes=100)
        error_of(ask(client, prompt="a" * 100), 413)
        chunks = (b" " * 60 for _ in range(2))
        error_of(client.post("/tokenize", content=chunks, headers={"Content-Type": "application/json"}), 413)
        assert ask(client, max_tokens=1).status_code == 200


def test_a_key_is_needed_where_the_model_is_used(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\none\ntwo\n")
    keys = read_api_keys(file)
    assert keys == ("one", "two")
    with toy() as runtime:
        client = client_of(runtime, api_keys=keys)
        for header in (None, "Bearer three", "Bearer", "Basic one", "one"):
            headers = {} if header is None else {"Authorization": header}
            refused = client.get("/v1/models", headers=headers)
            assert error_of(refused, 401)["type"] == "authentication_error"
            assert refused.headers["www-authenticate"] == "Bearer"
        for key in keys:
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for bearer, own, status in (("one", "three", 200), ("three", "two", 200), ("three", "four", 401)):
            both = {"Authorization": f"Bearer {bearer}", "x-api-key": own}
            assert client.get("/v1/models", headers=both).status_code == status
        assert [client.get(path).status_code for path in ("/health", "/ready", "/metrics", "/version")] == [200] * 4
    file.write_text("\n#\n")
    with pytest.raises(UsageError, match="no API key"):
        read_api_keys(file)


@pytest.mark.parametrize(
    ("settings", "hosts", "others"),
    [
        ({}, ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"],
         ["a.test", "a.test:8000", "", "localhost.a.test", "127.0.0.1.a.test", "a_b.test", "[::2]", "127.0.0.2"]),
        ({"host": "127.0.0.2"}, ["127.0.0.2:80", "localhost"], ["127.0.0.3"]),
        ({"host": "::1"}, ["[::1]:80"], ["a.test"]),
        ({"host": "localhost"}, ["localhost"], ["a.test"]),
        ({"allow_hosts": ("a.test", "b.test")}, ["A.test:443", "b.test", "localhost"], ["c.test"]),
        ({"host": "0.0.0.0"}, ["a.test", "10.0.0.1:8000", ""], []),
        ({"host": "0.0.0.0", "allow_hosts": ("a.test",)}, ["a.test", "localhost"],
         ["b.test", "10.0.0.1:8000", "b.test/health?"]),
    ],
    ids=str,
)  # fmt: skip
def test_only_names_of_the_server_are_answered(settings: dict[str, Any], hosts: list[str], others: list[str]) -> None:
    """A page may let its name point to 127.0.0.1, and so read answers as if they were its own."""
    with toy() as runtime:
        client = client_of(runtime, **settings)
        probed = ("/health", "/ready", "/metrics")
        known = dict.fromkeys(("/v1/models", "/", "/openapi.json", *probed), 200)
        for path, status in {**known, "/a": 404, "/tokenize": 405}.items():
            assert {client.get(path, headers={"Host": host}).status_code for host in hosts} == {status}
            for host in others:
                if path in probed and settings.get("host") == "0.0.0.0":  # by a pod's address
                    assert client.get(path, headers={"Host": host}).status_code == 200
                    continue
                assert error_of(client.get(path, headers={"Host": host}), 403)["code"] == "host_not_allowed"


def test_pages_of_other_origins_are_allowed_by_name_only() -> None:
    asking = {"Origin": "http://a.test", "Access-Control-Request-Method": "POST"}
    with toy() as runtime:
        refused = client_of(runtime).options("/v1/completions", headers=asking)
        assert "access-control-allow-origin" not in refused.headers
        client = client_of(runtime, allow_origins=("http://a.test",))
        allowed = client.options("/v1/completions", headers=asking)
        assert allowed.headers["access-control-allow-origin"] == "http://a.test"
        other = client.get("/v1/models", headers={"Origin": "http://b.test"})
        assert "access-control-allow-origin" not in other.headers
