"""What checks of clients know: the server's URL, the model's name, and a tool that the model must call."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"sort": {"enum": ["noun", "verb"]}},
            "required": ["sort"],
            "additionalProperties": False,
        },
    },
}
"""A call's arguments are short however bad the model is."""


@pytest.fixture(scope="session")
def url() -> str:
    """The server's URL, without `/v1`."""
    return os.environ["REDRAFT_URL"]


@pytest.fixture(scope="session")
def model() -> str:
    """The name of the served model."""
    return os.environ["REDRAFT_MODEL"]


@pytest.fixture
def messages() -> list[dict[str, Any]]:
    """A conversation with one message."""
    return [{"role": "user", "content": "What is a queue?"}]


@pytest.fixture(scope="session")
def tool(url: str, model: str) -> dict[str, Any]:
    """A tool that the model must call if the request says so. Skips the check if the server refuses that by name."""
    asked = {
        "model": model, "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    request = Request(f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    try:
        urlopen(request, timeout=120).close()
    except HTTPError as error:
        told = json.load(error)["error"]
        if error.code == 400 and told["param"] in ("tools", "tool_choice", "parallel_tool_calls"):
            pytest.skip(told["message"])
        pytest.fail(f"status {error.code}: {told['message']}")
    return TOOL
