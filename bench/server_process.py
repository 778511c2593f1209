"""`redraft serve` as a process of its own, for measurements and checks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from redraft.errors import BackendError

_COMMAND = "import sys; from redraft.cli.main import run; sys.exit(run(sys.argv[1:]))"
_ADDRESS = "listening on "
_END_SECONDS = 60


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens at `url`, and its process id."""

    url: str
    pid: int


@contextmanager
def serving(bundle: Path, name: str, options: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """Serve a bundle on a free port of 127.0.0.1, and stop with SIGTERM at the end.

    options: further ones of `redraft serve`.   Raises BackendError with what it printed if it cannot start, or if it
    does not end with status 0.
    """
    command = [sys.executable, "-c", _COMMAND, "serve", "--engines", str(bundle), "--port", "0", "--name", name]
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith(_ADDRESS):
                raise BackendError(f"the server did not start: {_text(errors)}")
            yield ServerProcess(line.removeprefix(_ADDRESS).strip(), process.pid)
            process.send_signal(signal.SIGTERM)
            if status := process.wait(_END_SECONDS):
                raise BackendError(f"the server ended with status {status}: {_text(errors)}")
        finally:
            process.kill()


def _text(file: TextIO) -> str:
    """Return all of a text file on one line."""
    file.seek(0)
    return " ".join(file.read().split())
