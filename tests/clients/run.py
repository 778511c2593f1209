"""Runs the checks of real clients against a server: `python -m tests.clients.run --engines BUNDLE [CLIENT …]`.

Each client has an environment of its own with the versions of its lock file `NAME.txt`, since their pins exclude each
other. It is made when it is first needed, and again when the lock file changes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import subprocess
import sys
import time
import venv
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from tests.cli.conftest import copy_with_template

from redraft.bench.server_process import serving

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "build/clients"
CLIENTS = {"openai": "openai", "curl": "openai", "litellm": "litellm", "langchain": "langchain",
           "instructor": "instructor", "aiperf": "aiperf", "schemathesis": "schemathesis"}  # fmt: skip
"""Clients, and whose environment each one uses."""
MODEL = "served"
NO_QUEUE = ("--max-num-seqs", "4", "--max-queued-requests", "0")
"""Options for schemathesis, whose requests may want many long choices."""


def main() -> int:
    """Run the checks, print a table, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)}; all by default")
    parser.add_argument("--chat-template", type=Path, help="serve a copy of the bundle with this template")
    asked = parser.parse_args()
    if unknown := [client for client in asked.clients if client not in CLIENTS]:  # Python 3.11 tests no list by choices
        parser.error(f"no such client: {', '.join(unknown)}")
    rows = []
    with ExitStack() as stack:
        bundle, folder = asked.engines, Path(stack.enter_context(TemporaryDirectory()))
        key, keys = secrets.token_hex(), folder / "keys"
        keys.write_text(key)
        if asked.chat_template is not None:
            bundle = copy_with_template(bundle, folder / "bundle", asked.chat_template.read_text())
        for client in asked.clients or CLIENTS:
            python = environment(CLIENTS[client])
            options = (*NO_QUEUE, "--api-key-file", str(keys)) if client == "schemathesis" else ()
            with serving(bundle, MODEL, options) as server:  # no client can disturb another one's checks
                rows.append(check(client, python, server.url, key))
    print(f"\n{'client':<14}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for client, passed, failed, skipped, seconds in rows:
        print(f"{client:<14}{passed:>8}{failed:>8}{skipped:>9}{seconds:>9.1f}")
    return any(failed or not passed for _, passed, failed, _, _ in rows)


def environment(name: str) -> Path:
    """Return the Python of the environment with the packages of a lock file."""
    lock = HERE / f"{name}.txt"
    folder = ENVIRONMENTS / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    python, finished = folder / "bin/python", folder / "finished"
    if not finished.exists():
        print(f"installing {name} into {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--requirement", lock]
        subprocess.run(command, check=True)
        finished.touch()
    return python


def check(client: str, python: Path, url: str, key: str) -> tuple[str, int, int, int, float]:
    """Run a client's checks. Returns its name, how many passed, failed and were skipped, and the seconds."""
    print(f"\n{client}", flush=True)
    report = python.parents[1] / f"{client}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-c", HERE / "pytest.ini", HERE / f"check_{client}.py", "-rs"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
    begun = time.monotonic()
    subprocess.run(
        [*command, f"--junitxml={report}"], env={**own, "REDRAFT_URL": url, "REDRAFT_MODEL": MODEL, "REDRAFT_KEY": key},
        cwd=python.parents[1], check=False,
    )  # fmt: skip
    seconds = time.monotonic() - begun
    if not report.exists():
        return client, 0, 1, 0, seconds
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    failed, skipped = int(suite.get("failures", 0)) + int(suite.get("errors", 0)), int(suite.get("skipped", 0))
    return client, int(suite.get("tests", 0)) - failed - skipped, failed, skipped, seconds


if __name__ == "__main__":
    sys.exit(main())
