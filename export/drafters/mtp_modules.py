"""Multi-token-prediction modules inside of verifiers' checkpoints, recognised by the names of their tensors.

| layout      | checkpoints               | prefix of the module   | projection reads | hidden state              |
|-------------|---------------------------|------------------------|------------------|---------------------------|
| DeepSeek-V3 | DeepSeek-V3, GLM-4.5      | `model.layers.L.`      | [E ; h]          | after the final norm      |
| MiMo        | MiMo-7B                   | `model.mtp_layers.0.`  | [h ; E]          | of the last layer         |
| Qwen3-Next  | Qwen3-Next                | `mtp.`                 | [E ; h]          | after the final norm      |
| redraft     | the embedded model        | none, mtp.safetensors  | [h ; E]          | after the final norm      |

L is the verifier's number of layers, E the next token's embedding, h the hidden state. All but MiMo's last column is
what transformers (`MtpModel`), vLLM and SGLang compute. MiMo's is its authors' vLLM code; SGLang norms that state too.

Step i + 1 reads the state that step i predicted, of the same kind as the verifier's. vLLM differs there: DeepSeek-V3's
next step reads the state before the module's norm, and MiMo's the one after it. No row is masked: vLLM zeroes the
embedding at position 0, training does not.

The module is a decoder layer of the verifier's own kind, between norms and a projection. transformers' loader reads the
layer as that of a model with one layer, so every layer that it converts can be the module's. Embedding and head are the
verifier's: copies of them in the module are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from redraft.errors import CheckpointError
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN, AnyCheckpoint, TensorEntry
from redraft.export.checkpoint.loading import LoadedTensors, check_entries, check_finite, load_tensors
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import LAYER_PREFIX, Checkpoint, read_header
from redraft.export.checkpoint.stored_tensor import StoredTensor
from redraft.export.drafters.checkpoint import MOST_LISTED, differences, listed
from redraft.export.reference import keep_layers
from redraft.names import LAST_HIDDEN_STATE

EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, NORM = "embedding_norm", "hidden_norm", "projection", "norm"
"""Parts of a module around its decoder layer: norms of its inputs, their projection, and the norm before the head."""
OWN_KEY = "redraft_mtp"
"""In a checkpoint's config.json: names the file of a module in redraft's layout."""
_WITHOUT = "train a drafter for it with `redraft train`"


@dataclass(frozen=True)
class Layout:
    """The names of a module's tensors, after the module's prefix.

    parts:  names of EMBEDDING_NORM, HIDDEN_NORM, PROJECTION and NORM without `.weight`.
    layer:  prefix of the decoder layer's tensors.   copies: tensors that repeat the verifier's embedding and head.
    hidden_first: True if the projection reads the hidden state before the embedding.
    normed: True if the hidden state is the one after the final norm.
    """

    name: str
    parts: Mapping[str, str]
    layer: str = ""
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    normed: bool = True


def _parts(embedding_norm: str, hidden_norm: str, projection: str, norm: str) -> dict[str, str]:
    return {EMBEDDING_NORM: embedding_norm, HIDDEN_NORM: hidden_norm, PROJECTION: projection, NORM: norm}


DEEPSEEK = Layout(
    "DeepSeek-V3",
    _parts("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
MIMO = Layout(
    "MiMo",
    _parts("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    hidden_first=True,
    normed=False,
)
QWEN = Layout("Qwen3-Next", _parts("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.")
OWN = Layout("redraft", _parts(EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, NORM), "layer.", hidden_first=True)
_MIMO_PREFIX, _QWEN_PREFIX = "model.mtp_layers.", "mtp."


@dataclass(frozen=True)
class NativeModule:
    """A module inside of a checkpoint, the first one if there are several.

    layers:  of the verifier.   prefix: before the names of its tensors.   count: modules in the checkpoint.
    entries: its tensors by their names after the prefix.
    """

    layout: Layout
    layers: int
    prefix: str
    count: int
    entries: Mapping[str, TensorEntry]

    @property
    def description(self) -> str:
        """One line about the module."""
        first = f", the first of {self.count} modules" if self.count > 1 else ""
        return f"a multi-token-prediction module in {self.layout.name}'s layout{first}"

    @property
    def hidden_states(self) -> tuple[str, ...]:
        """The verifier's hidden state that it reads."""
        return (LAST_HIDDEN_STATE if self.layout.normed else str(self.layers - 1),)

    @property
    def files(self) -> tuple[str, ...]:
        """The checkpoint's files that hold it, sorted."""
        return tuple(sorted({entry.file for entry in self.entries.values()}))


def find_module(checkpoint: AnyCheckpoint) -> NativeModule | None:
    """Return the module of a checkpoint; None if it has none of a known layout. Reads no weights."""
    layers = checkpoint.config.get("num_hidden_layers")
    names = checkpoint.modules
    if not isinstance(layers, int):
        return None
    if checkpoint.config.get(OWN_KEY):
        entries = _own_entries(checkpoint.path, checkpoint.config[OWN_KEY])
        return NativeModule(OWN, layers, "", 1, entries)
    numbers = {int(match[1]) for name in names if (match := LAYER_PREFIX.match(name))}
    if layers in numbers:
        return _module(DEEPSEEK, layers, f"model.layers.{layers}.", len(numbers), names)
    if any(name.startswith(_MIMO_PREFIX) for name in names):
        return _module(MIMO, layers, f"{_MIMO_PREFIX}0.", _count(_MIMO_PREFIX, names), names)
    if any(f"{_QWEN_PREFIX}{part}.weight" in names for part in QWEN.parts.values()):
        return _module(QWEN, layers, _QWEN_PREFIX, _count(f"{_QWEN_PREFIX}layers.", names), names)
    return None


def require_module(checkpoint: AnyCheckpoint) -> NativeModule:
    """Return the module of a checkpoint. Raises CheckpointError if it has none, or one of an unknown layout."""
    if found := find_module(checkpoint):
        return found
    if names := sorted(checkpoint.modules):
        raise CheckpointError(
            f"{checkpoint.path} has a module of an unknown layout: no known layout has {listed(names)}",
            f"known are the layouts of {', '.join(layout.name for layout in (DEEPSEEK, MIMO, QWEN))}",
        )
    raise CheckpointError(f"{checkpoint.path} has no multi-token-prediction module", _WITHOUT)


def _module(layout: Layout, layers: int, prefix: str, count: int, names: Mapping[str, TensorEntry]) -> NativeModule:
    entries = {name.removeprefix(prefix): entry for name, entry in names.items() if name.startswith(prefix)}
    if layout is QWEN:
        later = tuple(f"layers.{number}." for number in range(1, count))
        entries = {name: entry for name, entry in entries.items() if not name.startswith(later)}
    return NativeModule(layout, layers, prefix, max(1, count), entries)


def _count(prefix: str, names: Iterable[str]) -> int:
    """Return the number of modules, whose numbers follow a prefix."""
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    return len({number for number in numbers if number.isdecimal()})


def _own_entries(path: Path, named: Any) -> dict[str, TensorEntry]:
    """Return the tensors of the file that a configuration names. Raises CheckpointError."""
    file = str(named.get("file")) if isinstance(named, dict) else ""
    if not file or Path(file).name != file or not (path / file).is_file():
        raise CheckpointError(
            f"{path} has no multi-token-prediction module: {OWN_KEY} names no file of it", DOWNLOAD_AGAIN
        )
    return {entry.name: entry for entry in read_header(path / file)}


_LAYERS, _LAYER = "model.layers.", "model.layers.0."
_BUFFER = "rotary_emb.inv_freq"
"""Older checkpoints store a buffer of this name, which the configuration determines."""
_DAMAGED = "give the checkpoint as it was published, or leave out --drafter native"


@dataclass(frozen=True)
class LoadedModule:
    """A checkpoint's module.

    architecture: the verifier's with one layer.   checkpoint, loaded: the layer's tensors by the names of that model.
    parts: stored tensors around the layer, by the names of `NativeMtp`.
    """

    found: NativeModule
    architecture: Architecture
    checkpoint: Checkpoint
    loaded: LoadedTensors
    parts: Mapping[str, StoredTensor]


def load_module(checkpoint: AnyCheckpoint) -> LoadedModule:
    """Return the module of a checkpoint. Reads its weights once, to check that they are finite.

    Raises CheckpointError if there is no module of a known layout, or listing tensors that are missing, surplus or of
    another shape, and UnsupportedModelError for a verifier or a type of tensors that redraft does not export.
    """
    found = require_module(checkpoint)
    assert isinstance(checkpoint, Checkpoint), "no other kind of checkpoint has modules"
    one = Architecture.of(_one_layer(load_config(checkpoint)))
    layer = _stored_as(found, one, checkpoint)
    outside = {name: entry for name, entry in checkpoint.tensors.items() if not name.startswith(_LAYERS)}
    viewed = replace(checkpoint, tensors={**outside, **layer}, modules={})
    parts = {f"{part}.weight": found.entries[f"{name}.weight"] for part, name in found.layout.parts.items()}
    stored = {name: StoredTensor.of(entry) for name, entry in parts.items()}
    for tensor in stored.values():
        check_entries(checkpoint, tensor, checkpoint.readable)
    check_finite(replace(checkpoint, tensors={**parts, **layer}))
    return LoadedModule(found, one, viewed, load_tensors(viewed, one), stored)


def _one_layer(text: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a model whose only layer is a module's: like the verifier's last one.

    A model that names the types of its modules' layers has those.
    """
    one = keep_layers(text, [int(text.num_hidden_layers) - 1])
    for name in ("layer_types", "mlp_layer_types"):
        if named := getattr(text, f"mtp_{name}", None):
            setattr(one, name, list(named[:1]))
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    return one


def _stored_as(found: NativeModule, one: Architecture, checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return the tensors of the module's layer by their names in a model of one layer.

    Raises CheckpointError if the module has not the tensors that its layout and the architecture need.
    """
    layout, config = found.layout, one.text
    width = int(config.hidden_size)
    parts: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,) for name in layout.parts.values()}
    parts[f"{layout.parts[PROJECTION]}.weight"] = (width, 2 * width)
    with torch.device("meta"), no_init_weights():
        model = one.text_class._from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    inner = {name.removeprefix(_LAYER): shape for name, shape in shapes.items() if name.startswith(_LAYER)}
    expected = parts | {f"{layout.layer}{name}": shape for name, shape in inner.items()}
    entries = {
        name: entry for name, entry in found.entries.items() if name not in layout.copies and not name.endswith(_BUFFER)
    }
    here = {name: entry.shape for name, entry in entries.items()}
    stored, needed = ({f"{found.prefix}{name}": shape for name, shape in of.items()} for of in (here, expected))
    if problems := list(differences(stored, needed, MOST_LISTED)):
        raise CheckpointError(f"{checkpoint.path}: {found.description}: {'; '.join(problems)}", _DAMAGED)
    return {f"{_LAYER}{name}": entries[f"{layout.layer}{name}"] for name in inner}
