"""Draft checkpoints that other projects published, converted to a drafter's folder.

| layout      | project                        | form        | layer's tensors            | `fc.weight`            |
|-------------|--------------------------------|-------------|----------------------------|------------------------|
| safeailab   | SafeAILab/EAGLE, HASS          | EAGLE-1, -2 | `layers.0.*`               | [n, 2n], reads [E ; F] |
| safeailab   | SafeAILab/EAGLE                | EAGLE-3     | `midlayer.*`               | [n, 3n]                |
| specforge   | sgl-project/SpecForge          | EAGLE-3     | `midlayer.*`, `layers.0.*` | [n, 3n]                |
| speculators | vllm-project/speculators       | EAGLE-1     | `transformer.*`            | `fusion_fc`, [n, 2n]   |
| speculators | vllm-project/speculators       | EAGLE-3     | `layers.0.*`               | [n, 3n]                |

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

# pylint: disable=too-many-lines  # one function for each project's format
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.initialization import no_init_weights

from redraft.errors import CheckpointError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.base import AnyCheckpoint, read_json_object
from redraft.export.checkpoint.loading import load_tensors
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.checkpoint.sources import Source
from redraft.export.drafters import checkpoint
from redraft.export.drafters.checkpoint import CONFIG_FILE, DrafterCheckpoint, Identity, differences, save_drafter
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter
from redraft.export.drafters.layer import verifier_sizes
from redraft.export.drafters.published_tensors import PublishedTensors
from redraft.export.gguf.checkpoint import SUFFIX
from redraft.export.graph import decoder
from redraft.methods import METHODS, checkpoint_method, find_method
from redraft.names import LAST_HIDDEN_STATE

Layout = Literal["safeailab", "specforge", "speculators"]
FIRST, THIRD = "eagle", "eagle3"
"""Methods of the converted drafters."""
FIRST_METHODS = (FIRST, "eagle2", "hass")
"""Methods whose drafters have EAGLE-1's form, so that each may use the others'. Published files do not say which."""

_KIND = "speculators_model_type"
_LAYER = "transformer_layer_config"
_IDS = "eagle_aux_hidden_state_layer_ids"
_SPECFORGE = "LlamaForCausalLMEagle3"
_OURS = {"method", "verifier"}
"""Keys of config.json in a folder of redraft's own layout."""
_EMBEDDING, _HEAD, _D2T, _T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
_IN_LAYER = {
    "layer.q_proj.weight": "self_attn.q_proj.weight",
    "layer.k_proj.weight": "self_attn.k_proj.weight",
    "layer.v_proj.weight": "self_attn.v_proj.weight",
    "layer.o_proj.weight": "self_attn.o_proj.weight",
    "layer.mlp_norm.weight": "post_attention_layernorm.weight",
    "layer.gate_proj.weight": "mlp.gate_proj.weight",
    "layer.up_proj.weight": "mlp.up_proj.weight",
    "layer.down_proj.weight": "mlp.down_proj.weight",
}
"""Published names of our parameters, after the layer's prefix."""
_TENSORS = {
    *(f"{layer}{name}" for layer in ("midlayer.", "layers.0.", "transformer.") for name in _IN_LAYER.values()),
    *(f"{layer}{name}.weight" for layer in ("midlayer.", "layers.0.") for name in ("input_layernorm", "hidden_norm")),
    *("fc.weight", "fc.bias", "fusion_fc.weight", "fusion_fc.bias", "norm.weight", "input_norm.weight"),
    *(f"fc_norm.{i}.weight" for i in range(3)),
    *(_EMBEDDING, _HEAD, _D2T, _T2D),
}
"""Names of tensors in the layouts."""
_MAX_LISTED = 4
_KNOWN = "EAGLE, EAGLE-2, HASS or EAGLE-3 in the layout of SafeAILab, SpecForge or speculators"
_FUSION = "fusion.projection.weight"
_FUSION_BIAS = "fusion.projection.bias"
_FITTING = "give the checkpoint that its config.json describes"
_OTHER_VERIFIER = "give the verifier that this drafter was trained for"
_NOT_COVERED = "train a drafter for this verifier with `redraft train`"


@dataclass(frozen=True)
class Published:
    """A published draft checkpoint: its folder, the method of its drafter, its layout, and a line about it."""

    path: Path
    method: str
    layout: Layout

    @property
    def description(self) -> str:
        """The form and the layout, such as "EAGLE-3 in SpecForge's layout"."""
        owner = {"safeailab": "SafeAILab's", "specforge": "SpecForge's", "speculators": "speculators'"}[self.layout]
        return f"{'EAGLE-3' if self.method == THIRD else 'EAGLE-1, EAGLE-2 or HASS'} in {owner} layout"


def recognise(path: Path) -> Published | None:
    """Return the published draft checkpoint in a folder, or None. Reads config.json and the tensors' names.

    If the weights cannot be read, the configuration alone decides, so that `convert` can name the invalid file.
    """
    try:
        values = read_json_object(path / CONFIG_FILE)
    except (OSError, CheckpointError):
        return None
    if kind := values.get(_KIND):
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
        method = checkpoint.named_method(path)
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
    kind, plain = values.get(_KIND), checkpoint.is_plain_checkpoint(path)
    decoder = plain and not kind and find_method(method).takes_checkpoints
    if decoder or _OURS & set(values) or recognise(path):
        return
    names = set(PublishedTensors.open(path).shapes)
    unknown = [f"{_KIND} {kind!r}"] if kind else sorted(names - _TENSORS)
    keys = unknown or sorted(names) or ["no tensors"]
    more = f" and {len(keys) - _MAX_LISTED} more" if len(keys) > _MAX_LISTED else ""
    raise CheckpointError(
        f"{path} has an unknown layout: no known layout has {'only ' if names and not unknown else ''}"
        f"{', '.join(keys[:_MAX_LISTED])}{more}",
        f"give {_KNOWN}, or a folder that `redraft train publish` wrote"
        + (f"; a draft model needs method={checkpoint_method()}" if plain and not kind else ""),
    )


def read_states(path: Path, verifier: AnyCheckpoint) -> tuple[str, ...] | None:
    """Return the verifier's hidden states that the drafter in a folder reads, None if the folder does not say."""
    if published := recognise(path):
        if published.method == FIRST:
            return (LAST_HIDDEN_STATE,)
        layers = decoder_shape(model_config.load_config(verifier)).layers
        return _hidden_states(path, read_json_object(path / CONFIG_FILE), layers)
    if checkpoint.is_plain_checkpoint(path):
        return None
    states = DrafterCheckpoint.open(path).config.get("hidden_states")
    if states and not (isinstance(states, list) and all(isinstance(state, str) for state in states)):
        raise CheckpointError(
            f"{path / CONFIG_FILE}: config.hidden_states must be a list of names, not {states!r}",
            "give a folder that `redraft train publish` wrote",
        )
    return tuple(states) if states else None


def convert(path: Path, verifier: AnyCheckpoint, identity: Identity, out: Path) -> DrafterCheckpoint:
    """Write the published draft checkpoint in `path` as a drafter's folder `out`, in bf16. Returns the drafter.

    It has no counts of tokens: all are 1. Memory is the drafter's in bf16 and one more tensor. Raises CheckpointError
    if the checkpoint has another layout, does not fit the verifier, or has a part that redraft's drafters do not have.
    """
    published = recognise(path)
    if published is None:
        raise CheckpointError(
            f"{path} is no published drafter of a known layout",
            f"give a folder of {_KNOWN}",
        )
    values = read_json_object(path / CONFIG_FILE)
    target = model_config.load_config(verifier)
    stored = PublishedTensors.open(path)
    config = _configuration(published, values, target, stored)
    names = _names(published, config, values, stored)
    _check_tensors(stored, config, names)
    vocabulary = _draft_vocabulary(stored, config)
    _check_embedding(stored, verifier, target)
    module = _filled(config, stored, names)
    counts = torch.ones(config.vocab_size, dtype=torch.long)
    training = {"published": published.description, "folder": path.name}
    save_drafter(out, published.method, config, identity, module, counts, training, vocabulary)
    return DrafterCheckpoint.open(out)


def _configuration(
    published: Published, values: Mapping[str, Any], target: PretrainedConfig, stored: PublishedTensors
) -> FeatureConfig:
    """Return the drafter's configuration. Raises CheckpointError if it does not fit the verifier or our module."""
    path, shape = published.path, decoder_shape(target)
    config = _layer_configuration(path, values)
    found = decoder_shape(config)
    width = values.get("target_hidden_size") or found.hidden
    for what, here, wanted in (
        ("hidden states of width", width, shape.hidden),
        ("hidden states of width", found.hidden, shape.hidden),
        ("a vocabulary of", found.vocabulary, shape.vocabulary),
    ):
        if here != wanted:
            raise CheckpointError(f"{path} has {what} {here}, the verifier has {wanted}", _OTHER_VERIFIER)
    _check_features(path, values, config)
    own_head = _HEAD in stored.shapes
    sizes = verifier_sizes(config, found.vocabulary)
    sizes["logit_scale"] = 1.0 if own_head else model_config.logit_scale(target)
    if published.method == FIRST:
        return FeatureConfig(**sizes, input_norm=False, own_head=own_head)
    drafted = int(values.get("draft_vocab_size") or found.vocabulary)
    return FeatureConfig(
        **sizes,
        fusion="attention",
        outputs="normed_back" if _option(values, "norm_output", "return_hidden_post_norm") else "normed",
        hidden_states=_hidden_states(path, values, shape.layers),
        feature_norms=_option(values, "fc_norm"),
        joint_norm=_option(values, "norm_before_fc"),
        own_head=own_head,
        normed_residual=_option(values, "norm_before_residual"),
        draft_vocab_size=0 if drafted == found.vocabulary else drafted,
    )


def _layer_configuration(path: Path, values: Mapping[str, Any]) -> PretrainedConfig:
    """Return the layer's transformers configuration, which has the defaults of values that the file leaves out."""
    layer = values.get(_LAYER, values)
    kind = str(layer.get("model_type", "llama")) if isinstance(layer, dict) else ""
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(f"{path / CONFIG_FILE}: the layer's model_type {kind!r} is unknown", _FITTING)
    try:
        config: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(dict(layer))
    except Exception as error:  # noqa: BLE001 (transformers raises errors of many types)
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise CheckpointError(f"{path / CONFIG_FILE} is invalid ({reason})", "restore the original file") from None
    return config


def _check_features(path: Path, values: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Raise CheckpointError naming the first part of a published drafter that redraft's drafters do not have."""
    rope = getattr(config, "rope_parameters", None) or {}
    types = getattr(config, "layer_types", None) or ()
    rotated = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1
    kind, act = rope.get("rope_type") or rope.get("type") or "default", getattr(config, "hidden_act", "silu")
    for is_there, what in (
        (kind != "default", f"a rotary embedding of type {kind!r}"),
        (rotated != 1, f"a rotary embedding of {rotated} of each head"),
        (act != "silu", f"the activation {act!r}"),
        (any(layer != "full_attention" for layer in types), "a layer that does not attend to all tokens"),
        (bool(values.get("layernorms")), "norms of the embedding and before the head (layernorms)"),
    ):
        if is_there:
            raise CheckpointError(f"{path} has {what}, which redraft's drafters do not have", _NOT_COVERED)


def _option(values: Mapping[str, Any], *names: str) -> bool:
    """Return True if the configuration, or its `eagle_config`, sets one of the options."""
    return any(bool(place.get(name)) for place in (values, _nested(values)) for name in names)


def _nested(values: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = values.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def _hidden_states(path: Path, values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the names of the hidden states that EAGLE-3 reads from a verifier of `layers` layers."""
    nested = _nested(values)
    if nested.get("use_aux_hidden_state") is False:
        return (LAST_HIDDEN_STATE,)
    outputs = nested.get(_IDS) or [entered - 1 for entered in values.get(_IDS) or (2, layers // 2, layers - 3)]
    if len(set(outputs)) < len(outputs) or min(outputs) < 0 or max(outputs) >= layers:
        raise CheckpointError(
            f"{path} reads the outputs of layers {', '.join(map(str, outputs))}, expected different layers from 0 to "
            f"{layers - 1}",
            _OTHER_VERIFIER,
        )
    return tuple(str(layer) for layer in outputs)


def _names(
    published: Published, config: FeatureConfig, values: Mapping[str, Any], stored: PublishedTensors
) -> dict[str, str]:
    """Return the published name of each of our parameters. It has no name if the published drafter has no such bias."""
    third, speculators = published.method == THIRD, published.layout == "speculators"
    layer = "midlayer." if third and any(name.startswith("midlayer.") for name in stored.shapes) else "layers.0."
    if speculators and not third:
        layer = "transformer."
    names = {ours: f"{layer}{theirs}" for ours, theirs in _IN_LAYER.items()}
    if config.own_head:
        names["head.weight"] = _HEAD
    if third:
        norms = {f"feature_norms.{i}.weight": f"fc_norm.{i}.weight" for i in range(len(config.hidden_states))}
        return {
            **names,
            "fusion.embedding_norm.weight": f"{layer}input_layernorm.weight",
            "fusion.feature_norm.weight": f"{layer}hidden_norm.weight",
            "norm.weight": "norm.weight",
            **({"features.weight": "fc.weight"} if len(config.hidden_states) > 1 else {}),
            **(norms if config.feature_norms else {}),
            **({"joint_norm.weight": "input_norm.weight"} if config.joint_norm else {}),
        }
    fc, option = ("fusion_fc", "fusion_bias") if speculators else ("fc", "bias")
    names[_FUSION] = f"{fc}.weight"
    if values.get(option, f"{fc}.bias" in stored.shapes):
        names[_FUSION_BIAS] = f"{fc}.bias"
    return names


def _module(config: FeatureConfig) -> FeatureDrafter:
    """Return the module in bf16 without numbers."""
    with torch.device("meta"):
        return FeatureDrafter(config).to(torch.bfloat16)


def _check_tensors(stored: PublishedTensors, config: FeatureConfig, names: Mapping[str, str]) -> None:
    """Raise CheckpointError listing tensors that are missing, surplus or of another shape."""
    shapes = {names[ours]: tuple(t.shape) for ours, t in _module(config).state_dict().items() if ours in names}
    optional = {
        _EMBEDDING: (config.vocab_size, config.hidden_size),
        _D2T: (config.draft_size,),
        _T2D: (config.vocab_size,),
    }
    needed = {_D2T} if config.draft_vocab_size else set()
    shapes |= {name: shape for name, shape in optional.items() if name in stored.shapes or name in needed}
    if problems := list(differences(stored.shapes, shapes)):
        raise CheckpointError(f"{stored.path}: {'; '.join(problems)}", _FITTING)


def _draft_vocabulary(stored: PublishedTensors, config: FeatureConfig) -> torch.Tensor | None:
    """Return the sorted tokens of the columns, int64 [H]; None if they are all tokens. Raises CheckpointError."""
    if problems := list(_map_problems(stored, config)):
        raise CheckpointError(f"{stored.path}: {problems[0]}", "download the checkpoint again, or train another")
    return _tokens(stored) if config.draft_vocab_size else None


def _tokens(stored: PublishedTensors) -> torch.Tensor:
    offsets = stored.integers(_D2T)
    return offsets + torch.arange(len(offsets))


def _map_problems(stored: PublishedTensors, config: FeatureConfig) -> Iterator[str]:
    """Yield what is wrong with the map of the draft vocabulary."""
    if _D2T not in stored.shapes:
        return
    tokens, last = _tokens(stored), config.vocab_size - 1
    if int(tokens.min()) < 0 or int(tokens.max()) > last:
        yield f"{_D2T} maps to tokens from {int(tokens.min())} to {int(tokens.max())}, expected 0 to {last}"
    elif not bool((tokens.diff() > 0).all()):
        column = int((tokens.diff() <= 0).nonzero()[0]) + 1
        yield f"{_D2T} does not map to ascending tokens: column {column} is {int(tokens[column])}"
    elif _T2D in stored.shapes and config.draft_vocab_size:  # writers leave it at either value for all tokens
        drafted = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
        different = (stored.integers(_T2D).bool() != drafted).nonzero()
        if len(different):
            yield f"{_T2D} disagrees with {_D2T} for {len(different)} tokens, first {int(different[0])}"


def _check_embedding(stored: PublishedTensors, verifier: AnyCheckpoint, target: PretrainedConfig) -> None:
    """Raise CheckpointError if the checkpoint has an embedding that is not the verifier's in the type it is stored in.

    The verifier's is read a few rows at a time.
    """
    if _EMBEDDING not in stored.shapes:
        return
    published, row = stored.numbers(_EMBEDDING), 0
    architecture = Architecture.of(target)
    with torch.device("meta"), no_init_weights():
        name = decoder.vocabulary_parameters(architecture.text_class._from_config(architecture.text))[0]
    tensors = load_tensors(verifier, architecture).parameters
    for slab in Source(verifier, {name: tuple(published.shape)}, tensors).slabs(name):
        own, here = torch.from_numpy(slab).to(published.dtype), published[row : row + len(slab)]
        if not torch.equal(own, here):
            first = row + int((own != here).any(1).nonzero()[0])
            raise CheckpointError(
                f"{stored.path}: {_EMBEDDING} differs from the verifier's embedding, first in row {first}",
                "redraft drafts with the verifier's embedding; " + _OTHER_VERIFIER,
            )
        row += len(slab)


def _filled(config: FeatureConfig, stored: PublishedTensors, names: Mapping[str, str]) -> FeatureDrafter:
    """Return the module in bf16 with the published numbers."""
    module = _module(config).to_empty(device="cpu").requires_grad_(False)
    for ours, parameter in module.state_dict().items():
        if ours not in names:
            parameter.zero_()
            continue
        numbers = stored.numbers(names[ours])
        parameter.copy_(numbers.roll(config.hidden_size, 1) if ours == _FUSION else numbers)
    return module
