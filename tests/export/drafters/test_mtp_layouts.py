"""Modules inside of verifiers' checkpoints: layouts are recognised, verifiers load without them, faults are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from redraft.errors import CheckpointError, RedraftError, UnsupportedModelError, UsageError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.loading import load_tensors
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters import find_exporter
from redraft.export.drafters.mtp_modules import find_module, load_module, require_module
from redraft.export.drafters.writing import Target
from redraft.methods.mtp import MtpBuild
from tests.export.models import write_checkpoint

from .native_checkpoints import FORMS, LAYERS, N, Tensors, V, draw, write_native
from .tiny import untraced

LAST = str(LAYERS - 1)
Edit = Callable[[Tensors], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_native(tmp_path_factory.mktemp(name), name) for name in FORMS}


def edited(source: Path, target: Path, edit: Edit, **values: object) -> Checkpoint:
    """A copy of a checkpoint with other tensors and configuration."""
    tensors = load_file(str(source / "model.safetensors"))
    edit(tensors)
    target.mkdir()
    save_file(tensors, str(target / "model.safetensors"))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
    return Checkpoint.open(target)


def nothing(tensors: Tensors) -> None:
    pass


def put(name: str, tensor: torch.Tensor) -> Edit:
    return lambda tensors: tensors.__setitem__(name, tensor)


def drop(*names: str) -> Edit:
    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


def keep(prefix: str, *names: str) -> Edit:
    """Drop all tensors that begin with the prefix, except these."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(prefix) and name not in names]:
            del tensors[name]

    return edit


@pytest.mark.parametrize(
    ("name", "layout", "hidden_states"),
    [
        ("deepseek", "DeepSeek-V3", ("last",)),
        ("glm", "DeepSeek-V3", ("last",)),
        ("mimo", "MiMo", (LAST,)),
        ("qwen", "Qwen3-Next", ("last",)),
    ],
)
def test_layouts_are_recognised(
    written: dict[str, Path], name: str, layout: str, hidden_states: tuple[str, ...]
) -> None:
    found = require_module(Checkpoint.open(written[name]))
    assert found.description == f"a multi-token-prediction module in {layout}'s layout"
    assert (found.hidden_states, found.files, found.count) == (hidden_states, ("model.safetensors",), 1)


@pytest.mark.parametrize("name", FORMS)
def test_a_verifier_loads_without_its_module(written: dict[str, Path], name: str) -> None:
    """The verifier has its own tensors alone, whatever its number of layers is."""
    checkpoint = Checkpoint.open(written[name])
    assert checkpoint.modules
    assert not set(checkpoint.modules) & set(checkpoint.tensors)
    loaded = load_tensors(checkpoint, Architecture.of(model_config.load_config(checkpoint)))
    assert len(loaded.parameters) > 20


def test_a_layer_too_many_is_no_module(tmp_path: Path) -> None:
    """A configuration with fewer layers than are stored is still wrong."""
    write_checkpoint(tmp_path / "llama", "llama")
    checkpoint = edited(tmp_path / "llama", tmp_path / "it", nothing, num_hidden_layers=2)
    assert not checkpoint.modules
    with pytest.raises(CheckpointError, match=r"has tensors model\.layers\.2\..* LlamaForCausalLM does not use"):
        load_tensors(checkpoint, Architecture.of(model_config.load_config(checkpoint)))


def test_the_modules_shard_is_no_file_of_the_verifier(written: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(str(written["qwen"] / "model.safetensors"))
    parts = [{name: t for name, t in tensors.items() if name.startswith("mtp.") == own} for own in (False, True)]
    index = {}
    for number, part in enumerate(parts):
        save_file(part, str(tmp_path / f"model-{number}.safetensors"))
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_bytes((written["qwen"] / "config.json").read_bytes())
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.files == ("model-0.safetensors",)
    assert require_module(checkpoint).files == ("model-1.safetensors",)
    assert load_module(checkpoint).parts["norm.weight"].shape == (N,)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("glm", drop("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")),
        ("glm", put("model.layers.2.embed_tokens.weight", draw((V, N)))),
        ("mimo", put("model.mtp_layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))),
    ],
    ids=["absent", "other", "buffer"],
)
def test_copies_and_buffers_do_not_matter(written: dict[str, Path], tmp_path: Path, name: str, edit: Edit) -> None:
    """Embedding and head are the verifier's."""
    module = load_module(edited(written[name], tmp_path / "it", edit))
    assert not [name for name in module.loaded.parameters if "shared_head" in name]


@pytest.mark.parametrize(("name", "again"), [("glm", "model.layers.3."), ("mimo", "model.mtp_layers.1."), ("qwen", "")])
def test_the_first_of_several_modules_drafts(written: dict[str, Path], tmp_path: Path, name: str, again: str) -> None:
    prefix = FORMS[name].names(LAYERS)[-1]

    def twice(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith(prefix)]:
            tensors[f"{again or 'mtp.layers.1.'}{key.removeprefix(prefix)}"] = tensors[key] + 1

    checkpoint = edited(written[name], tmp_path / "it", twice, num_nextn_predict_layers=2)
    found = require_module(checkpoint)
    assert (found.count, found.prefix) == (2, require_module(Checkpoint.open(written[name])).prefix)
    assert found.description.endswith("layout, the first of 2 modules")
    entries = {entry.name for tensor in load_module(checkpoint).parts.values() if (entry := tensor.entry)}
    assert entries == {f"{part}.weight" for part in FORMS[name].names(LAYERS)[:4]}
    load_tensors(checkpoint, Architecture.of(model_config.load_config(checkpoint)))


FAULTS = [
    ("deepseek", drop("model.layers.2.eh_proj.weight"), r"layout: missing model\.layers\.2\.eh_proj\.weight; give"),
    (
        "deepseek",
        drop("model.layers.2.mlp.experts.1.up_proj.weight", "model.layers.2.self_attn.kv_b_proj.weight"),
        r"missing model\.layers\.2\.mlp\.experts\.1\.up_proj\.weight, model\.layers\.2\.self_attn\.kv_b_proj\.weight;",
    ),
    ("glm", keep("model.layers.2.", "model.layers.2.enorm.weight"), r"missing model\.layers\.2\.eh_proj.*and 27 more;"),
    ("glm", drop("model.layers.2.mlp.gate.e_score_correction_bias"), r"missing .*e_score_correction_bias;"),
    ("glm", put("model.layers.2.self_attn.scale", draw((N,))), r"surplus model\.layers\.2\.self_attn\.scale;"),
    ("glm", put("model.layers.2.eh_proj.weight", draw((N, 3 * N))), r"eh_proj\.weight is \[48, 144\], expected \[48"),
    ("mimo", drop("model.mtp_layers.0.final_layernorm.weight"), r"MiMo's layout: missing .*final_layernorm\.weight;"),
    ("mimo", drop("model.mtp_layers.0.self_attn.q_proj.bias"), r"missing model\.mtp_layers\.0\.self_attn\.q_proj\.b"),
    ("mimo", put("model.mtp_layers.0.input_proj.weight", draw((N, 2 * N)) / 0), r"tensor .* not finite"),
    ("mimo", put("model.mtp_layers.0.hidden_layernorm.weight", torch.ones(N, dtype=torch.int8)), "is stored as I8;"),
    ("mimo", put("model.mtp_layers.0.mlp.up_proj.weight", torch.ones(40, N, dtype=torch.int8)), "is stored as I8;"),
    ("qwen", drop("mtp.norm.weight", "mtp.fc.weight"), r"missing mtp\.fc\.weight, mtp\.norm\.weight;"),
    ("qwen", put("mtp.embed_tokens.weight", draw((V, N))), r"surplus mtp\.embed_tokens\.weight;"),
    (
        "qwen",
        lambda tensors: [keep("mtp.")(tensors), put("mtp.blocks.0.weight", draw((N,)))(tensors)],
        r"a module of an unknown layout: no known layout has mtp\.blocks\.0\.weight; known are .* DeepSeek-V3, MiMo",
    ),
    ("qwen", keep("mtp."), "has no multi-token-prediction module; train a drafter"),
    ("glm", keep("model.layers.2."), "has no multi-token-prediction module; train a drafter"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "message"), FAULTS)
def test_faults_are_named_in_one_line(
    written: dict[str, Path], tmp_path: Path, name: str, edit: Edit, message: str
) -> None:
    with pytest.raises(RedraftError, match=message) as caught:
        load_module(edited(written[name], tmp_path / "it", edit))
    assert "\n" not in str(caught.value)


def test_a_verifier_with_linear_attention_is_refused_by_name(tmp_path: Path) -> None:
    """Its module is recognised all the same."""
    types = ["linear_attention", "full_attention"]
    checkpoint = Checkpoint.open(write_native(tmp_path, "qwen", layer_types=types))
    assert require_module(checkpoint).hidden_states == ("last",)
    with pytest.raises(UnsupportedModelError, match=r"qwen3_next has layers without a plain KV cache \(linear_att"):
        load_module(checkpoint)


def test_a_model_that_changes_embeddings_is_refused_by_name(tmp_path: Path) -> None:
    """Granite multiplies embeddings; no module does, so that its layer would not get what it was trained on."""
    write_checkpoint(
        tmp_path / "granite", "granite", num_hidden_layers=LAYERS, embedding_multiplier=3.0, vocab_size=V,
        hidden_size=N, tie_word_embeddings=False,
    )  # fmt: skip
    prefix = f"model.layers.{LAYERS}."

    def with_module(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith("model.layers.0.")]:
            tensors[f"{prefix}{key.removeprefix('model.layers.0.')}"] = tensors[key].clone()
        for part, shape in (("enorm", (N,)), ("hnorm", (N,)), ("shared_head.norm", (N,)), ("eh_proj", (N, 2 * N))):
            tensors[f"{prefix}{part}.weight"] = draw(shape)

    checkpoint = edited(tmp_path / "granite", tmp_path / "it", with_module)
    target = Target("m", untraced(checkpoint, ("last",)), tmp_path, MtpBuild(precision="fp32"))
    with pytest.raises(UnsupportedModelError, match="GraniteForCausalLM changes embeddings before its first layer"):
        find_exporter("mtp").native(target, checkpoint)


def test_a_module_has_no_counts_of_tokens(written: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(written["mimo"])
    target = Target("m", untraced(checkpoint, (LAST,)), tmp_path, MtpBuild(draft_vocabulary=9))
    with pytest.raises(UsageError, match="drafter m: draft_vocabulary needs counts of tokens"):
        find_exporter("mtp").native(target, checkpoint)


def test_the_embedded_models_module_is_in_redrafts_layout(root: Path) -> None:
    """It is the one that its drafter was written from."""
    module = load_module(Checkpoint.open(root / "assets" / "tiny"))
    assert module.found.description == "a multi-token-prediction module in redraft's layout"
    assert module.found.files == ("mtp.safetensors",)
    published = load_file(str(root / "assets" / "tiny" / "mtp" / "model.safetensors"))
    stored = load_file(str(root / "assets" / "tiny" / "mtp.safetensors"))
    for name in ("hidden_norm", "embedding_norm", "projection", "norm"):
        entry = module.parts[f"{name}.weight"].entry
        assert entry is not None
        assert torch.equal(stored[entry.name], published[f"{name}.weight"])


@pytest.mark.parametrize("named", [{"file": "absent.safetensors"}, {"file": "../mtp.safetensors"}, "mtp.safetensors"])
def test_a_file_that_is_not_there(written: dict[str, Path], tmp_path: Path, named: object) -> None:
    checkpoint = edited(written["mimo"], tmp_path / "it", nothing, redraft_mtp=named)
    with pytest.raises(CheckpointError, match="redraft_mtp names no file of it"):
        find_module(checkpoint)
