"""What conversions of published draft checkpoints share: checks of their configuration, their fit and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.initialization import no_init_weights

from redraft.errors import CheckpointError
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.loading import load_tensors
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.checkpoint.sources import Source
from redraft.export.drafters.checkpoint import CONFIG_FILE, differences
from redraft.export.drafters.layer import LayerConfig
from redraft.export.drafters.published_tensors import D2T, EMBEDDING, HEAD, T2D, PublishedTensors
from redraft.export.graph import decoder

OTHER_VERIFIER = "give the verifier that this drafter was trained for"
FITTING = "give the checkpoint that its config.json describes"
NOT_COVERED = "train a drafter for this verifier with `redraft train`"


def layer_configuration(path: Path, layer: Any) -> PretrainedConfig:
    """Return the layers' transformers configuration, which has the defaults of values that the file leaves out."""
    kind = str(layer.get("model_type", "llama")) if isinstance(layer, dict) else ""
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(f"{path / CONFIG_FILE}: the layer's model_type {kind!r} is unknown", FITTING)
    try:
        config: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(dict(layer))
    except Exception as error:  # noqa: BLE001 (transformers raises errors of many types)
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise CheckpointError(f"{path / CONFIG_FILE} is invalid ({reason})", "restore the original file") from None
    return config


def check_sizes(path: Path, values: Mapping[str, Any], config: PretrainedConfig, target: PretrainedConfig) -> None:
    """Raise CheckpointError if the layers' width or vocabulary is not the verifier's."""
    found, shape = decoder_shape(config), decoder_shape(target)
    width = values.get("target_hidden_size") or found.hidden
    for what, here, wanted in (
        ("hidden states of width", width, shape.hidden),
        ("hidden states of width", found.hidden, shape.hidden),
        ("a vocabulary of", found.vocabulary, shape.vocabulary),
    ):
        if here != wanted:
            raise CheckpointError(f"{path} has {what} {here}, the verifier has {wanted}", OTHER_VERIFIER)


def check_features(path: Path, config: PretrainedConfig, *more: tuple[bool, str]) -> None:
    """Raise CheckpointError naming the first part of a published drafter that redraft's drafters do not have.

    more: such parts of its layout, and whether it has them.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    types = getattr(config, "layer_types", None) or ()
    rotated = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1
    kind, act = rope.get("rope_type") or rope.get("type") or "default", getattr(config, "hidden_act", "silu")
    for is_there, what in (
        (any(isinstance(one, dict) for one in rope.values()), "rotary embeddings by type of layer"),
        (kind != "default", f"a rotary embedding of type {kind!r}"),
        (rotated != 1, f"a rotary embedding of {rotated} of each head"),
        (act != "silu", f"the activation {act!r}"),
        (any(layer != "full_attention" for layer in types), "a layer that does not attend to all tokens"),
        *more,
    ):
        if is_there:
            raise CheckpointError(f"{path} has {what}, which redraft's drafters do not have", NOT_COVERED)


def check_tensors(stored: PublishedTensors, config: LayerConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError listing tensors that are missing, surplus or of another shape.

    shapes: of the drafter's own tensors. It may have copies of the verifier's and maps of tokens too.
    """
    vocabulary, drafted, width = config.vocab_size, config.draft_size, config.hidden_size
    more = {EMBEDDING: (vocabulary, width), HEAD: (drafted, width), D2T: (drafted,), T2D: (vocabulary,)}
    needed = {*stored.shapes, *((D2T,) if config.draft_vocab_size else ())}
    allowed = {name: shape for name, shape in more.items() if name in needed}
    if problems := list(differences(stored.shapes, {**allowed, **shapes})):
        raise CheckpointError(f"{stored.path}: {'; '.join(problems)}", FITTING)


def draft_vocabulary(stored: PublishedTensors, config: LayerConfig) -> torch.Tensor | None:
    """Return the sorted tokens of the columns, int64 [H]; None if they are all tokens.

    Raises CheckpointError for a map that is not one to tokens in ascending order.
    """
    if D2T not in stored.shapes:
        return None
    offsets = stored.integers(D2T)
    tokens, last, problem = offsets + torch.arange(len(offsets)), config.vocab_size - 1, ""
    if int(tokens.min()) < 0 or int(tokens.max()) > last:
        problem = f"{D2T} maps to tokens from {int(tokens.min())} to {int(tokens.max())}, expected 0 to {last}"
    elif not bool((tokens.diff() > 0).all()):
        column = int((tokens.diff() <= 0).nonzero()[0]) + 1
        problem = f"{D2T} does not map to ascending tokens: column {column} is {int(tokens[column])}"
    elif T2D in stored.shapes and config.draft_vocab_size:  # writers leave it at either value for all tokens
        drafted = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
        different = (stored.integers(T2D).bool() != drafted).nonzero()
        if len(different):
            problem = f"{T2D} disagrees with {D2T} for {len(different)} tokens, first {int(different[0])}"
    if problem:
        raise CheckpointError(f"{stored.path}: {problem}", "download the checkpoint again, or train another")
    return tokens if config.draft_vocab_size else None


def verifier_matrix(
    verifier: AnyCheckpoint, target: PretrainedConfig, name: str, shape: tuple[int, ...]
) -> tuple[Source, str]:
    """Return a source of the verifier's EMBEDDING or HEAD, of this shape, and its name there."""
    architecture = Architecture.of(target)
    with torch.device("meta"), no_init_weights():
        found = decoder.vocabulary_parameters(architecture.text_class._from_config(architecture.text))
    parameter = found[(EMBEDDING, HEAD).index(name)]
    tensors = load_tensors(verifier, architecture).parameters
    return Source(verifier, {parameter: shape}, tensors), parameter


def check_matrix(
    stored: PublishedTensors, verifier: AnyCheckpoint, target: PretrainedConfig, name: str = EMBEDDING,
    tokens: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise CheckpointError if the checkpoint has an EMBEDDING or a HEAD that is not the verifier's.

    They are compared in the type that it is stored in. The verifier's is read a few rows at a time.
    tokens: of the checkpoint's rows, ascending; None if it has all rows.
    """
    if name not in stored.shapes:
        return
    published, row = stored.numbers(name), 0
    tokens = torch.arange(len(published)) if tokens is None else tokens
    shape = decoder_shape(target)
    source, parameter = verifier_matrix(verifier, target, name, (shape.vocabulary, shape.hidden))
    what = "embedding" if name == EMBEDDING else "head"
    for slab in source.slabs(parameter):
        rows = (tokens >= row) & (tokens < row + len(slab))
        own, here = torch.from_numpy(slab)[tokens[rows] - row].to(published.dtype), published[rows]
        if not torch.equal(own, here):
            first = int(rows.nonzero()[0]) + int((own != here).any(1).nonzero()[0])
            raise CheckpointError(
                f"{stored.path}: {name} differs from the verifier's {what}, first in row {first}",
                f"redraft drafts with the verifier's {what}; " + OTHER_VERIFIER,
            )
        row += len(slab)
