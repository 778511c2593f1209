"""What a measurement needs of a decoder: how to convert the checkpoint, how to open a model, and how to decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from redraft.bench.statistics import Timing
from redraft.config import Precision
from redraft.errors import BackendError

PLAIN, NGRAM = "plain", "ngram"
"""Modes that every decoder has: one token a step, and drafts from n-gram lookup in the sequence itself."""
DRAFT = "draft"
"""The mode of drafts by a second model, if a measurement has one."""


class PeerError(BackendError):
    """A peer cannot convert the checkpoint, open its model or decode. The other peers are still measured."""


@dataclass(frozen=True)
class Source:
    """The checkpoint to convert.

    checkpoint:  Hugging Face folder; llama.cpp also needs one GGUF file in it.
    optimum_cli: the program that exports to OpenVINO. It may belong to another environment.
    draft:       the draft model's checkpoint.
    """

    checkpoint: Path
    optimum_cli: Path
    draft: Path | None = None


@dataclass(frozen=True)
class Model:
    """A model to open.

    path:    our bundle, or the folder that the peer's `convert` filled.
    context: tokens of the longest prompt with its new tokens.
    draft:   the folder with the peer's draft model. Our bundle has the draft model as a drafter.
    """

    path: Path
    precision: Precision
    threads: int
    context: int
    draft: Path | None = None


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

    modes:    PLAIN and NGRAM first, DRAFT if it was opened with a draft model.
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
class Peer:
    """A library that decodes.

    name:    of its rows, without spaces.   module: that Python imports.   install: the command that installs it.
    package: whose version the figures name.
    formats: how its models are called, by precision. Other precisions are not offered.
    convert: writes the model of a precision into an empty folder.
    open:    opens a model.
    pairs:   True if it can decode with a draft model.
    A worker process calls the functions, so they are functions of modules.
    """

    name: str
    package: str
    module: str
    install: str
    formats: Mapping[Precision, str]
    convert: Callable[[Source, Precision, Path], None]
    open: Callable[[Model], Decoder]
    pairs: bool = False

    @property
    def installed(self) -> bool:
        """True if Python finds the library."""
        return find_spec(self.module) is not None
