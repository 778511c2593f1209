"""The OpenAPI document: it tells bodies, answers, errors and keys as they are."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from redraft.runtime.server import app
from redraft.runtime.server.document import _ANSWERS, _OF_PATH
from tests.runtime.server.serving import USER, client_of


def document_of(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def check(value: Any, schema: dict[str, Any], place: str = "answer") -> None:
    """Check a value against the few words of JSON schemas that the document's answers have."""
    if "$ref" in schema:
        check(value, _ANSWERS[schema["$ref"].rpartition("/")[2]], place)
        return
    if "const" in schema or "enum" in schema:
        assert value in schema.get("enum", [schema.get("const")]), place
        return
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert any(isinstance(value, kinds[name]) for name in names), place
    if value is None:
        return
    for name in schema.get("required", ()):
        check(value[name], schema["properties"][name], f"{place}.{name}")
    for number, one in enumerate(value if "items" in schema else ()):
        check(one, schema["items"], f"{place}[{number}]")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "toy", "messages": [USER], "max_tokens": 3, "n": 2, "logprobs": True},
    "/v1/completions": {"model": "toy", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}


@pytest.mark.parametrize("path", [*_OF_PATH])
def test_answers_have_the_form_that_the_document_tells(shared: TestClient, path: str) -> None:
    operation = document_of(shared)["paths"][path]["post" if path in BODIES else "get"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    answer = shared.post(path, json=BODIES[path]) if path in BODIES else shared.get(path.replace("{name}", "toy"))
    assert answer.status_code == 200
    check(answer.json(), schema)


@pytest.mark.parametrize("path", [*BODIES])
def test_a_field_that_the_document_forbids_is_refused(shared: TestClient, path: str) -> None:
    document = document_of(shared)
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert schema["additionalProperties"] == {"type": "null"}
    for fields, status in (({"colour": "red"}, 400), ({"model": "another"}, 404)):
        answer = shared.post(path, json={**BODIES[path], **fields})
        assert str(status) in document["paths"][path]["post"]["responses"]
        check(answer.json(), _ANSWERS["Error"])
        assert answer.status_code == status
    assert shared.post(path, json={**BODIES[path], "colour": None}).status_code == 200


def test_the_document_is_built_once(shared: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first = document_of(shared)
    monkeypatch.setattr(app, "get_openapi", None)
    assert document_of(shared) == first
    assert "/openapi.json" not in first["paths"]


def test_a_document_tells_which_endpoints_need_a_key(runtime: Runtime) -> None:
    client = client_of(runtime, api_keys=("secret",), allow_unknown_fields=True)
    document = document_of(client)
    assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is True
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs_key = "security" in operation
            assert needs_key == ("401" in operation["responses"])
            if method == "get":
                answer = client.get(path.replace("{name}", "toy"))
                assert answer.status_code == (401 if needs_key else 200)
            else:
                assert client.post(path, json={}).status_code == 401
    assert "securitySchemes" not in document_of(client_of(runtime))["components"]
