"""The settings of a server, validated on construction, and its file of API keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redraft.errors import UsageError
from redraft.files import read_text

_AT_LEAST = {"port": 0, "max_body_bytes": 1, "max_prompt_tokens": 1, "max_queued_tokens": 0}
_SECONDS = ("body_timeout", "request_timeout", "first_token_timeout", "progress_timeout", "drain_timeout")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server. The runtime itself limits the requests that wait (`max_waiting`).

    model_name:  the name that requests give as `model`.
    host, port:  where it listens; port 0 is any free one.
    api_keys:    keys of which a request must give one; none leaves the server open.
    allow_hosts: names under which it may be asked, besides its own. If it listens on a loopback address or has such
                 names, it refuses requests to others.
    allow_origins: origins whose pages may use the server, `*` for all.
    allow_unknown_fields: True to ignore fields of a request that are not known.
    max_body_bytes:      of a request.
    max_prompt_tokens:   tokens of a prompt; None leaves the limit to the context.
    max_queued_tokens:   prompt tokens of requests without a first token; None takes any number.
    body_timeout:        seconds in which a request's body must arrive.
    request_timeout:     seconds that a request may take in all, its wait included; None takes any time.
    first_token_timeout: seconds that the first token of a request may take, its wait included; None takes any time.
    progress_timeout:    seconds without a step after which `/ready` and requests fail, while requests wait.
    drain_timeout:       seconds that running requests have left when the server is told to stop.
    reload_drafter:      True if SIGHUP and /v1/drafters/reload read the bundle's drafters again.
    log_prompts:         True if the log has prompts and answers.   log_clients: True if it has clients' addresses.
    Raises UsageError for a value out of range.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    allow_unknown_fields: bool = False
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_queued_tokens: int | None = None
    body_timeout: float = 30.0
    request_timeout: float | None = None
    first_token_timeout: float | None = None
    progress_timeout: float = 30.0
    drain_timeout: float = 30.0
    reload_drafter: bool = False
    log_prompts: bool = False
    log_clients: bool = False

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
        for name in _SECONDS:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} must be a positive number of seconds, not {value}")
        if not self.model_name:
            raise UsageError("a served model needs a name")
        if not self.host:  # the system would take it for all addresses
            raise UsageError("a server needs a host to listen on", "give one such as 127.0.0.1")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise UsageError("an API key has printable ASCII characters without spaces, at least one")


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a UTF-8 file, one a line; blank lines and lines that begin with # are left out.

    Raises UsageError for a file without a key, DataError if it is not UTF-8, and OSError if it cannot be read.
    """
    lines = [line.strip() for line in read_text(path).splitlines()]
    if keys := tuple(line for line in lines if line and not line.startswith("#")):
        return keys
    raise UsageError(f"{path} has no API key", "write one a line")
