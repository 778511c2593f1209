"""Drafters of a bundle before its build: the options of each one, and the weights that must fit the verifier."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.assembly.options import named_method
from redraft.assembly.preflight import check_file
from redraft.config import NATIVE, RANDOM, BuildConfig, DrafterBuild
from redraft.engines.digests import DigestCache
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.drafters import ExportedDrafter, find_exporter
from redraft.export.gguf.checkpoint import SUFFIX, open_checkpoint
from redraft.methods import Method, built_methods, find_method, native_method

if TYPE_CHECKING:
    from redraft.export.checkpoint.weight_files import Progress
    from redraft.export.drafters.checkpoint import Identity
    from redraft.export.drafters.exporter import Exporter
    from redraft.export.drafters.writing import Target
    from redraft.export.verifier import VerifierExport

    Export = Callable[[VerifierExport, Path, Progress], ExportedDrafter]

_READ = (".json", ".safetensors", ".bin")
"""Suffixes of the files of a drafter's folder that a build reads."""


@dataclass(frozen=True)
class DrafterSettings:
    """A drafter's method and parsed options, and the source of its weights: RANDOM, NATIVE, a folder or a file."""

    id: str
    source: str
    method: Method[Any]
    options: Any

    @property
    def path(self) -> Path:
        """The folder or the file of the weights."""
        return Path(self.source)


@dataclass(frozen=True)
class OpenedDrafter:
    """A drafter that fits its verifier.

    hidden_states: the verifier's hidden states that it reads.   description: a line about its checkpoint, or nothing.
    export: writes graphs and weights into the verifier's folder.
    """

    id: str
    method: Method[Any]
    hidden_states: tuple[str, ...]
    description: str
    export: Export


def settings_of(drafter: DrafterBuild, config: BuildConfig) -> DrafterSettings:
    """Return a drafter's method and options. Raises UsageError, and CheckpointError like `named_method`.

    TensorRT has no operator like MatMulNBits, so its drafters take the verifier's compute type by default.
    """
    where, source = f"drafter {drafter.id}", str(drafter.source)
    method = find_method(drafter.method or named_method(where, source, drafter.id))
    if not method.is_built:
        known = ", ".join(built_methods())
        raise UsageError(f"{where}: method {method.id} needs no drafter", f"the others are {known}")
    options = method.parse_build(drafter.options, where)
    if options.precision is None and config.for_tensorrt:
        options = replace(options, precision=config.compute_dtype)
    if source == NATIVE and config.random_weights:
        raise UsageError(
            f"{where}: a verifier with random weights has no drafter inside",
            f"give {drafter.id}={RANDOM},method={method.id}",
        )
    return DrafterSettings(drafter.id, source, method, options)


def drafter_digests(drafters: Iterable[DrafterSettings], checkpoint: AnyCheckpoint) -> dict[str, str]:
    """Return SHA-256 digests by name of the files of all drafters. `open_drafter` reports missing files.

    checkpoint: the verifier's, which may have drafters inside.
    """
    found: dict[str, str] = {}
    for drafter in drafters:
        if drafter.source == RANDOM:
            files = []
        elif drafter.source == NATIVE:
            files = [checkpoint.path / file for file in _native(drafter).find_native(checkpoint).files]
        elif drafter.path.suffix == SUFFIX:
            files = [drafter.path]
        else:
            files = [path for path in sorted(drafter.path.glob("*")) if path.suffix in _READ]
        digests = DigestCache().digests(files)
        found |= {f"drafter {drafter.id} {path.name}": digest for path, digest in digests.items()}
    return found


def open_drafter(
    drafter: DrafterSettings, checkpoint: AnyCheckpoint, identity: Identity, config: BuildConfig
) -> OpenedDrafter:
    """Check a drafter before any export, and return it.

    checkpoint, identity: the verifier's. Raises CheckpointError and UsageError if it does not fit.
    """
    from redraft.export.checkpoint import model_config
    from redraft.export.drafters.checkpoint import is_plain_checkpoint
    from redraft.export.drafters.draft_head import check_rank
    from redraft.export.drafters.published import check_layout, recognise

    if (rank := drafter.options.head_rank) is not None:
        check_rank(drafter.id, rank, model_config.decoder_shape(model_config.load_config(checkpoint)).hidden)
    if drafter.source == NATIVE:
        return _native_drafter(drafter, checkpoint)
    if drafter.source == RANDOM:
        exporter = find_exporter(drafter.method.id)
        return _opened(drafter, lambda target: exporter.random(target, model_config.load_config(checkpoint)))
    check_layout(drafter.path, drafter.method.id)
    if recognise(drafter.path):
        return _published_drafter(drafter, checkpoint, identity)
    if is_plain_checkpoint(drafter.path):
        return _draft_model(drafter, checkpoint, config)
    return _trained_drafter(drafter, checkpoint, identity)


def _opened(
    drafter: DrafterSettings, write: Callable[[Target], ExportedDrafter], states: tuple[str, ...] | None = None,
    description: str = "",
) -> OpenedDrafter:  # fmt: skip
    """Return a drafter that `write` exports.

    states: the hidden states that it reads, if its checkpoint names them.
    """
    from redraft.export.drafters.writing import Target

    def export(verifier: VerifierExport, folder: Path, progress: Progress) -> ExportedDrafter:
        return write(Target(drafter.id, verifier, folder, drafter.options, progress))

    return OpenedDrafter(drafter.id, drafter.method, states or drafter.method.hidden_states, description, export)


def _native_drafter(drafter: DrafterSettings, checkpoint: AnyCheckpoint) -> OpenedDrafter:
    """Return the drafter inside of the verifier's checkpoint."""
    from redraft.export.drafters.draft_vocabulary import check_counted

    check_counted(drafter.id, drafter.options.draft_vocabulary, "a checkpoint's module")
    exporter = _native(drafter)
    found = exporter.find_native(checkpoint)
    return _opened(drafter, lambda target: exporter.native(target, checkpoint), found.hidden_states, found.description)


def _published_drafter(drafter: DrafterSettings, checkpoint: AnyCheckpoint, identity: Identity) -> OpenedDrafter:
    """Return a draft checkpoint that another project published."""
    from redraft.export.drafters.published import read_states, recognise
    from redraft.export.drafters.published_conversion import convert

    published, exporter = recognise(drafter.path), find_exporter(drafter.method.id)
    assert published is not None

    def write(target: Target) -> ExportedDrafter:
        with tempfile.TemporaryDirectory(prefix="redraft-") as scratch:
            converted = convert(drafter.path, checkpoint, identity, Path(scratch))
            return exporter.trained(target, converted, identity)

    return _opened(drafter, write, read_states(drafter.path, checkpoint), published.description)


def _draft_model(drafter: DrafterSettings, checkpoint: AnyCheckpoint, config: BuildConfig) -> OpenedDrafter:
    """Return a decoder's checkpoint as a drafter, if its file, tokens and length of texts fit."""
    from redraft.assembly.tokenizers import Tokens, check_same_tokens
    from redraft.export.checkpoint.architecture import Architecture
    from redraft.export.checkpoint.model_config import load_config, verifier_shape
    from redraft.export.drafters.decoder_drafter import sizes_of
    from redraft.export.drafters.draft_head import check_verifiers
    from redraft.export.drafters.draft_vocabulary import check_counted

    check_counted(drafter.id, drafter.options.draft_vocabulary, "a plain checkpoint")
    check_verifiers(drafter.id, drafter.options.head_rank, "a plain checkpoint's")
    own = open_checkpoint(drafter.path)
    check_file(own)
    text, verifiers = (Architecture.of(load_config(model)).text for model in (own, checkpoint))
    sizes_of(drafter.id, text, verifier_shape(verifiers, config.max_model_len).max_positions)
    check_same_tokens(f"drafter {drafter.id}", drafter.path, Tokens.of(own), Tokens.of(checkpoint))
    exporter = find_exporter(drafter.method.id)
    assert drafter.method.takes_checkpoints, "check_layout refuses other methods"
    return _opened(drafter, lambda target: exporter.checkpoint(target, own))


def _trained_drafter(drafter: DrafterSettings, checkpoint: AnyCheckpoint, identity: Identity) -> OpenedDrafter:
    """Return a drafter that `redraft train publish` wrote."""
    from redraft.export.checkpoint import model_config
    from redraft.export.checkpoint.model_config import decoder_shape
    from redraft.export.drafters.checkpoint import DrafterCheckpoint
    from redraft.export.drafters.published import read_states

    opened, exporter = DrafterCheckpoint.open(drafter.path), find_exporter(drafter.method.id)
    settings, shape = exporter.configure(opened, drafter.options), decoder_shape(model_config.load_config(checkpoint))
    opened.entries()  # refuses a truncated file
    opened.check_verifier(settings, shape.hidden, shape.vocabulary, identity)

    states = read_states(drafter.path, checkpoint)
    return _opened(drafter, lambda target: exporter.trained(target, opened, identity), states)


def _native(drafter: DrafterSettings) -> Exporter[Any]:
    """Return the exporter of a drafter inside of the verifier's checkpoint. Raises UsageError for another method."""
    if not drafter.method.native:
        raise UsageError(
            f"drafter {drafter.id}: no checkpoint has a drafter of {drafter.method.id} inside",
            f"leave out method=, or give method={native_method()}",
        )
    return find_exporter(drafter.method.id)


def native_drafter(path: Path) -> str:
    """Return a line about the drafter inside of the checkpoint in `path`; empty if it has none. Imports torch."""
    try:
        return find_exporter(native_method()).find_native(open_checkpoint(path)).description
    except CheckpointError:
        return ""
