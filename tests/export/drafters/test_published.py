"""Published draft checkpoints: their drafters compute what the papers and layouts define, and faults are named.

The writers below make small random checkpoints with the files, keys and tensor names of each project.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from redraft.errors import CheckpointError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter
from redraft.export.drafters.published import FIRST, FIRST_METHODS, check_layout, convert, named_method, recognise
from redraft.methods import ROWS as METHOD_ROWS
from tests.export.models import write_checkpoint

N, V, H, LAYERS, HEADS, KV_HEADS, WIDTH = 48, 97, 23, 8, 4, 2, 40
IDENTITY = Identity(("weights",), "tokenizer")
STEPS, ROWS = 4, 5
Tensors = dict[str, torch.Tensor]


# The verifier.


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("verifier")
    return Checkpoint.open(write_checkpoint(folder, "llama", num_hidden_layers=LAYERS, rope_parameters=None))


def weight(verifier: Checkpoint, name: str) -> torch.Tensor:
    return load_file(str(verifier.path / "model.safetensors"))[name]


# Writers, one for each layout.


def draw(*shape: int) -> torch.Tensor:
    """Random numbers that bf16 represents, near 1 for norms."""
    numbers = torch.randn(*shape) * 0.4 if len(shape) == 1 else torch.randn(*shape) * 0.7 * shape[-1] ** -0.5
    return (numbers + (len(shape) == 1)).bfloat16().float()


def layer_tensors(prefix: str, inputs: int, head_dim: int) -> Tensors:
    shapes = {
        "self_attn.q_proj": (HEADS * head_dim, inputs),
        "self_attn.k_proj": (KV_HEADS * head_dim, inputs),
        "self_attn.v_proj": (KV_HEADS * head_dim, inputs),
        "self_attn.o_proj": (N, HEADS * head_dim),
        "mlp.gate_proj": (WIDTH, N),
        "mlp.up_proj": (WIDTH, N),
        "mlp.down_proj": (N, WIDTH),
        "post_attention_layernorm": (N,),
    }
    return {f"{prefix}{name}.weight": draw(*shape) for name, shape in shapes.items()}


def sizes(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": N, "intermediate_size": WIDTH,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "vocab_size": V, "max_position_embeddings": 64, "tie_word_embeddings": False, **changes,
    }  # fmt: skip


def draft_map(tensors: Tensors) -> None:
    tokens = torch.randperm(V)[:H].sort().values
    tensors["d2t"] = tokens - torch.arange(H)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, tokens, True)


def eagle_one(bias: bool = True, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """SafeAILab's EAGLE-1, EAGLE-2 and HASS."""
    tensors = {"fc.weight": draw(N, 2 * N), **layer_tensors("layers.0.", N, N // HEADS)}
    if bias:
        tensors["fc.bias"] = draw(N)
    return sizes(architectures=["LlamaForCausalLM"], bias=bias, **changes), tensors


def eagle_three(
    prefix: str = "midlayer.", small: bool = True, head: bool = True, architecture: str = "LlamaForCausalLM",
    **changes: Any,
) -> tuple[dict[str, Any], Tensors]:  # fmt: skip
    """SafeAILab's EAGLE-3, and SpecForge's with its architecture."""
    config = sizes(architectures=[architecture], head_dim=16, draft_vocab_size=H if small else V, **changes)
    tensors = {
        "fc.weight": draw(N, 3 * N),
        **layer_tensors(prefix, 2 * N, 16),
        f"{prefix}hidden_norm.weight": draw(N),
        f"{prefix}input_layernorm.weight": draw(N),
        "norm.weight": draw(N),
    }
    if head:
        tensors["lm_head.weight"] = draw(H if small else V, N)
    if small:
        draft_map(tensors)
    return config, tensors


def specforge(**changes: Any) -> tuple[dict[str, Any], Tensors]:
    return eagle_three(architecture="LlamaForCausalLMEagle3", **changes)


def speculators_three(small: bool = True, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    _, tensors = eagle_three("layers.0.", small)
    values = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.4.0",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "verifier", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": sizes(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 700.0}),
        "draft_vocab_size": H if small else V, "norm_before_residual": True, "norm_before_fc": False,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None, **changes,
    }  # fmt: skip
    return values, tensors


def speculators_one(**changes: Any) -> tuple[dict[str, Any], Tensors]:
    tensors = {"fusion_fc.weight": draw(N, 2 * N), **layer_tensors("transformer.", N, N // HEADS)}
    values = {
        "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "fusion_bias": False,
        "layernorms": False, "speculators_config": {"algorithm": "eagle"}, "transformer_layer_config": sizes(),
        **changes,
    }  # fmt: skip
    return values, tensors


def write(folder: Path, values: dict[str, Any], tensors: Tensors, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


# References: a loop over all rows, computed again for every drafted token.


def reference_one(
    tensors: Tensors, config: dict[str, Any], features: torch.Tensor, tokens: list[int], embedding: torch.Tensor,
    head: torch.Tensor, prefix: str = "layers.0.", fc: str = "fc",
) -> list[torch.Tensor]:  # fmt: skip
    """Return the logits [V] of each step of EAGLE (section 4.1), whose layer is transformers' without its first norm.

    features: [T, N].   tokens: the T tokens one step ahead.
    """
    llama = LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    llama._attn_implementation = "eager"
    layer = LlamaDecoderLayer(llama, 0).eval()
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    rotary, rows, ids, found = LlamaRotaryEmbedding(llama), list(features), list(tokens), []
    for _ in range(STEPS):
        pairs = torch.stack([torch.cat([embedding[i], row]) for i, row in zip(ids, rows, strict=True)])[None]
        x = F.linear(pairs, tensors[f"{fc}.weight"], tensors.get(f"{fc}.bias"))
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        positions = torch.arange(len(ids))[None]
        out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary(x, positions))
        feature = (out[0] if isinstance(out, tuple) else out)[0, -1]
        found.append(head @ feature)
        rows.append(feature)
        ids.append(int(found[-1].argmax()))
    return found


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * scale


def rotated(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate one head: its number j and its number j + D / 2 are a point of the plane (RoFormer, section 3.2.2)."""
    half = len(x) // 2
    point = torch.complex(x[:half], x[half:])
    angle = torch.tensor([position * theta ** (-2 * j / len(x)) for j in range(half)])
    turned = point * torch.polar(torch.ones(half), angle)
    return torch.cat([turned.real, turned.imag])


def reference_three(
    tensors: Tensors, features: torch.Tensor, tokens: list[int], embedding: torch.Tensor, head: torch.Tensor,
    ids_of: list[int], prefix: str, theta: float = 10000.0, head_dim: int = 16, normed_residual: bool = False,
    normed_back: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the logits [H] of each step of EAGLE-3 (section 3.1), row by row and head by head.

    features: [T, 3 N] of the verifier.   ids_of: the token of each logit.
    """
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def row(position: int, feature: torch.Tensor, token: int) -> torch.Tensor:
        normed = norm(feature, own["hidden_norm.weight"])
        read = torch.cat([norm(embedding[token], own["input_layernorm.weight"]), normed])
        q = (own["self_attn.q_proj.weight"] @ read).view(HEADS, head_dim)
        k = (own["self_attn.k_proj.weight"] @ read).view(KV_HEADS, head_dim)
        keys.append(torch.stack([rotated(one, position, theta) for one in k]))
        values.append((own["self_attn.v_proj.weight"] @ read).view(KV_HEADS, head_dim))
        heads = []
        for number in range(HEADS):
            kv = number // (HEADS // KV_HEADS)
            query = rotated(q[number], position, theta)
            shares = torch.stack([query @ key[kv] for key in keys]).div(head_dim**0.5).softmax(0)
            heads.append(sum(share * value[kv] for share, value in zip(shares, values, strict=True)))
        x = (normed if normed_residual else feature) + own["self_attn.o_proj.weight"] @ torch.cat(heads)
        inner = norm(x, own["post_attention_layernorm.weight"])
        gate = F.silu(own["mlp.gate_proj.weight"] @ inner) * (own["mlp.up_proj.weight"] @ inner)
        return x + own["mlp.down_proj.weight"] @ gate

    for position, (feature, token) in enumerate(zip(features, tokens, strict=True)):
        if "fc_norm.0.weight" in tensors:
            parts = feature.chunk(3)
            feature = torch.cat([norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        if "input_norm.weight" in tensors:
            feature = norm(feature, tensors["input_norm.weight"])
        fused = tensors["fc.weight"] @ feature if "fc.weight" in tensors else feature
        last = row(position, fused, token)
    found = []
    for step in range(STEPS):
        read = norm(last, tensors["norm.weight"])
        found.append(head @ read)
        if step < STEPS - 1:
            token = ids_of[int(found[-1].argmax())]
            last = row(len(tokens) + step, read if normed_back else last, token)
    return found


# Ours.


def converted(folder: Path, verifier: Checkpoint) -> tuple[FeatureDrafter, TokenData, DrafterCheckpoint]:
    checkpoint = convert(folder, verifier, IDENTITY, folder / "out")
    module = FeatureDrafter(checkpoint.configure(FeatureConfig)).eval().requires_grad_(False)
    return module, checkpoint.load(module), checkpoint


def drafted(
    module: FeatureDrafter, features: torch.Tensor, tokens: list[int], verifier: Checkpoint, ids: list[int]
) -> list[torch.Tensor]:
    """Return the logits of each step of our module, whose rows see all rows before."""
    config, kept = module.config, [torch.empty(0), torch.empty(0)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for place, new in enumerate((k, v)):
            kept[place] = torch.cat([kept[place], new], 1) if len(kept[place]) else new
        split = [t.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for t in (q, *kept)]
        rows, cols = split[0].shape[2], split[1].shape[2]
        mask = torch.ones(rows, cols, dtype=torch.bool).tril(cols - rows)
        return F.scaled_dot_product_attention(*split, mask, enable_gqa=True).transpose(1, 2).flatten(2)

    embedding = weight(verifier, "model.embed_tokens.weight")
    head = weight(verifier, "lm_head.weight")[ids] if module.head is None else module.head.weight
    positions = torch.arange(len(tokens))
    out = module(module.inputs(features[None]), embedding[tokens][None], positions, attend)
    found = []
    for step in range(STEPS):
        found.append(head @ out.token[0, -1] * config.logit_scale)
        if step < STEPS - 1:
            token = torch.tensor([[ids[int(found[-1].argmax())]]])
            place = torch.tensor([len(tokens) + step])
            out = module(out.feature[:, -1:], embedding[token], place, attend)
    return found


def assert_close(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> None:
    assert len(ours) == len(reference) == STEPS
    for one, other in zip(ours, reference, strict=True):
        assert float(one.std()) > 0.1
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def drawn_rows(states: int) -> tuple[torch.Tensor, list[int]]:
    return torch.randn(ROWS, states * N), torch.randint(V, (ROWS,)).tolist()


@pytest.mark.parametrize(
    ("make", "options", "head", "pickled"),
    [
        (eagle_one, {}, False, False),
        (lambda: eagle_one(False, rope_theta=500.0), {}, False, True),
        (eagle_one, {}, True, False),
        (speculators_one, {"prefix": "transformer.", "fc": "fusion_fc"}, False, False),
    ],
    ids=["safetensors", "bin without bias", "own head", "speculators"],
)
def test_eagle_one_computes_the_papers_steps(verifier, tmp_path, make, options, head, pickled):
    values, tensors = make()
    own_head = {"lm_head.weight": draw(V, N)} if head else {}
    stored = {**tensors, **own_head, "embed_tokens.weight": weight(verifier, "model.embed_tokens.weight")}
    if pickled:
        stored["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    module, data, checkpoint = converted(write(tmp_path / "it", values, stored, pickled), verifier)
    assert (checkpoint.method, checkpoint.verifier) == ("eagle", IDENTITY)
    assert all(getattr(module.config, name) == value for name, value in METHOD_ROWS[FIRST].form.items())
    assert (module.config.hidden_states, module.config.own_head) == (("last",), head)
    assert torch.equal(data.counts, torch.ones(V, dtype=torch.long))
    features, tokens = drawn_rows(1)
    matrix, embedding = (
        own_head.get("lm_head.weight", weight(verifier, "lm_head.weight")),
        stored["embed_tokens.weight"],
    )
    layer_config = values.get("transformer_layer_config", values)
    with torch.no_grad():
        reference = reference_one(tensors, layer_config, features, tokens, embedding, matrix, **options)
        assert_close(drafted(module, features, tokens, verifier, list(range(V))), reference)


def norms_of_states(tensors: Tensors) -> Tensors:
    return {**tensors, **{f"fc_norm.{i}.weight": draw(N) for i in range(3)}}


@pytest.mark.parametrize(
    ("make", "options", "pickled"),
    [
        (eagle_three, {}, True),
        (lambda: eagle_three(small=False), {}, False),
        (lambda: eagle_three(head=False), {}, False),
        (lambda: eagle_three(small=False, head=False), {}, False),
        (specforge, {}, False),
        (lambda: specforge(prefix="layers.0."), {"prefix": "layers.0."}, False),
        (lambda: specforge(norm_output=True), {"normed_back": True, "norms": True}, False),
        (speculators_three, {"prefix": "layers.0.", "theta": 700.0, "normed_residual": True}, False),
        (
            lambda: speculators_three(norm_before_residual=False, small=False),
            {"prefix": "layers.0.", "theta": 700.0},
            False,
        ),
        (
            lambda: speculators_three(norm_before_fc=True),
            {"prefix": "layers.0.", "theta": 700.0, "normed_residual": True, "joint": True},
            False,
        ),
    ],
    ids=[
        "bin", "all-tokens", "tied-head", "tied-all", "specforge", "layers.0", "3.1", "speculators", "residual",
        "joint",
    ],
)  # fmt: skip
def test_eagle_three_computes_the_papers_steps(verifier, tmp_path, make, options, pickled):
    values, tensors = make()
    if options.pop("norms", False):
        values["fc_norm"], tensors = True, norms_of_states(tensors)
    if options.pop("joint", False):
        tensors = {**tensors, "input_norm.weight": draw(3 * N)}
    module, data, checkpoint = converted(write(tmp_path / "it", values, tensors, pickled), verifier)
    assert checkpoint.method == "eagle3"
    assert module.config.hidden_states == ("1", "3", "4")
    ids = list(range(V)) if data.draft_vocabulary is None else data.draft_vocabulary.tolist()
    assert len(ids) == values["draft_vocab_size"]
    if "d2t" in tensors:
        assert ids == [i + int(offset) for i, offset in enumerate(tensors["d2t"])]
    features, tokens = drawn_rows(3)
    head = tensors.get("lm_head.weight", weight(verifier, "lm_head.weight")[ids])
    embedding = weight(verifier, "model.embed_tokens.weight")
    with torch.no_grad():
        reference = reference_three(
            tensors, features, tokens, embedding, head, ids, **{"prefix": "midlayer.", **options}
        )
        assert_close(drafted(module, features, tokens, verifier, ids), reference)


def test_eagle_three_may_read_the_last_hidden_state_alone(verifier, tmp_path):
    values, tensors = eagle_three(eagle_config={"use_aux_hidden_state": False})
    del tensors["fc.weight"]
    module, data, _ = converted(write(tmp_path / "it", values, tensors), verifier)
    assert module.config.hidden_states == ("last",)
    features, tokens = drawn_rows(1)
    ids, embedding = data.draft_vocabulary.tolist(), weight(verifier, "model.embed_tokens.weight")
    with torch.no_grad():
        reference = reference_three(tensors, features, tokens, embedding, tensors["lm_head.weight"], ids, "midlayer.")
        assert_close(drafted(module, features, tokens, verifier, ids), reference)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, ("1", "3", "7")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}}, ("2", "4", "7")),
        ({"eagle_config": {"use_aux_hidden_state": True}}, ("1", "3", "4")),
    ],
)
def test_ids_are_layers_that_states_enter_or_in_eagle_config_leave(verifier, tmp_path, changes, names):
    module, _, _ = converted(write(tmp_path / "it", *eagle_three(**changes)), verifier)
    assert module.config.hidden_states == names


def test_maps_of_all_tokens_are_not_needed(verifier, tmp_path):
    values, tensors = eagle_three(small=False)
    for filled in (False, True):  # SafeAILab's writer and SpecForge's
        maps = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.full((V,), filled)}
        module, data, _ = converted(write(tmp_path / str(filled), values, {**tensors, **maps}), verifier)
        assert data.draft_vocabulary is None
        assert module.config.draft_vocab_size == 0


def test_names_may_begin_with_model(verifier, tmp_path):
    values, tensors = specforge()
    outside = ("lm_head.weight", "d2t", "t2d")
    named = {name if name in outside else f"model.{name}": tensor for name, tensor in tensors.items()}
    module, _, _ = converted(write(tmp_path / "it", values, named), verifier)
    torch.testing.assert_close(module.features.weight, tensors["fc.weight"])


def test_weights_may_be_in_several_bin_files_next_to_other_ones(verifier, tmp_path):
    values, tensors = eagle_three()
    folder = write(tmp_path / "it", values, dict(list(tensors.items())[::2]), pickled=True)
    torch.save(dict(list(tensors.items())[1::2]), folder / "pytorch_model-00002-of-00002.bin")
    torch.save({"steps": 3}, folder / "training_args.bin")
    module, _, _ = converted(folder, verifier)
    torch.testing.assert_close(module.head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("head", [False, True])
def test_only_the_verifiers_head_has_its_scale(tmp_path, head):
    folder = write_checkpoint(tmp_path / "granite", "granite", num_hidden_layers=LAYERS, logits_scaling=4.0)
    module, _, _ = converted(write(tmp_path / "it", *eagle_three(head=head)), Checkpoint.open(folder))
    assert module.config.logit_scale == (1.0 if head else 0.25)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_embedding_may_be_stored_in_a_smaller_type(verifier, tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("redraft.export.checkpoint.base.SLAB_BYTES", 1000)
    values, tensors = eagle_one()
    tensors["embed_tokens.weight"] = weight(verifier, "model.embed_tokens.weight").to(dtype)
    converted(write(tmp_path / "it", values, tensors), verifier)
    tensors["embed_tokens.weight"][60] += 1
    with pytest.raises(CheckpointError, match="differs from the verifier's embedding, first in row 60"):
        converted(write(tmp_path / "other", values, tensors), verifier)


@pytest.mark.parametrize(
    ("make", "method", "layout", "description"),
    [
        (eagle_one, "eagle", "safeailab", "EAGLE-1, EAGLE-2 or HASS in SafeAILab's layout"),
        (eagle_three, "eagle3", "safeailab", "EAGLE-3 in SafeAILab's layout"),
        (specforge, "eagle3", "specforge", "EAGLE-3 in SpecForge's layout"),
        (speculators_one, "eagle", "speculators", "EAGLE-1, EAGLE-2 or HASS in speculators' layout"),
        (speculators_three, "eagle3", "speculators", "EAGLE-3 in speculators' layout"),
    ],
)
def test_layouts_are_recognised(tmp_path, make, method, layout, description):
    for pickled in (False, True):
        folder = write(tmp_path / str(pickled), *make(), pickled)
        found = recognise(folder)
        assert found is not None
        assert (found.path, found.method, found.layout, found.description) == (folder, method, layout, description)


def test_eagle_one_without_its_bias_key_is_recognised_by_its_tensors(tmp_path):
    values, tensors = eagle_one()
    del values["bias"]
    found = recognise(write(tmp_path, values, tensors))
    assert found is not None
    assert found.method == "eagle"


def test_other_folders_are_not_recognised(verifier, tmp_path):
    values, tensors = eagle_one()
    assert recognise(verifier.path) is None
    assert recognise(tmp_path) is None
    assert recognise(write(tmp_path / "dflash", {"speculators_model_type": "dflash"}, tensors)) is None
    other = {**tensors, "layers.0.input_layernorm.weight": draw(N), "hidden_norm.weight": draw(N)}
    assert recognise(write(tmp_path / "block", {"model_type": "qwen3"}, other)) is None
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    assert recognise(tmp_path) is None
    drafter = convert(write(tmp_path / "it", values, tensors), verifier, IDENTITY, tmp_path / "out")
    assert recognise(drafter.path) is None
    with pytest.raises(CheckpointError, match="no published drafter of a known layout"):
        convert(drafter.path, verifier, IDENTITY, tmp_path / "again")


@pytest.mark.parametrize("make", [eagle_one, speculators_one])
def test_an_id_names_the_method_of_a_drafter_of_eagle_ones_form(verifier, tmp_path, make):
    folder = write(tmp_path / "first", *make())
    ours = convert(folder, verifier, IDENTITY, tmp_path / "ours").path
    for path in (folder, ours):
        assert [named_method(path, name) for name in FIRST_METHODS] == list(FIRST_METHODS)
    assert {named_method(folder, name) for name in ("", "mine", "eagle3", "griffin", "draft_model")} == {"eagle"}


def test_an_id_does_not_name_the_method_of_other_drafters(verifier, tmp_path):
    third = write(tmp_path / "third", *eagle_three())
    assert named_method(third, "hass") == "eagle3"
    assert named_method(verifier.path, "mine") == "draft_model"


def test_the_methods_of_eagle_ones_form_have_one_form():
    for name in FIRST_METHODS:
        assert METHOD_ROWS[name].form == METHOD_ROWS[FIRST].form


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0.", "block."): tensor for name, tensor in tensors.items()}


UNKNOWN = [
    (
        lambda: (eagle_one()[0], renamed(eagle_one()[1])),
        r"no known layout has block\.mlp\.down_proj\.weight, block\..*\.weight and 4 more; .*method=draft_model$",
    ),
    (lambda: ({"medusa_num_heads": 3}, {"0.0.linear.weight": draw(N, N)}), r"has 0\.0\.linear\.weight; .* wrote$"),
    (
        lambda: speculators_three(speculators_model_type="dflash", model_type="qwen3"),
        "no known layout has speculators_model_type 'dflash'; .* wrote$",
    ),
    (lambda: (sizes(), {"fc.weight": draw(N, 2 * N)}), r"no known layout has only fc\.weight; "),
    (lambda: ({}, {}), "no known layout has no tensors; "),
]


@pytest.mark.parametrize(("make", "message"), UNKNOWN, ids=["names", "medusa", "kind", "few", "empty"])
def test_an_unknown_layout_is_named_with_its_keys(tmp_path, make, message):
    folder = write(tmp_path, *make())
    known = "give EAGLE, EAGLE-2, HASS or EAGLE-3 in the layout of SafeAILab, SpecForge or speculators, or a folder"
    for check in (check_layout, named_method):
        with pytest.raises(CheckpointError, match=f"has an unknown layout: .*{message}") as caught:
            check(folder, "eagle3")
        assert known in str(caught.value)
        assert "\n" not in str(caught.value)


def test_layouts_that_are_known(verifier, tmp_path):
    """A missing or damaged configuration is named by the functions that open the folder."""
    check_layout(tmp_path, "eagle3")
    for make in (eagle_one, eagle_three, specforge, speculators_one, speculators_three):
        check_layout(write(tmp_path / make.__name__, *make()), "eagle3")
    check_layout(convert(tmp_path / "eagle_one", verifier, IDENTITY, tmp_path / "ours").path, "eagle3")
    check_layout(verifier.path, "draft_model")
    with pytest.raises(CheckpointError, match=r"no known layout has layers\.1\.input_layernorm\.weight, .*59 more"):
        check_layout(verifier.path, "eagle3")


def change(**values: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, _: config.update(values)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda _, tensors: tensors.__setitem__(name, tensor)


def drop(*names: str) -> Callable[[dict[str, Any], Tensors], None]:
    def edit(_: dict[str, Any], tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


def move(column: int, by: int) -> Callable[[dict[str, Any], Tensors], None]:
    def edit(_: dict[str, Any], tensors: Tensors) -> None:
        tensors["d2t"][column] += by

    return edit


def layer(**values: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, _: config["transformer_layer_config"].update(values)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "edit", "message"),
    [
        (eagle_one, drop("fc.bias", "layers.0.mlp.up_proj.weight"), r"missing fc\.bias, layers\.0\.mlp\.up_proj"),
        (eagle_one, put("layers.0.self_attn.q_proj.bias", draw(N)), r"surplus layers\.0\.self_attn\.q_proj\.bias"),
        (lambda: eagle_one(False), put("fc.bias", draw(N)), r"surplus fc\.bias"),
        (eagle_one, put("fc.weight", draw(N, 3 * N)), r"fc\.weight is \[48, 144\], expected \[48, 96\]"),
        (eagle_one, put("embed_tokens.weight", draw(V - 1, N)), r"embed_tokens\.weight is \[96, 48\], expected \[97"),
        (eagle_one, put("embed_tokens.weight", draw(V, N)), "embed_tokens.weight differs from the verifier's"),
        (eagle_one, put("fc.weight", torch.ones(N, 2 * N, dtype=torch.int8)), r"fc\.weight is stored as int8"),
        (eagle_one, put("fc.bias", draw(N) / 0), r"fc\.bias has a number that is not finite"),
        (eagle_one, change(hidden_size=64), "has hidden states of width 64, the verifier has 48"),
        (eagle_one, change(vocab_size=99), "has a vocabulary of 99, the verifier has 97"),
        (eagle_one, change(hidden_act="gelu"), "has the activation 'gelu', which redraft's drafters do not have"),
        (eagle_one, change(rope_scaling={"type": "linear", "factor": 2.0}), "a rotary embedding of type 'linear'"),
        (eagle_one, change(model_type="unheard"), "the layer's model_type 'unheard' is unknown"),
        (eagle_one, change(num_attention_heads=None), "config.json is invalid|should give num_attention_heads"),
        (eagle_three, change(target_hidden_size=64), "has hidden states of width 64, the verifier has 48"),
        (eagle_three, drop("d2t"), "missing d2t"),
        (eagle_three, drop("midlayer.hidden_norm.weight"), r"missing midlayer\.hidden_norm\.weight"),
        (eagle_three, put("midlayer.self_attn.q_norm.weight", draw(16)), r"surplus midlayer\.self_attn\.q_norm"),
        (eagle_three, put("d2t", torch.zeros(H + 1, dtype=torch.long)), r"d2t is \[24\], expected \[23\]"),
        (eagle_three, put("d2t", torch.zeros(H)), "d2t is stored as float32, expected integers"),
        (eagle_three, put("t2d", torch.zeros(V + 1, dtype=torch.bool)), r"t2d is \[98\], expected \[97\]"),
        (eagle_three, move(H - 1, V), r"d2t maps to tokens from \d+ to \d+, expected 0 to 96"),
        (eagle_three, move(0, -V), r"d2t maps to tokens from -\d+ to \d+, expected 0 to 96"),
        (eagle_three, put("d2t", -torch.arange(H)), "d2t does not map to ascending tokens: column 1 is 0"),
        (eagle_three, put("t2d", torch.ones(V, dtype=torch.bool)), "t2d disagrees with d2t for 74 tokens, first "),
        (lambda: eagle_three(small=False), put("d2t", torch.arange(V)), r"d2t maps to tokens from 0 to 192"),
        (eagle_three, change(draft_vocab_size=V + 1), "draft_vocab_size must be from 0 to 97"),
        (eagle_three, change(eagle_aux_hidden_state_layer_ids=[0, 3, 5]), "outputs of layers -1, 2, 4, expected"),
        (eagle_three, change(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}), "from 0 to 7"),
        (eagle_three, change(eagle_aux_hidden_state_layer_ids=[3, 3, 5]), "outputs of layers 2, 2, 4, expected"),
        (eagle_three, change(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), r"expected \[48, 192\]"),
        (speculators_three, change(norm_before_fc=True), r"missing input_norm\.weight"),
        (speculators_three, layer(rope_parameters=LLAMA3), "a rotary embedding of type 'llama3'"),
        (speculators_three, layer(rope_parameters=YARN), "a rotary embedding of type 'yarn'"),
        (speculators_three, layer(partial_rotary_factor=0.5), "a rotary embedding of 0.5 of each head"),
        (speculators_three, layer(model_type="qwen2", layer_types=["sliding_attention"]), "not attend to all"),
        (speculators_three, change(transformer_layer_config="llama"), "the layer's model_type '' is unknown"),
        (speculators_one, change(layernorms=True), r"norms of the embedding and before the head \(layernorms\)"),
    ],
)  # fmt: skip
def test_faults_are_named_in_one_line(verifier, tmp_path, make, edit, message):
    values, tensors = make()
    edit(values, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(write(tmp_path / "it", values, tensors), verifier, IDENTITY, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        ({"fc.weight": [1.0]}, "does not hold tensors by name"),
        ([torch.ones(1)], "does not hold tensors by name"),
        ({"fc.weight": Path("x")}, "cannot be read as tensors by name"),
        (b"damaged", "cannot be read as tensors by name"),
    ],
)
def test_a_bin_file_that_is_no_plain_dictionary_of_tensors_is_refused(verifier, tmp_path, pickled, message):
    for make in (eagle_one, eagle_three, speculators_three):
        folder = write(tmp_path / make.__name__, make()[0], {}, pickled=True)
        if isinstance(pickled, bytes):
            (folder / "pytorch_model.bin").write_bytes(pickled)
        else:
            torch.save(pickled, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin {message}") as caught:
            convert(folder, verifier, IDENTITY, tmp_path / "out")
        assert "\n" not in str(caught.value)


def test_files_that_are_missing_are_named(verifier, tmp_path):
    folder = write(tmp_path / "it", *eagle_three())
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        convert(folder, verifier, IDENTITY, tmp_path / "out")
