"""Checks the transformers architectures that redraft exports, and their texts against transformers' own.

    python -m experiments.architectures [--only NAME,NAME] [--processes N] [--out docs/architectures.md]

Every case is a small random checkpoint. It goes through `redraft build`, then decodes plainly, with n-grams and with
trees, one text and two at a time. Tokens and logits are compared with transformers' eager model in float32. Finished
cases are kept in `build/architectures.jsonl` and not repeated; remove the file to repeat them.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import transformers
from tests.architectures.check import Finding, Result, check
from tests.architectures.checkpoints import architectures

from redraft.bench.environment import environment
from redraft.export import quiet_export

KEPT = Path("build/architectures.jsonl")
LIMIT_SECONDS = 900
INTRODUCTION = (
    "This table lists every decoder architecture that transformers can make, and redraft's result for a small random "
    "checkpoint of it.\n`SAME`: redraft writes the same text as transformers, without drafts, with n-grams, with trees "
    "and in batches.\n`REFUSED`: `redraft build` ends with the message in the table. `NOT MADE`: transformers did not "
    "make or run the checkpoint.\n"
)
Row = dict[str, Any]


def main() -> None:
    """Run the cases that the options name and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="model types, separated by commas")
    parser.add_argument("--out", type=Path, help="file for the table in Markdown")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time")
    options = parser.parse_args()
    quiet_export()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    cases = options.only or architectures()
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    rows = {row["architecture"]: row for row in map(json.loads, lines)}
    for row in checked([case for case in cases if case not in rows], options.processes):
        rows[row["architecture"]] = row
        print(f"{row['architecture']}: {row['result']} {row['note'][:150]} [{row['seconds']} s]", flush=True)
    lines = page([rows[case] for case in cases])
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(["# Architectures", "", INTRODUCTION, *lines, ""]), encoding="utf-8")


def checked(cases: Sequence[str], processes: int) -> Iterator[Row]:
    """Check each case in its own process, and keep the findings. Rows come in order.

    Processes are forked: they share imports, while crashes, memory and time are not shared.
    """
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        running = {case: pool.apply_async(_check, (case,)) for case in cases}
        for case, result in running.items():
            try:
                row = result.get(LIMIT_SECONDS + 10)
            except multiprocessing.TimeoutError:  # its process has ended
                lost = Finding(Result.ERROR, f"the process crashed or took longer than {LIMIT_SECONDS} s")
                row = {"architecture": case, **asdict(lost), "seconds": LIMIT_SECONDS}
            with KEPT.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
            yield row


def _check(case: str) -> Row:
    signal.alarm(LIMIT_SECONDS)  # ends the process
    gc.disable()
    if not os.environ.get("REDRAFT_DEBUG"):
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, sys.stderr.fileno())
        os.dup2(quiet, sys.stdout.fileno())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="redraft-") as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        found = check(Path(folder), case, {})
    return {"architecture": case, **asdict(found), "seconds": round(time.monotonic() - began, 1)}


def page(rows: Sequence[Row]) -> list[str]:
    """Return the date, the libraries, the number of cases with each result, and a table of the findings."""
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "onnxruntime")]
    cpu = str(environment(1).get("cpu", platform.machine()))
    where = ", ".join([f"Python {platform.python_version()}", *libraries, cpu])
    counts = Counter(row["result"] for row in rows)
    table = ["| architecture | variant | result | logits differ by (std) | note |", "|---|---|---|---|---|"]
    for row in rows:
        difference = "" if row["difference"] is None else f"{row['difference']:.1e}"
        note = row["note"].replace("|", "\\|").replace("\n", " ")
        table.append(f"| {row['architecture']} | base | {row['result']} | {difference} | {note} |")
    head = [f"{date.today().isoformat()}: {where}.", ""]
    return [*head, *(f"- {result}: {n}" for result, n in counts.most_common()), "", *table]


if __name__ == "__main__":
    main()
