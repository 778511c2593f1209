"""Checks the transformers architectures that redraft exports, and their texts against transformers' own.

    python -m experiments.architectures [--only NAME,NAME] [--variants] [--out docs/architectures.md] [--json FILE]

Every case is a small random checkpoint. It goes through `redraft build`, then decodes plainly, with n-grams and with
trees, one text and two at a time. Tokens and logits are compared with transformers' eager model in float32. Finished
cases are kept in `build/architectures.jsonl` and not repeated; `--fresh` repeats them.
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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import transformers

from experiments import check
from experiments.checkpoints import architectures
from experiments.variants import VARIANTS
from redraft.bench.environment import environment
from redraft.export import quiet_export

KEPT = Path("build/architectures.jsonl")
LIMIT_SECONDS = 900
BASE = "base"
INTRODUCTION = (
    "This table lists every decoder architecture that transformers can make, and redraft's result for a small random "
    "checkpoint of it.\n`SAME`: redraft writes the same text as transformers, without drafts, with n-grams, with trees "
    "and in batches.\n`REFUSED`: `redraft build` ends with the message in the table. `NOT MADE`: transformers did not "
    "make or run the checkpoint.\n"
)
Case = tuple[str, str]
Row = dict[str, Any]


def main() -> None:
    """Run the cases that the options name and print the table."""
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process of a case outlives this one
    quiet_export()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if options.fresh:
        options.kept.unlink(missing_ok=True)
    cases = list(wanted(options))
    rows = {case: row for case, row in kept(options.kept).items() if row["result"] not in options.repeat}
    for row in run([case for case in cases if case not in rows], options.processes, options.kept):
        rows[row["architecture"], row["variant"]] = row
        done = f"{row['architecture']} ({row['variant']})"
        print(f"{done}: {row['result']} {row['note'][:150]} [{row['seconds']} s]", flush=True)
    found = [rows[case] for case in cases]
    lines = [*summary(found), "", *table(found)]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(["# Architectures", "", INTRODUCTION, *lines, ""]), encoding="utf-8")
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


def wanted(options: argparse.Namespace) -> Iterator[Case]:
    """Yield architecture and variant of each case that the options name."""
    for name in options.only or architectures():
        yield name, BASE
        if options.variants:
            yield from ((name, variant) for variant in VARIANTS.get(name, {}))


def run(cases: Iterable[Case], processes: int, keep: Path) -> Iterator[Row]:
    """Check each case in its own process, and keep the findings. Rows come as they are finished."""
    keep.parent.mkdir(parents=True, exist_ok=True)
    waiting, running = list(reversed(list(cases))), list[Running]()
    while waiting or running:
        while waiting and len(running) < processes:
            running.append(Running(waiting.pop()))
        wait([job.receiver for job in running], timeout=1)
        for job in [job for job in running if job.done]:
            running.remove(job)
            row = job.row()
            with keep.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
            yield row


class Running:
    """One case in a forked process: imports are shared while crashes, memory and time are not."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.began = time.monotonic()
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        self.folder = tempfile.TemporaryDirectory(prefix="redraft-")
        self.process = context.Process(target=_check, args=(case, Path(self.folder.name), sender), daemon=True)
        self.process.start()
        sender.close()

    @property
    def done(self) -> bool:
        """Return True if it has sent a finding or run too long."""
        return self.receiver.poll() or time.monotonic() - self.began > LIMIT_SECONDS

    def row(self) -> Row:
        """End the process and return its finding."""
        found = self._finding()
        self.process.kill()
        self.process.join()
        self.folder.cleanup()
        seconds = round(time.monotonic() - self.began, 1)
        return {"architecture": self.case[0], "variant": self.case[1], **asdict(found), "seconds": seconds}

    def _finding(self) -> check.Finding:
        if not self.receiver.poll():
            return check.Finding(check.Result.ERROR, f"took longer than {LIMIT_SECONDS} s")
        try:
            found: check.Finding = self.receiver.recv()
            return found
        except EOFError:
            self.process.join()
            return check.Finding(check.Result.ERROR, f"the process ended with status {self.process.exitcode}")


def _check(case: Case, folder: Path, sender: Any) -> None:
    gc.disable()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    quiet = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("REDRAFT_DEBUG"):
        os.dup2(quiet, sys.stderr.fileno())
        os.dup2(quiet, sys.stdout.fileno())
    overrides = VARIANTS[case[0]][case[1]] if case[1] != BASE else {}
    sender.send(check.check(folder, case[0], overrides))


def kept(path: Path) -> dict[Case, Row]:
    """Return rows of earlier runs by case; the last of each counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(row["architecture"], row["variant"]): row for row in map(json.loads, lines)}


def summary(rows: Iterable[Row]) -> list[str]:
    """Return the number of cases with each result, the place and the date."""
    counts = Counter(row["result"] for row in rows)
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "onnxruntime")]
    machine = environment(1)
    where = ", ".join([f"Python {platform.python_version()}", *libraries, str(machine.get("cpu", platform.machine()))])
    return [f"{date.today().isoformat()}: {where}.", "", *(f"- {result}: {n}" for result, n in counts.most_common())]


def table(rows: Iterable[Row]) -> list[str]:
    """Return the findings as a Markdown table."""
    head = ["| architecture | variant | result | logits differ by (std) | note |", "|---|---|---|---|---|"]
    return [*head, *(_line(row) for row in rows)]


def _line(row: Mapping[str, Any]) -> str:
    difference = "" if row["difference"] is None else f"{row['difference']:.1e}"
    note = row["note"].replace("|", "\\|").replace("\n", " ")
    return f"| {row['architecture']} | {row['variant']} | {row['result']} | {difference} | {note} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="model types, separated by commas")
    parser.add_argument("--variants", action="store_true", help="also the variants of each architecture")
    parser.add_argument("--out", type=Path, help="file for the table in Markdown")
    parser.add_argument("--json", type=Path, help="file for the findings as JSON lines")
    parser.add_argument("--kept", type=Path, default=KEPT, help="finished cases, to resume from")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time")
    parser.add_argument(
        "--repeat", type=lambda text: text.split(","), default=(), help="repeat cases with these results"
    )
    parser.add_argument("--fresh", action="store_true", help="repeat finished cases")
    return parser.parse_args()


if __name__ == "__main__":
    main()
