"""The OpenAPI document: FastAPI's description of the endpoints, with their answers, errors and keys."""

from __future__ import annotations

from redraft.runtime.server.anthropic_answer import OVERLOADED
from redraft.runtime.server.rendering import Json
from redraft.runtime.server.settings import ServerSettings

_SCHEMAS, _JSON, _EVENTS = "#/components/schemas/", "application/json", "text/event-stream"
_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def _object(**properties: Json) -> Json:
    """Return the schema of an object that has all of these properties, and may have others."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _ref(name: str) -> Json:
    return {"$ref": _SCHEMAS + name}


_LOGPROBS: Json = {"type": ["object", "null"]}
_REASON: Json = {"enum": ["stop", "length", "tool_calls"]}
_ANSWER: Json = {
    "id": _TEXT, "created": _COUNT, "model": _TEXT, "system_fingerprint": _TEXT,
    "usage": _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT,
                     prompt_tokens_details=_object(cached_tokens=_COUNT),
                     completion_tokens_details=_object(
                         accepted_prediction_tokens=_COUNT, rejected_prediction_tokens=_COUNT)),
    "redraft": _object(steps=_COUNT, drafted=_COUNT, accepted=_COUNT, tokens_per_step={"type": "number"}, seed=_COUNT),
}  # fmt: skip
_ANSWERS: Json = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "MessagesError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "ChatAnswer": _object(
        object={"const": "chat.completion"},
        choices=_list(_object(
            index=_COUNT, message=_object(role={"const": "assistant"}, content=_TEXT_OR_NULL), logprobs=_LOGPROBS,
            finish_reason=_REASON,
        )),
        **_ANSWER,
    ),
    "CompletionAnswer": _object(
        object={"const": "text_completion"},
        choices=_list(_object(index=_COUNT, text=_TEXT, logprobs=_LOGPROBS, finish_reason=_REASON)),
        **_ANSWER,
    ),
    "Tokens": _object(tokens=_list(_COUNT), count=_COUNT, max_model_len=_COUNT),
    "Text": _object(prompt=_TEXT),
    "Model": _object(
        id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT, methods=_list(_TEXT),
        default_method=_TEXT, caveats=_list(_TEXT),
    ),
    "Models": _object(object={"const": "list"}, data=_list(_ref("Model"))),
}  # fmt: skip
_OF_PATH = {
    "/v1/chat/completions": "ChatAnswer", "/v1/completions": "CompletionAnswer", "/tokenize": "Tokens",
    "/detokenize": "Text", "/v1/models": "Models", "/v1/models/{name}": "Model",
}  # fmt: skip
_REASONS = {
    400: "a field is wrong or not supported", 401: "no valid API key", 403: "Host names another server",
    404: "another model", 408: "the body is too slow", 413: "the body is too large", 415: "the body is not JSON",
    429: "too many requests wait", 500: "this request failed", 503: "the server cannot work on requests now",
    504: "the request took too long", OVERLOADED: "the server cannot work on requests now",
}  # fmt: skip
_WITHOUT_KEY = ("/health", "/ready", "/metrics", "/version")
_OF_BODIES = (400, 404, 408, 413, 415, 429, 500, 503, 504)


def complete(document: Json, settings: ServerSettings) -> Json:
    """Return FastAPI's document with the answers and errors of all operations, in place.

    A field that is not known, or that the server refuses by name, may only be null. The model has one name.
    """
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for schema in schemas.values():
        _limit(schema, settings)
    schemas.update(_ANSWERS)
    if settings.api_keys:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete_operation(path, operation, bool(settings.api_keys))
    return document


def _limit(schema: Json, settings: ServerSettings) -> None:
    """Limit a model of a request to what the server takes."""
    if schema.get("additionalProperties") is True and not settings.allow_unknown_fields:
        schema["additionalProperties"] = {"type": "null"}
    if "model" in schema.get("properties", {}):
        name = {"const": settings.model_name}
        is_needed = "model" in schema.get("required", ())
        schema["properties"]["model"] = name if is_needed else {"anyOf": [name, {"type": "null"}]}


def _complete_operation(path: str, operation: Json, needs_key: bool) -> None:
    """Add the answer and the errors of an operation."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own form of errors, which no endpoint has
    content = responses["200"].setdefault("content", {})
    if path in _OF_PATH:
        content[_JSON] = {"schema": _ref(_OF_PATH[path])}
    if path in _STREAMED:
        content[_EVENTS] = {}
    statuses = {403}
    if "requestBody" in operation:
        statuses.update(_OF_BODIES)
    elif path == "/v1/models/{name}":
        statuses.add(404)
    elif path == "/ready":
        statuses.add(503)
    if needs_key and path not in _WITHOUT_KEY:
        statuses.add(401)
        operation["security"] = [{"key": []}, {"header": []}]
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": _TEXT}}
    error = _ref("Error")
    if path.startswith("/v1/messages"):
        statuses = {OVERLOADED if status == 503 else status for status in statuses}
        error = _ref("MessagesError")
    for status in sorted(statuses):
        responses[str(status)] = {"description": _REASONS[status], "content": {_JSON: {"schema": error}}}
