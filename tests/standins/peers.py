"""A peer without a model, for worker processes: it continues a prompt by counting."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redraft.bench.peers.base import NGRAM, PLAIN, Asked, Continued, Decoded, Peer, PeerError, PeerModel, PeerSource
from redraft.config import Precision

SECONDS = {PLAIN: 0.2, NGRAM: 0.1}
"""Of a decoded text, by mode."""


LONGEST = 20
"""Tokens of a decoded text at most."""


class Counter:
    """Counts on from the last token, prints, as libraries do, and ends a long text early."""

    modes = (PLAIN, NGRAM)

    def __init__(self, model: PeerModel) -> None:
        self.settings: Mapping[str, Any] = {"threads": model.threads, "context": model.context}

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """Return `count` tokens in the mode's time."""
        print("decoding")
        return Decoded(tuple(token_ids[-1] + 1 + i for i in range(min(count, LONGEST))), SECONDS[mode])


class Crashing(Counter):
    """Ends its process when it decodes."""

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """End the process."""
        os._exit(3)


class Slow(Counter):
    """Takes longer for a text than any test waits."""

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """Wait."""
        time.sleep(60)
        return super().decode(mode, token_ids, count)


class Exporting(Counter):
    """Writes the process id of a program that it runs into the model's folder, and waits for it."""

    def __init__(self, model: PeerModel) -> None:
        with subprocess.Popen(["sleep", "60"]) as program:
            (model.path / "pid.part").write_text(str(program.pid))
            (model.path / "pid.part").rename(model.path / "pid")


class CountingServer:
    """Continues all prompts in steps of 0.1 s, of which each has a token; a long text ends early."""

    modes = (PLAIN,)

    def __init__(self, model: PeerModel) -> None:
        self.settings: Mapping[str, Any] = {"max_num_seqs": model.max_num_seqs, "context": model.context}

    def decode(self, mode: str, asked: Sequence[Asked]) -> list[Continued]:
        """Return texts that were submitted together."""
        counts = [min(one.count, LONGEST) for one in asked]
        return [Continued(5.0, count, [5.1 + 0.1 * step for step in range(count)]) for count in counts]


def refused(model: PeerModel) -> Counter:
    """Fail to open, as a library does."""
    raise RuntimeError("no such\nmodel")


def write_model(source: PeerSource, precision: Precision, folder: Path) -> None:
    """Write a model that counts its conversions."""
    log = source.checkpoint / "conversions"
    log.write_text(log.read_text() + "x" if log.exists() else "x")
    (folder / "model").write_text(precision)


def write_nothing(source: PeerSource, precision: Precision, folder: Path) -> None:
    """Fail to convert."""
    (folder / "half").write_text("")
    raise PeerError(f"no {precision} for you")


COUNTER = Peer(
    name="counter",
    package="numpy",
    module="numpy",
    install="pip install counter",
    formats={"fp32": "F32"},
    convert=write_model,
    open=Counter,
)
COUNTING_SERVER = replace(COUNTER, open=CountingServer)
BROKEN = replace(COUNTER, name="broken", convert=write_nothing)
ABSENT = replace(COUNTER, name="absent", module="no_such_module", install="pip install absent")
OTHER = replace(COUNTER, name="other", formats={"int8": "Q8_0"})
