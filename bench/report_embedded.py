"""Measurements that a report shows and another command made: controllers, peers, and the parts of a draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.errors import UsageError

_PEERS = ("environment", "chat", "max_new_tokens", "prompts", "new_tokens", "looping_answers", "precisions", "peers",
          "versions", "left_out", "ratios")  # fmt: skip


def read_controllers(path: Path) -> dict[str, Any]:
    """Return the figures that `redraft bench --controllers NAMES --json` printed (GammaTune, table 2).

    Raises UsageError for a file that cannot be read or has something else.
    """
    from redraft.bench.controllers import tables

    found = _read(path)
    try:
        tables(found)
        kept = {key: value for key, value in found.items() if key != "plots"}
        return {**kept, "method": str(found["method"]), "outputs": int(found["outputs"]), "timed": int(found["timed"])}
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        hint = "give the output of `redraft bench --controllers … --json`"
        raise UsageError(f"{path} has no comparison of controllers", hint) from None


def read_peers(path: Path) -> dict[str, Any]:
    """Return the figures that `python -m redraft.bench.peers --json` printed, without folders of its machine.

    Speeds are tokens a second by precision, library and mode. Raises UsageError as `read_controllers`.
    """
    from redraft.bench.peers.table import ratio_rows, speed_rows

    values = _read(path)
    try:
        decoders = {
            precision: {name: {"modes": _speeds(one)} for name, one in by_name.items()}
            for precision, by_name in values["decoders"].items()
        }
        found = {**{key: values[key] for key in _PEERS}, "decoders": decoders, "failed": sorted(values["failed"])}
        speed_rows(found)
        ratio_rows(found)
        return found
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        raise UsageError(f"{path} has no peers", "give the output of `python -m redraft.bench.peers --json`") from None


def read_latency(path: Path) -> dict[str, Any]:
    """Return the times of a draft's parts that an experiment printed (docs/benchmarks.md names it).

    Raises UsageError as `read_controllers`.
    """
    from redraft.bench.report_latency import tables

    found = _read(path)
    try:
        tables(found)
        return {**found, "environment": dict(found["environment"])}
    except (KeyError, TypeError, AttributeError, IndexError, StopIteration, ValueError, ZeroDivisionError):
        hint = "docs/benchmarks.md, `--latency-json`, has the command that prints them"
        raise UsageError(f"{path} has no times of a draft's parts", hint) from None


def _speeds(decoder: Mapping[str, Any]) -> dict[str, Any]:
    return {mode: {"tokens_per_second": found["tokens_per_second"]} for mode, found in decoder["modes"].items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give another file") from None
    except ValueError:
        raise UsageError(f"{path} is no JSON", "give what the command printed with --json") from None
    return found if isinstance(found, dict) else {}
