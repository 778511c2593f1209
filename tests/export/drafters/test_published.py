"""Published draft checkpoints: their drafters compute what the papers and layouts define, and faults are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from redraft.errors import CheckpointError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter
from redraft.export.drafters.published import FIRST, FIRST_METHODS, KNOWN, check_layout, named_method, recognise
from redraft.export.drafters.published_conversion import convert
from redraft.methods import ROWS as METHOD_ROWS
from tests.export.models import write_checkpoint

from .published_checkpoints import (
    HEADS,
    KV_HEADS,
    LAYERS,
    H,
    N,
    Tensors,
    V,
    draw,
    eagle_one,
    eagle_three,
    sizes,
    specforge,
    speculators_one,
    speculators_three,
    write,
)

IDENTITY = Identity(("weights",), "tokenizer")
STEPS, ROWS = 4, 5
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EVERY = (eagle_one, eagle_three, specforge, speculators_one, speculators_three)
Made = tuple[dict[str, Any], Tensors]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("verifier")
    return Checkpoint.open(write_checkpoint(folder, "llama", num_hidden_layers=LAYERS, rope_parameters=None))


def weight(verifier: Checkpoint, name: str) -> torch.Tensor:
    return load_file(str(verifier.path / "model.safetensors"))[name]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def with_tensors(made: Made, tensors: Tensors, **values: Any) -> Made:
    """A checkpoint with more tensors and values."""
    return {**made[0], **values}, {**made[1], **tensors}


def norms_of_states() -> Tensors:
    return {f"fc_norm.{i}.weight": draw(N) for i in range(3)}


def last_state_alone() -> Made:
    values, tensors = eagle_three(eagle_config={"use_aux_hidden_state": False})
    return values, {name: tensor for name, tensor in tensors.items() if name != "fc.weight"}


@dataclass(frozen=True)
class Case:
    """A published checkpoint and what tells its computation from others.

    prefix: of the layer's tensors.   fusion: name of EAGLE-1's product.   states: hidden states that it reads.
    """

    make: Callable[[], Made]
    prefix: str = "midlayer."
    fusion: str = ""
    states: tuple[str, ...] = ("1", "3", "4")
    theta: float = 10000.0
    normed_residual: bool = False
    normed_back: bool = False
    pickled: bool = False


def first(make: Callable[[], Made], prefix: str = "layers.0.", fusion: str = "fc", **options: Any) -> Case:
    return Case(make, prefix, fusion, ("last",), **options)


def speculators(make: Callable[[], Made], normed_residual: bool = True) -> Case:
    return Case(make, "layers.0.", theta=700.0, normed_residual=normed_residual)


def biased() -> Made:
    """EAGLE's drafter of a Qwen2."""
    values, tensors = eagle_one(qkv_bias=True)
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"layers.0.self_attn.{name}.bias"] = draw(len(tensors[f"layers.0.self_attn.{name}.weight"]))
    return values, tensors


CASES = {
    "one": first(eagle_one),
    "one with biases": first(biased),
    "one in a bin": first(lambda: eagle_one(False, rope_theta=500.0), theta=500.0, pickled=True),
    "one with a head": first(lambda: with_tensors(eagle_one(), {HEAD: draw(V, N)})),
    "one of speculators": first(speculators_one, "transformer.", "fusion_fc"),
    "bin": Case(eagle_three, pickled=True),
    "all tokens": Case(lambda: eagle_three(small=False)),
    "tied head": Case(lambda: eagle_three(head=False)),
    "tied head of all tokens": Case(lambda: eagle_three(small=False, head=False)),
    "last state": Case(last_state_alone, states=("last",)),
    "specforge": Case(specforge),
    "layers.0": Case(lambda: specforge(prefix="layers.0."), "layers.0."),
    "3.1": Case(lambda: with_tensors(specforge(norm_output=True), norms_of_states(), fc_norm=True), normed_back=True),
    "speculators": speculators(speculators_three),
    "residual": speculators(lambda: speculators_three(norm_before_residual=False, small=False), False),
    "joint norm": speculators(
        lambda: with_tensors(speculators_three(norm_before_fc=True), {"input_norm.weight": draw(3 * N)})
    ),
}


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * scale


def rotated(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate one head: its number j and its number j + D / 2 are a point of the plane (RoFormer, section 3.2.2)."""
    half = len(x) // 2
    point = torch.complex(x[:half], x[half:])
    angle = torch.tensor([position * theta ** (-2 * j / len(x)) for j in range(half)])
    turned = point * torch.polar(torch.ones(half), angle)
    return torch.cat([turned.real, turned.imag])


def reference(
    case: Case, tensors: Tensors, features: torch.Tensor, tokens: list[int], embedding: torch.Tensor,
    head: torch.Tensor, ids: list[int],
) -> list[torch.Tensor]:  # fmt: skip
    """Return the logits [H] of each step of EAGLE (section 4.1) or EAGLE-3 (3.1), row by row and head by head.

    features: [T, n] of the verifier, of all its hidden states.   tokens: the T tokens one step ahead.
    ids: the token of each logit.
    """
    own = {name.removeprefix(case.prefix): t for name, t in tensors.items() if name.startswith(case.prefix)}
    head_dim = len(own["self_attn.q_proj.weight"]) // HEADS
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def inputs(feature: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of attention, and the residual. EAGLE-1 has no norm before attention."""
        if case.fusion:
            fused = tensors[f"{case.fusion}.weight"] @ torch.cat([embedding[token], feature])
            fused = fused + tensors.get(f"{case.fusion}.bias", torch.zeros(N))
            return fused, fused
        normed = norm(feature, own["hidden_norm.weight"])
        read = torch.cat([norm(embedding[token], own["input_layernorm.weight"]), normed])
        return read, normed if case.normed_residual else feature

    def row(position: int, feature: torch.Tensor, token: int) -> torch.Tensor:
        read, residual = inputs(feature, token)
        q, k, v = (
            (own[f"self_attn.{one}_proj.weight"] @ read + own.get(f"self_attn.{one}_proj.bias", 0.0)).view(-1, head_dim)
            for one in "qkv"
        )
        keys.append(torch.stack([rotated(one, position, case.theta) for one in k]))
        values.append(v)
        heads = []
        for number in range(HEADS):
            kv = number // (HEADS // KV_HEADS)
            query = rotated(q[number], position, case.theta)
            shares = torch.stack([query @ key[kv] for key in keys]).div(head_dim**0.5).softmax(0)
            heads.append(sum(share * value[kv] for share, value in zip(shares, values, strict=True)))
        x = residual + own["self_attn.o_proj.weight"] @ torch.cat(heads)
        inner = norm(x, own["post_attention_layernorm.weight"])
        gate = F.silu(own["mlp.gate_proj.weight"] @ inner) * (own["mlp.up_proj.weight"] @ inner)
        return x + own["mlp.down_proj.weight"] @ gate

    for position, (feature, token) in enumerate(zip(features, tokens, strict=True)):
        if "fc_norm.0.weight" in tensors:
            parts = feature.chunk(3)
            feature = torch.cat([norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        if "input_norm.weight" in tensors:
            feature = norm(feature, tensors["input_norm.weight"])
        last = row(position, tensors["fc.weight"] @ feature if len(case.states) > 1 else feature, token)
    found = []
    for step in range(STEPS):
        read = last if case.fusion else norm(last, tensors["norm.weight"])
        found.append(head @ read)
        if step < STEPS - 1:
            last = row(len(tokens) + step, read if case.normed_back else last, ids[int(found[-1].argmax())])
    return found


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

    embedding = weight(verifier, EMBEDDING)
    head = weight(verifier, HEAD)[ids] if module.head is None else module.head.weight
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


@pytest.mark.parametrize("name", CASES)
def test_a_drafter_computes_the_papers_steps(verifier, tmp_path, name):
    """EAGLE-1's checkpoints here also have the verifier's embedding, and the buffer of older ones if in a bin."""
    case = CASES[name]
    values, tensors = case.make()
    embedding = weight(verifier, EMBEDDING)
    stored = {**tensors, **({"embed_tokens.weight": embedding} if case.fusion else {})}
    if case.fusion and case.pickled:
        stored["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    module, data, checkpoint = converted(write(tmp_path / "it", values, stored, case.pickled), verifier)
    method, config = FIRST if case.fusion else "eagle3", module.config
    assert (checkpoint.method, checkpoint.verifier) == (method, IDENTITY)
    assert (config.hidden_states, config.own_head) == (case.states, HEAD in tensors)
    if case.fusion:
        assert all(getattr(config, name) == value for name, value in METHOD_ROWS[FIRST].form.items())
    assert torch.equal(data.counts, torch.ones(V, dtype=torch.long))
    ids = list(range(V)) if data.draft_vocabulary is None else data.draft_vocabulary.tolist()
    assert len(ids) == values.get("draft_vocab_size", V)
    if "d2t" in tensors:
        assert ids == [i + int(offset) for i, offset in enumerate(tensors["d2t"])]
    features, tokens = torch.randn(ROWS, len(case.states) * N), torch.randint(V, (ROWS,)).tolist()
    head = tensors.get(HEAD, weight(verifier, HEAD)[ids])
    with torch.no_grad():
        expected = reference(case, tensors, features, tokens, embedding, head, ids)
        found = drafted(module, features, tokens, verifier, ids)
    for one, other in zip(found, expected, strict=True):
        assert float(one.std()) > 0.1
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


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
    for filled in (False, True):  # SafeAILab's writer and SpecForge's
        maps = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.full((V,), filled)}
        made = with_tensors(eagle_three(small=False), maps)
        module, data, _ = converted(write(tmp_path / str(filled), *made), verifier)
        assert (data.draft_vocabulary, module.config.draft_vocab_size) == (None, 0)


def test_weights_may_be_in_several_bin_files_next_to_other_ones_and_begin_with_model(verifier, tmp_path):
    values, tensors = specforge()
    outside = (HEAD, "d2t", "t2d")
    named = [(name if name in outside else f"model.{name}", tensor) for name, tensor in tensors.items()]
    folder = write(tmp_path / "it", values, dict(named[::2]), pickled=True)
    torch.save(dict(named[1::2]), folder / "pytorch_model-00002-of-00002.bin")
    torch.save({"steps": 3}, folder / "training_args.bin")
    module, _, _ = converted(folder, verifier)
    torch.testing.assert_close(module.head.weight, tensors[HEAD])
    torch.testing.assert_close(module.features.weight, tensors["fc.weight"])


@pytest.mark.parametrize("head", [False, True])
def test_only_the_verifiers_head_has_its_scale(tmp_path, head):
    folder = write_checkpoint(tmp_path / "granite", "granite", num_hidden_layers=LAYERS, logits_scaling=4.0)
    module, _, _ = converted(write(tmp_path / "it", *eagle_three(head=head)), Checkpoint.open(folder))
    assert module.config.logit_scale == (1.0 if head else 0.25)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_embedding_may_be_stored_in_a_smaller_type(verifier, tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("redraft.export.checkpoint.base.SLAB_BYTES", 1000)
    values, tensors = eagle_one()
    tensors["embed_tokens.weight"] = weight(verifier, EMBEDDING).to(dtype)
    converted(write(tmp_path / "it", values, tensors), verifier)
    tensors["embed_tokens.weight"][60] += 1
    with pytest.raises(CheckpointError, match="differs from the verifier's embedding, first in row 60"):
        converted(write(tmp_path / "other", values, tensors), verifier)


ONE, THREE = "EAGLE-1, EAGLE-2 or HASS in {} layout", "EAGLE-3 in {} layout"


def without_bias_key() -> Made:
    values, tensors = eagle_one()
    return {key: value for key, value in values.items() if key != "bias"}, tensors


@pytest.mark.parametrize(
    ("make", "method", "layout", "description"),
    [
        (eagle_one, "eagle", "safeailab", ONE.format("SafeAILab's")),
        (without_bias_key, "eagle", "safeailab", ONE.format("SafeAILab's")),
        (eagle_three, "eagle3", "safeailab", THREE.format("SafeAILab's")),
        (specforge, "eagle3", "specforge", THREE.format("SpecForge's")),
        (speculators_one, "eagle", "speculators", ONE.format("speculators'")),
        (speculators_three, "eagle3", "speculators", THREE.format("speculators'")),
    ],
)
def test_layouts_are_recognised(tmp_path, make, method, layout, description):
    for pickled in (False, True):
        folder = write(tmp_path / str(pickled), *make(), pickled)
        found = recognise(folder)
        assert found is not None
        assert (found.path, found.method, found.layout, found.description) == (folder, method, layout, description)
        check_layout(folder, "eagle3")


def test_other_folders_are_not_recognised(verifier, tmp_path):
    """Functions that open a folder name its missing or damaged configuration, so `check_layout` does not."""
    values, tensors = eagle_one()
    assert recognise(verifier.path) is None
    check_layout(verifier.path, "draft_model")
    assert recognise(tmp_path) is None
    check_layout(tmp_path, "eagle3")
    assert recognise(write(tmp_path / "peagle", {"speculators_model_type": "peagle"}, tensors)) is None
    other = {**tensors, "layers.0.input_layernorm.weight": draw(N), "hidden_norm.weight": draw(N)}
    assert recognise(write(tmp_path / "block", {"model_type": "qwen3"}, other)) is None
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    assert recognise(tmp_path) is None
    drafter = convert(write(tmp_path / "it", values, tensors), verifier, IDENTITY, tmp_path / "out")
    assert recognise(drafter.path) is None
    check_layout(drafter.path, "eagle3")
    with pytest.raises(CheckpointError, match="no published drafter of a known layout"):
        convert(drafter.path, verifier, IDENTITY, tmp_path / "again")


def test_an_id_names_the_method_of_drafters_of_eagle_ones_form_only(verifier, tmp_path):
    for name in FIRST_METHODS:
        assert METHOD_ROWS[name].form == METHOD_ROWS[FIRST].form
    folder = write(tmp_path / "first", *eagle_one())
    ours = convert(folder, verifier, IDENTITY, tmp_path / "ours").path
    for path in (folder, ours):
        assert [named_method(path, name) for name in FIRST_METHODS] == list(FIRST_METHODS)
    assert {named_method(folder, name) for name in ("", "mine", "eagle3", "griffin", "draft_model")} == {"eagle"}
    assert named_method(write(tmp_path / "third", *eagle_three()), "hass") == "eagle3"
    assert named_method(verifier.path, "mine") == "draft_model"


def renamed(made: Made) -> Made:
    return made[0], {name.replace("layers.0.", "block."): tensor for name, tensor in made[1].items()}


UNKNOWN = [
    (
        lambda: renamed(eagle_one()),
        r"no known layout has block\.mlp\.down_proj\.weight, block\..*\.weight and 4 more; .*method=draft_model$",
    ),
    (lambda: ({"medusa_num_heads": 3}, {"0.0.linear.weight": draw(N, N)}), r"has 0\.0\.linear\.weight; .* wrote$"),
    (
        lambda: speculators_three(speculators_model_type="peagle", model_type="qwen3"),
        "no known layout has speculators_model_type 'peagle'; .* wrote$",
    ),
    (lambda: (sizes(), {"fc.weight": draw(N, 2 * N)}), r"no known layout has only fc\.weight; "),
    (lambda: ({}, {}), "no known layout has no tensors; "),
]


@pytest.mark.parametrize(("make", "message"), UNKNOWN, ids=["names", "medusa", "kind", "few", "empty"])
def test_an_unknown_layout_is_named_with_its_keys(tmp_path, make, message):
    folder = write(tmp_path, *make())
    known = f"give {KNOWN}, or a folder"
    for check in (check_layout, named_method):
        with pytest.raises(CheckpointError, match=f"has an unknown layout: .*{message}") as caught:
            check(folder, "eagle3")
        assert known in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_model_has_no_layout_of_a_drafter(verifier):
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
