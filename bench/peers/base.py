"""The interface of a measured decoder: it converts the checkpoint, opens a model, and decodes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from redraft.bench.statistics import Timing
from redraft.config import Precision
from redraft.errors import BackendError
from redraft.packages import package_version

PLAIN, NGRAM, LONG_NGRAM = "plain", "ngram", "long ngram"
"""Modes that every decoder has: one token a step, and drafts from n-gram lookup in the sequence itself. A peer's drafts
have one length, so that it has a mode of a short and one of a long one; ours choose theirs."""
LOOKED_UP = {NGRAM: 4, LONG_NGRAM: 12}
"""Tokens of a peer's drafts by mode; llama-cpp-python's short ones have 2."""
DRAFT = "draft"
"""The mode of drafts by a second model, if a measurement has one."""
RECORD = "made_from.json"
_OF_A_MODEL = ("*.safetensors", "*.gguf", "*.json")


class PeerError(BackendError):
    """A peer cannot convert the checkpoint, open its model or decode. The other peers are still measured."""


@dataclass(frozen=True)
class PeerSource:
    """The checkpoint to convert.

    checkpoint:  Hugging Face folder; llama.cpp also needs one GGUF file in it.
    optimum_cli: the program that exports to OpenVINO. It may belong to another environment.
    draft:       the draft model's checkpoint.
    """

    checkpoint: Path
    optimum_cli: Path
    draft: Path | None = None


@dataclass(frozen=True)
class PeerModel:
    """A model to open.

    path:    our bundle, or the folder that the peer's `convert` filled.
    context: tokens of the longest prompt with its new tokens.
    draft:   the folder with the peer's draft model. Our bundle has the draft model as a drafter.
    max_num_seqs: prompts that a `Server` continues at once.
    """

    path: Path
    precision: Precision
    threads: int
    context: int
    draft: Path | None = None
    max_num_seqs: int = 1


@dataclass(frozen=True)
class Decoded:
    """New tokens, and the seconds from the first of them to the last."""

    token_ids: tuple[int, ...]
    seconds: float

    @property
    def timing(self) -> Timing:
        """The tokens after the first one, and their seconds."""
        return Timing(len(self.token_ids) - 1, self.seconds)


class Decoder(Protocol):
    """An open model.

    modes:    PLAIN and those of LOOKED_UP first, DRAFT if it was opened with a draft model. Ours has no LONG_NGRAM.
    settings: all options that the model was opened with and that decoding uses: JSON values by name.
    """

    @property
    def modes(self) -> tuple[str, ...]: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """Continue a prompt greedily by `count` tokens, past end tokens."""
        ...


@dataclass(frozen=True)
class Asked:
    """A prompt, and how many new tokens to write."""

    token_ids: tuple[int, ...]
    count: int


@dataclass
class Continued:
    """One of several prompts that were continued at once.

    submitted: seconds of `time.perf_counter`.   tokens: how many new ones.   outputs: seconds of each output with some.
    """

    submitted: float
    tokens: int = 0
    outputs: list[float] = field(default_factory=list)


class Server(Protocol):
    """A model that was opened to continue several prompts at once. modes, settings: as of a `Decoder`."""

    @property
    def modes(self) -> tuple[str, ...]: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def decode(self, mode: str, asked: Sequence[Asked]) -> list[Continued]:
        """Continue prompts greedily, past end tokens, and return them in order.

        It is a closed loop: `max_num_seqs` run from the start, and when one has ended the next one is submitted.
        """
        ...


@dataclass(frozen=True)
class Peer:
    """A library that decodes. A worker process calls the functions, so they are functions of modules.

    name:    of its rows, without spaces.   package: whose version the figures name.   install: a command.
    formats: how its models are called, by precision. Other precisions are not offered.
    convert: writes the model of a precision into an empty folder.
    pairs:   the files that a draft model's checkpoint must have, as a pattern; empty if it cannot decode with one.
    """

    name: str
    package: str
    module: str
    install: str
    formats: Mapping[Precision, str]
    convert: Callable[[PeerSource, Precision, Path], None]
    open: Callable[[PeerModel], Decoder | Server]
    pairs: str = ""

    @property
    def installed(self) -> bool:
        """True if Python finds the library."""
        return find_spec(self.module) is not None


def open_peer(peer: Peer, source: PeerSource, keep: Path, model: PeerModel) -> Decoder | Server:
    """Open a peer's model, converted now if `keep` lacks it. Raises PeerError and the errors of the library.

    model: how to open it. Its paths are found here.
    """
    draft = None
    if source.draft is not None and peer.pairs and any(source.draft.glob(peer.pairs)):
        draft = converted(peer, replace(source, checkpoint=source.draft), model.precision, keep / "draft")
    return peer.open(replace(model, path=converted(peer, source, model.precision, keep), draft=draft))


def converted(peer: Peer, source: PeerSource, precision: Precision, keep: Path) -> Path:
    """Return the folder of a peer's model, converted now unless `keep` has it from the same files and version.

    Raises PeerError.
    """
    folder = keep / peer.name / precision
    files = sorted(path for pattern in _OF_A_MODEL for path in source.checkpoint.glob(pattern))
    origin = {
        "checkpoint": str(source.checkpoint.resolve()),
        "files": {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files},
        "format": peer.formats[precision],
        "version": package_version(peer.package),
    }
    if _record(folder) == origin:
        return folder
    part = folder.with_name(f"{precision}.part")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(parents=True)
    peer.convert(source, precision, part)
    (part / RECORD).write_text(json.dumps(origin, indent=2))
    return part.rename(folder)


def _record(folder: Path) -> Any:
    try:
        return json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None


def run_tool(command: Sequence[str | Path]) -> None:
    """Run a converter. Raises PeerError with the last line that it wrote."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        raise PeerError(f"`{' '.join(map(str, command[:4]))} …` failed: {lines[-1].strip()}")
