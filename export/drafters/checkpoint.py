"""A trained drafter on disk: `config.json` and `model.safetensors`, and the verifier that it was trained for.

config.json        method, config (the method's own), verifier (digests), training (how it was trained; not read here),
                   weights (SHA-256 of model.safetensors)
model.safetensors  the module's parameters in bf16, or its matrices in 8 bits (`block_storage`);
                   `token_counts` int32 or int64 [V], each token's count in training; with a draft vocabulary of H
                   tokens (`draft_vocab_size` in config) `draft_vocabulary` int64 [H], their ids
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file

from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.base import AnyCheckpoint, TensorEntry
from redraft.export.checkpoint.safetensors import Checkpoint, read_header
from redraft.export.checkpoint.sources import AnySource, Source
from redraft.export.drafters.block_storage import BlockCheckpoint, encode, readable, scale_shapes
from redraft.export.drafters.layer import DrafterConfig
from redraft.export.gguf.checkpoint import SUFFIX
from redraft.methods import find_method
from redraft.names import DRAFT_VOCABULARY, TOKENIZER_FILE
from redraft.records import from_plain

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKEN_COUNTS = "token_counts"
MOST_LISTED = 4
"""Names of tensors that an error lists of each kind."""
Storage = Literal["bf16", "int8"]
"""Type of a drafter's stored matrices."""
C = TypeVar("C", bound=DrafterConfig)


@dataclass(frozen=True)
class Identity:
    """The verifier that a drafter belongs to.

    weights:    SHA-256 of its weight files, in the order of their names.   tokenizer: SHA-256 of its tokenizer.json.
    """

    weights: tuple[str, ...]
    tokenizer: str

    @classmethod
    def of(cls, verifier: AnyCheckpoint) -> Identity:
        """Return the identity of a checkpoint. Reads all of it once. A GGUF file has its tokenizer inside."""
        text = (TOKENIZER_FILE,) if isinstance(verifier, Checkpoint) else ()
        files = (name for name in (*verifier.files, *text) if (verifier.path / name).is_file())
        return cls.from_digests(verifier, {name: _digest(verifier.path / name) for name in files})

    @classmethod
    def from_digests(cls, verifier: AnyCheckpoint, digests: Mapping[str, str]) -> Identity:
        """Return the identity of a checkpoint from SHA-256 digests of its files, by name."""
        return cls(tuple(digests[name] for name in sorted(verifier.files)), digests.get(TOKENIZER_FILE, ""))


def is_plain_checkpoint(path: Path) -> bool:
    """Return True for a decoder's checkpoint: a GGUF file, or a folder that transformers could load."""
    if path.suffix == SUFFIX:
        return True
    try:
        values = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and "model_type" in values and "method" not in values


class TokenData(NamedTuple):
    """A drafter's data about tokens.

    counts: each token's count in training, int64 [V].
    draft_vocabulary: the token of each column of its logits, sorted, int64 [H]; None if they have all V columns.
    """

    counts: torch.Tensor
    draft_vocabulary: torch.Tensor | None = None

    @classmethod
    def uncounted(cls, tokens: int) -> TokenData:
        """Return equal counts of so many tokens, for a drafter without counts."""
        return cls(torch.ones(tokens, dtype=torch.long))


@dataclass(frozen=True)
class _ConfigFile:
    method: str
    config: Mapping[str, Any]
    verifier: Identity
    training: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter's folder and its configuration. `open` reads no weights.

    weights: SHA-256 of the weights' file; empty if the folder does not say.
    """

    path: Path
    method: str
    config: Mapping[str, Any]
    verifier: Identity
    weights: str = ""

    @classmethod
    def open(cls, path: Path) -> DrafterCheckpoint:
        """Read `path`/config.json. Raises CheckpointError if it is missing or has another form."""
        file = path / CONFIG_FILE
        try:
            values = from_plain(_ConfigFile, json.loads(file.read_text(encoding="utf-8")), file.name)
            return cls(path, values.method, values.config, values.verifier, values.weights)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not a drafter: {file.name} cannot be read ({error.strerror})",
                "give a folder that `redraft train publish` wrote, or a smaller model's folder or GGUF file",
            ) from None
        except (ValueError, UsageError) as error:
            raise CheckpointError(
                f"{file}: expected a drafter's configuration ({error})",
                "give a folder that `redraft train publish` wrote",
            ) from None

    def configure(self, cls: type[C]) -> C:
        """Return the method's configuration. Raises CheckpointError naming a key or value that does not fit."""
        try:
            return from_plain(cls, self.config, str(self.path / CONFIG_FILE))
        except UsageError as error:
            raise CheckpointError(f"{self.path} is a drafter of {self.method}: {error.message}", error.hint) from None

    def check_verifier(self, config: DrafterConfig, hidden_size: int, vocabulary: int, found: Identity) -> None:
        """Raise CheckpointError if the drafter was trained for a verifier of another width, tokenizer or weights."""
        command = find_method(self.method).command
        hint = f"train one for this verifier with `redraft train {command} --verifier DIR`, or give --drafter none"
        for what, trained, found_size in (
            ("hidden states of width", config.hidden_size, hidden_size),
            ("a vocabulary of", config.vocab_size, vocabulary),
        ):
            if trained != found_size:
                raise CheckpointError(
                    f"{self.path} was trained for {what} {trained}, the verifier has {found_size}", hint
                )
        if self.verifier.tokenizer != found.tokenizer:
            raise CheckpointError(f"{self.path} was trained with another {TOKENIZER_FILE} than the verifier's", hint)
        if self.verifier.weights != found.weights:
            expected, here = (" ".join(d[:12] for d in i.weights) for i in (self.verifier, found))
            raise CheckpointError(
                f"{self.path} was trained for another verifier: expected weights {expected}, found {here}", hint
            )

    def entries(self) -> dict[str, TensorEntry]:
        """Return the stored tensors by name. Raises CheckpointError if the file is missing or truncated."""
        file = self.path / WEIGHTS_FILE
        try:
            return {entry.name: entry for entry in read_header(file)}
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}", "train or download it again") from None

    def load(self, module: torch.nn.Module) -> TokenData:
        """Fill `module` in fp32 from the weights. Returns the data about tokens. Raises like `open_weights`."""
        source, tokens = self.open_weights({name: tuple(t.shape) for name, t in module.state_dict().items()})
        for name, tensor in module.state_dict().items():
            fill(tensor, source, name)
        return tokens

    def open_weights(self, shapes: dict[str, tuple[int, ...]], stem: str = "") -> tuple[Source, TokenData]:
        """Return a source of parameters of these shapes, with names that begin with `stem`, and data about tokens.

        Reads all weights, in slabs. Raises CheckpointError listing keys that are missing or surplus, or naming a shape,
        number or draft vocabulary that does not fit, or if the file is not the one that config.json names.
        """
        file, entries = self.path / WEIGHTS_FILE, self.entries()
        vocabulary, drafted = int(self.config["vocab_size"]), int(self.config.get("draft_vocab_size", 0))
        expected = {
            **shapes,
            **scale_shapes(entries, shapes),
            TOKEN_COUNTS: (vocabulary,),
            **({DRAFT_VOCABULARY: (drafted,)} if drafted else {}),
        }
        problems = list(differences({name: entry.shape for name, entry in entries.items()}, expected))
        if not problems and (dtype := entries[TOKEN_COUNTS].dtype) not in ("I32", "I64"):
            problems = [f"{TOKEN_COUNTS} is {dtype}, expected I32 or I64"]
        named = {f"{stem}{name}": replace(entry, name=f"{stem}{name}") for name, entry in entries.items()}
        parameters = {f"{stem}{name}": shape for name, shape in shapes.items()}
        checkpoint = BlockCheckpoint(self.path, {}, named)
        source = Source.of_names(checkpoint, parameters, stem)
        if not problems:
            problems = [f"{name} is stored as {entries[name].dtype}" for name in shapes if not readable(entries[name])]
        if not problems:
            endless = [name for name in shapes if not source.checkpoint.is_finite(named[f"{stem}{name}"])]
            problems = [f"{name} holds a number that is not finite" for name in endless]
        tokens = None
        if drafted and not problems:
            tokens = torch.from_numpy(np.array(checkpoint.memmap(f"{stem}{DRAFT_VOCABULARY}")))
            problems = list(_vocabulary_problems(tokens, drafted, vocabulary))
        if self.weights and not problems and (digest := _digest(file)) != self.weights:
            problems = [f"these are another drafter's weights: expected {self.weights[:12]}, found {digest[:12]}"]
        if problems:
            raise CheckpointError(f"{file}: {'; '.join(problems)}", "give the drafter that its config.json describes")
        counts = torch.from_numpy(np.array(checkpoint.memmap(f"{stem}{TOKEN_COUNTS}")))
        return source, TokenData(counts.long(), tokens)


def fill(tensor: torch.Tensor, source: AnySource, parameter: str) -> None:
    """Copy a parameter into `tensor`, a few rows at a time."""
    row = 0
    for slab in source.slabs(parameter):
        tensor[row : row + len(slab)] = torch.from_numpy(slab)
        row += len(slab)


def differences(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], most: int | None = None
) -> Iterator[str]:
    """Yield a description of each tensor that is missing, surplus or of another shape. Shapes are by name.

    most: names that are listed of each kind; None lists all.
    """
    for word, keys in (("missing", set(expected) - set(found)), ("surplus", set(found) - set(expected))):
        if keys:
            yield f"{word} {listed(sorted(keys), most)}"
    other = [name for name, shape in expected.items() if name in found and found[name] != shape]
    for name in other[:most]:
        yield f"{name} is {list(found[name])}, expected {list(expected[name])}"


def listed(keys: Sequence[str], most: int | None = MOST_LISTED) -> str:
    """Return names with commas: the first `most` and the number of the others, or all if it is None."""
    more = "" if most is None or len(keys) <= most else f" and {len(keys) - most} more"
    return f"{', '.join(keys[:most])}{more}"


def _vocabulary_problems(tokens: torch.Tensor, size: int, vocabulary: int) -> Iterator[str]:
    """Yield a description of a draft vocabulary that is not `size` sorted, distinct tokens of `vocabulary`."""
    if tokens.dtype != torch.int64 or tuple(tokens.shape) != (size,):
        kind = str(tokens.dtype).removeprefix("torch.")
        yield f"{DRAFT_VOCABULARY} is {kind}{list(tokens.shape)}, expected int64[{size}]"
    elif not bool((tokens.diff() > 0).all()) or int(tokens[0]) < 0 or int(tokens[-1]) >= vocabulary:
        yield f"{DRAFT_VOCABULARY} must be distinct tokens from 0 to {vocabulary - 1} in ascending order"


def save_drafter(
    path: Path, method: str, config: DrafterConfig, verifier: Identity, module: torch.nn.Module, counts: torch.Tensor,
    training: Mapping[str, Any], draft_vocabulary: torch.Tensor | None = None, storage: Storage = "bf16",
) -> None:  # fmt: skip
    """Write a drafter's folder: its weights in bf16 or its matrices in 8 bits, and `training` unchanged.

    draft_vocabulary: sorted ids, int64 [H], if H = `config.draft_vocab_size` is not 0. Raises CheckpointError if it
    does not fit the configuration.
    """
    state = module.state_dict()
    if storage == "int8":
        tensors = encode(state)
    else:
        tensors = {name: t.detach().cpu().to(torch.bfloat16).contiguous() for name, t in state.items()}
    small = int(counts.max()) <= torch.iinfo(torch.int32).max
    tensors[TOKEN_COUNTS] = counts.to(torch.int32 if small else torch.int64).cpu()
    given = torch.empty(0, dtype=torch.long) if draft_vocabulary is None else draft_vocabulary.cpu().contiguous()
    if config.draft_vocab_size:
        tensors[DRAFT_VOCABULARY] = given
        problems = list(_vocabulary_problems(given, config.draft_vocab_size, config.vocab_size))
    else:
        problems = [f"{DRAFT_VOCABULARY} has {len(given)} tokens, expected none"] if len(given) else []
    if problems:
        raise CheckpointError(f"{path}: {problems[0]}", "set draft_vocab_size to the number of tokens")
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path / WEIGHTS_FILE), metadata={"format": "pt"})
    (path / WEIGHTS_FILE).chmod(0o644)  # safetensors makes the file readable for its owner only
    values = _ConfigFile(method, asdict(config), verifier, training, _digest(path / WEIGHTS_FILE))
    (path / CONFIG_FILE).write_text(json.dumps(asdict(values), indent=2) + "\n", encoding="utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
