"""Draft checkpoints that other projects published, converted to a drafter's folder.

| layout      | project                        | form        | layer's tensors            | `fc.weight`            |
|-------------|--------------------------------|-------------|----------------------------|------------------------|
| safeailab   | SafeAILab/EAGLE, HASS          | EAGLE-1, -2 | `layers.0.*`               | [n, 2n], reads [E ; F] |
| safeailab   | SafeAILab/EAGLE                | EAGLE-3     | `midlayer.*`               | [n, 3n]                |
| specforge   | sgl-project/SpecForge          | EAGLE-3     | `midlayer.*`, `layers.0.*` | [n, 3n]                |
| speculators | vllm-project/speculators       | EAGLE-1     | `transformer.*`            | `fusion_fc`, [n, 2n]   |
| speculators | vllm-project/speculators       | EAGLE-3     | `layers.0.*`               | [n, 3n]                |

`redraft.export.drafters.published_block` has the layouts of drafters that draft a block in one pass.

n is the hidden size, F the feature and E the next token's embedding. `redraft.export.drafters.feature_drafter` has F
first, so the columns of EAGLE-1's `fc.weight` change places.

Draft vocabulary. `d2t[i]` + i is the token of column i. `t2d` is True for these tokens. Both may be absent if the
draft vocabulary is the verifier's.

Hidden states of EAGLE-3. The name `3` is the output of layer 3 of L layers, from 0.
- Without ids, they are those that enter the layers 2, L // 2 and L - 3, so the outputs of the layers before.
- `eagle_aux_hidden_state_layer_ids` in the configuration itself are vLLM's: an id is the layer that the hidden state
  enters, so id 3 is named `2`.
- The same key in `eagle_config` is SGLang's: an id is the layer that outputs the hidden state, so id 3 is named `3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redraft.errors import CheckpointError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.base import AnyCheckpoint, read_json_object
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.drafters.checkpoint import CONFIG_FILE, DrafterCheckpoint, is_plain_checkpoint, listed
from redraft.export.drafters.published_block import KIND, block_states, recognise_block
from redraft.export.drafters.published_checks import OTHER_VERIFIER
from redraft.export.drafters.published_tensors import TENSORS, PublishedTensors
from redraft.export.gguf.checkpoint import SUFFIX
from redraft.methods import METHODS, ROWS, checkpoint_method, find_method
from redraft.names import LAST_HIDDEN_STATE

Layout = Literal["safeailab", "specforge", "speculators", "z-lab", "deepspec"]
FIRST, THIRD = "eagle", "eagle3"
"""Methods of the converted drafters."""
FIRST_METHODS = (FIRST, "eagle2", "hass")
"""Methods whose drafters have EAGLE-1's form, so that each may use the others'. Published files do not say which."""
KNOWN = (
    "EAGLE, EAGLE-2, HASS or EAGLE-3 in the layout of SafeAILab, SpecForge or speculators, DFlash or JetSpec in "
    "z-lab's, DSpark in DeepSpec's, or DFlash or DSpark in speculators'"
)

_OWNERS: Mapping[Layout, str] = {
    "safeailab": "SafeAILab's", "specforge": "SpecForge's", "speculators": "speculators'", "z-lab": "z-lab's",
    "deepspec": "DeepSpec's",
}  # fmt: skip
_IDS = "eagle_aux_hidden_state_layer_ids"
_SPECFORGE = "LlamaForCausalLMEagle3"
_OURS = {"method", "verifier"}
"""Keys of config.json in a folder of redraft's own layout."""


@dataclass(frozen=True)
class Published:
    """A published draft checkpoint: its folder, the method of its drafter, its layout, and a line about it."""

    path: Path
    method: str
    layout: Layout

    @property
    def description(self) -> str:
        """The form and the layout, such as "EAGLE-3 in SpecForge's layout"."""
        form = "EAGLE-3" if self.method == THIRD else "EAGLE-1, EAGLE-2 or HASS"
        if self.drafts_blocks:
            form = ROWS[self.method].summary.partition(":")[0]
        return f"{form} in {_OWNERS[self.layout]} layout"

    @property
    def drafts_blocks(self) -> bool:
        """True if its drafter drafts a block in one pass."""
        return ROWS[self.method].family == "block"


def recognise(path: Path) -> Published | None:
    """Return the published draft checkpoint in a folder, or None. Reads config.json and the tensors' names.

    If the weights cannot be read, the configuration alone decides, so that `convert` can name the invalid file.
    """
    try:
        values = read_json_object(path / CONFIG_FILE)
    except (OSError, CheckpointError):
        return None
    if block := recognise_block(values):
        return Published(path, *block)
    if kind := values.get(KIND):
        return Published(path, kind, "speculators") if kind in (FIRST, THIRD) else None
    architectures = [name for name in values.get("architectures") or () if isinstance(name, str)]
    try:
        names = set(PublishedTensors.open(path).shapes)
    except CheckpointError:
        names = set()
    by_config = "draft_vocab_size" in values or any(THIRD in name.lower() for name in architectures)
    if by_config or {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names:
        return Published(path, THIRD, "specforge" if _SPECFORGE in architectures else "safeailab")
    normed = any(name.endswith(("input_layernorm.weight", "hidden_norm.weight")) for name in names)
    unreadable = not names and isinstance(values.get("bias"), bool) and values.get("num_hidden_layers") == 1
    if unreadable or (not normed and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names):
        return Published(path, FIRST, "safeailab")
    return None


def named_method(path: Path, drafter: str = "") -> str:
    """Return the method of the drafter in a folder, published or ours, or of a draft model.

    drafter: its id. An id in FIRST_METHODS names the method of any drafter of their form. Raises CheckpointError if the
    folder has no drafter, or like `check_layout` if the id is a method.
    """
    if published := recognise(path):
        method: str = published.method
    else:
        check_layout(path, drafter if drafter in METHODS else checkpoint_method())
        plain = is_plain_checkpoint(path)
        method = checkpoint_method() if plain else DrafterCheckpoint.open(path).method
    return drafter if {method, drafter} <= set(FIRST_METHODS) else method


def check_layout(path: Path, method: str) -> None:
    """Raise CheckpointError listing the unknown keys of a folder that has neither a published layout nor ours.

    If the method takes a decoder's checkpoint, the folder may be one, or a GGUF file.
    """
    if path.suffix == SUFFIX and not find_method(method).takes_checkpoints:
        raise CheckpointError(
            f"{path} is a model, and a drafter of {method} is not", f"give method={checkpoint_method()}"
        )
    try:
        values = read_json_object(path / CONFIG_FILE)
    except (OSError, CheckpointError):
        return  # those that open the folder name the file
    kind, plain = values.get(KIND), is_plain_checkpoint(path)
    decoder = plain and not kind and find_method(method).takes_checkpoints
    if decoder or _OURS & set(values) or recognise(path):
        return
    names = set(PublishedTensors.open(path).shapes)
    unknown = [f"{KIND} {kind!r}"] if kind else sorted(names - TENSORS)
    keys = unknown or sorted(names) or ["no tensors"]
    raise CheckpointError(
        f"{path} has an unknown layout: no known layout has {'only ' if names and not unknown else ''}{listed(keys)}",
        f"give {KNOWN}, or a folder that `redraft train publish` wrote"
        + (f"; a draft model needs method={checkpoint_method()}" if plain and not kind else ""),
    )


def read_states(path: Path, verifier: AnyCheckpoint) -> tuple[str, ...] | None:
    """Return the verifier's hidden states that the drafter in a folder reads, None if the folder does not say."""
    if published := recognise(path):
        if published.method == FIRST:
            return (LAST_HIDDEN_STATE,)
        layers = decoder_shape(model_config.load_config(verifier)).layers
        read = block_states if published.drafts_blocks else states_of
        return read(path, read_json_object(path / CONFIG_FILE), layers)
    if is_plain_checkpoint(path):
        return None
    states = DrafterCheckpoint.open(path).config.get("hidden_states")
    if states and not (isinstance(states, list) and all(isinstance(state, str) for state in states)):
        raise CheckpointError(
            f"{path / CONFIG_FILE}: config.hidden_states must be a list of names, not {states!r}",
            "give a folder that `redraft train publish` wrote",
        )
    return tuple(states) if states else None


def nested(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `eagle_config` of a configuration."""
    found = values.get("eagle_config")
    return found if isinstance(found, dict) else {}


def states_of(path: Path, values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the names of the hidden states that EAGLE-3 reads from a verifier of `layers` layers."""
    own = nested(values)
    if own.get("use_aux_hidden_state") is False:
        return (LAST_HIDDEN_STATE,)
    outputs = own.get(_IDS) or [entered - 1 for entered in values.get(_IDS) or (2, layers // 2, layers - 3)]
    if len(set(outputs)) < len(outputs) or min(outputs) < 0 or max(outputs) >= layers:
        raise CheckpointError(
            f"{path} reads the outputs of layers {', '.join(map(str, outputs))}, expected different layers from 0 to "
            f"{layers - 1}",
            OTHER_VERIFIER,
        )
    return tuple(str(layer) for layer in outputs)
