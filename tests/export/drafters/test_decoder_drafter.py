"""A draft model is transformers' model with some of the verifier's layers. Steering adds W_s g to its MLPs (SD²)."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig, configuration_of
from redraft.records import from_plain
from tests.export.models import config_of

LAYERS = (0, 2)
KINDS = ["llama", "gemma2", "gpt2"]


def verifier_config(kind, **changes):
    if kind == "gpt2":
        return config_of(kind, n_embd=48, n_layer=3, n_head=4, n_positions=128, **changes)
    return config_of(kind, **changes)


def small(kind, **options):
    return configuration_of(verifier_config(kind), 97, LAYERS, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_transformers_without_embedding_and_head(kind):
    model = DraftModel(small(kind))
    whole = AutoModelForCausalLM.from_config(model.config.transformers)
    embedding = {id(module.weight) for module in (whole.get_input_embeddings(), whole.get_output_embeddings())}
    names = {name for name, value in whole.state_dict(keep_vars=True).items() if id(value) not in embedding}
    assert set(model.state_dict()) == names
    assert any(".1." in name for name in names)
    assert not any(".2." in name for name in names)


def test_lists_with_an_item_a_layer_keep_the_items_of_these_layers():
    verifier = verifier_config("gemma2")
    assert verifier.layer_types == ["sliding_attention", "full_attention"] * 2
    found = configuration_of(verifier, 97, (0, 1, 3)).transformers
    assert found.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert (found.num_hidden_layers, found.sliding_window, found.model_type) == (3, 8, "gemma2")
    assert verifier.num_hidden_layers == 4  # its own configuration stays


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_goes_through_a_drafters_folder(kind, tmp_path):
    config = small(kind, draft_vocab_size=40)
    assert from_plain(DraftModelConfig, json.loads(json.dumps(asdict(config))), "") == config
    torch.manual_seed(0)
    saved, vocabulary = DraftModel(config), torch.arange(0, 80, 2)
    identity = Identity(("weights",), "tokenizer")
    save_drafter(tmp_path, "draft_model", config, identity, saved, torch.arange(97), {}, vocabulary, "int8")
    checkpoint = DrafterCheckpoint.open(tmp_path)
    assert checkpoint.configure(DraftModelConfig) == config
    loaded = DraftModel(checkpoint.configure(DraftModelConfig))
    assert torch.equal(checkpoint.load(loaded).draft_vocabulary, vocabulary)
    rows = torch.randn(1, 9, 48)
    with torch.no_grad():
        error = (loaded.eval()(rows) - saved.eval()(rows)).norm() / saved(rows).norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "one or more numbers in ascending order"),
        ((2, 0), r"in ascending order, not \[2, 0\]"),
        ((1, 1), "in ascending order"),
        ((0, 3), r"numbers from 0 to 2, those of the verifier, not \[0, 3\]"),
        ((-1, 2), "numbers from 0 to 2"),
    ],
)
def test_layers_that_the_verifier_lacks_are_refused(layers, message):
    with pytest.raises(CheckpointError, match=message):
        configuration_of(verifier_config("llama"), 97, layers)


def test_a_configuration_that_is_not_one_of_transformers_is_refused():
    values = asdict(small("llama"))
    with pytest.raises(CheckpointError, match="has 3 layers, expected 2"):
        _ = DraftModelConfig(**values | {"model": values["model"] | {"num_hidden_layers": 3}}).transformers
    with pytest.raises(CheckpointError, match="is not one of transformers"):
        _ = DraftModelConfig(**values | {"model": {"model_type": "absent"}}).transformers
    with pytest.raises(CheckpointError, match="draft_vocab_size must be from 0 to 97"):
        small("llama", draft_vocab_size=98)
    with pytest.raises(CheckpointError, match=r"hidden_states must be different names, not \['1', '1'\]"):
        small("llama", hidden_states=("1", "1"))
    with pytest.raises(UsageError, match="missing key model"):
        from_plain(DraftModelConfig, {"hidden_size": 48, "vocab_size": 97, "layers": [0]}, "config.json")


# Steering.

STATES = ("2", "1", "0")
MECHANISMS = ["up", "after", "conditional"]


def fresh(architecture: str, form: dict[str, Any] | None = None, **changes: object) -> DraftModel:
    """A student of two layers before training.   form: fields of its configuration."""
    torch.manual_seed(0)
    config = configuration_of(config_of(architecture, **changes), 97, (0, 2), hidden_states=STATES)
    return DraftModel(replace(config, **form or {})).eval().requires_grad_(False)


def student_of(architecture: str, form: dict[str, Any] | None = None, **changes: object) -> DraftModel:
    """The same with random steering."""
    student = fresh(architecture, form, **changes)
    for parameter in student.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return student


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("norm", [False, True])
def test_at_first_g_is_the_sum_of_the_hidden_states_and_changes_nothing(mechanism: str, norm: bool) -> None:
    student, rows = fresh("llama", {"steering": mechanism, "steering_norm": norm}), torch.randn(1, 4, 48)
    steering, features, positions = student.steering, torch.randn(1, 4, 144), torch.arange(4)[None]
    assert steering is not None
    torch.testing.assert_close(steering.vector(features), features.unflatten(-1, (3, 48)).sum(-2))
    biases = steering(features, positions)
    assert biases.any() == (mechanism == "conditional"), "its second layer is 0, so that the first one learns"
    plain = student.body(inputs_embeds=rows, use_cache=False).last_hidden_state
    assert torch.equal(student(rows, biases), plain)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_g_has_a_layer_norm_before_w_s(mechanism: str) -> None:
    """torch's LayerNorm of W_hml [h ; m ; l], with gain and bias and torch's default epsilon."""
    student = student_of("llama", {"steering": mechanism, "steering_norm": True})
    steering, features, positions = student.steering, torch.randn(2, 5, 144), torch.arange(3, 8).expand(2, -1)
    assert steering is not None
    norm = nn.LayerNorm(48)
    norm.load_state_dict({name: steering.state_dict()[f"norm.{name}"] for name in ("weight", "bias")})
    expected = norm(features @ steering.vector.weight.T) @ steering.bias.weight.T
    torch.testing.assert_close(steering(features, positions), expected)
    torch.testing.assert_close(steering(features * 1000, positions), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma2"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_layer_is_the_papers_with_its_own_product_of_g(
    architecture: str, mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student equals one whose layers are written from the paper. Each row has its own g.

    up: Eq. 2.   after, conditional: appendix A.6; the two-layer MLP reads the layer's normalized input and g together.
    """
    student = student_of(architecture, {"steering": mechanism})
    steering = student.steering
    assert steering is not None
    rows, features, positions = torch.randn(2, 5, 48), torch.randn(2, 5, 144), torch.arange(3, 8).expand(2, -1)
    found = student(rows, steering(features, positions))
    g = features @ steering.vector.weight.T
    products = steering.bias.weight.split(steering.sizes)

    def written(mlp: nn.Module, bias_of: Any) -> nn.Module:
        class Written(nn.Module):
            def forward(self, a: torch.Tensor) -> torch.Tensor:
                up, gate, down = (getattr(mlp, f"{name}_proj").weight for name in ("up", "gate", "down"))
                return ((a @ up.T + bias_of()) * mlp.act_fn(a @ gate.T)) @ down.T

        return Written()

    for number, (layer, w_s) in enumerate(zip(student.body.layers, products, strict=True)):
        entered: list[torch.Tensor] = []

        def run(x: torch.Tensor, *arguments: Any, old=layer.forward, w_s=w_s, entered=entered, **others: Any) -> Any:
            entered.append(x)
            return old(x, *arguments, **others) + (g @ w_s.T if mechanism == "after" else 0)

        def conditioned(number=number, layer=layer, w_s=w_s, entered=entered) -> torch.Tensor:
            first = torch.cat([steering.inner[number].weight, w_s], dim=1)
            both = torch.cat([layer.input_layernorm(entered[-1]), g], dim=-1)
            return F.gelu(both @ first.T) @ steering.outer[number].weight.T

        monkeypatch.setattr(layer, "forward", run)
        if mechanism != "after":
            bias_of = conditioned if mechanism == "conditional" else lambda w_s=w_s: g @ w_s.T
            monkeypatch.setattr(layer, "mlp", written(layer.mlp, bias_of))
    expected = student.body(inputs_embeds=rows, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_drafter_from_before_its_form_was_stored_has_the_old_form(root: Path) -> None:
    checkpoint = DrafterCheckpoint.open(root / "assets" / "tiny" / "steered")
    assert not {"steering", "steering_norm"} & set(checkpoint.config)
    config = checkpoint.configure(DraftModelConfig)
    assert (config.steering, config.steering_norm) == ("up", False)
    student = DraftModel(config)
    checkpoint.load(student)
    assert {name for name in student.state_dict() if "steering" in name} == {
        "steering.vector.weight", "steering.bias.weight",
    }  # fmt: skip
    other = replace(checkpoint, config={**checkpoint.config, "steering": "down"})
    with pytest.raises(CheckpointError, match="steering must be one of up, after, conditional, not 'down'") as caught:
        other.configure(DraftModelConfig)
    assert "\n" not in str(caught.value)


def test_layers_that_a_mechanism_does_not_fit() -> None:
    """After the MLP any layer can be steered. A condition needs a norm before the attention."""
    for architecture in ("phi3", "olmo2"):
        student = student_of(architecture, {"steering": "after"})
        assert student.steering is not None
        rows, positions = torch.randn(1, 4, 48), torch.arange(1, 5)[None]
        biases = [student.steering(torch.randn(1, 4, 144), positions) for _ in range(2)]
        assert not torch.allclose(*(student(rows, one) for one in biases))
    with pytest.raises(UnsupportedModelError) as caught:
        student_of("olmo2", {"steering": "conditional"})
    assert "layer 0 takes no conditional steering: Olmo2DecoderLayer has no input_layernorm" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_row_at_position_0_has_no_bias() -> None:
    student = student_of("llama")
    assert student.steering is not None
    positions, infinite = torch.arange(3)[None], torch.full((1, 3, 144), torch.inf)
    features = torch.randn(1, 3, 144)
    biases = student.steering(features, positions)
    assert not biases[:, 0].any()
    assert biases[:, 1:].abs().min() > 0
    assert not student.steering(infinite, positions)[:, 0].any(), "whatever the buffer holds there"


@pytest.mark.parametrize(
    ("architecture", "changes", "mlp"),
    [
        ("phi3", {}, "Phi3MLP"),
        ("gpt2", dict(n_embd=48, n_layer=3, n_head=4, n_positions=128), "GPT2MLP"),
        ("mixtral", {}, "MixtralSparseMoeBlock"),
        ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), "Qwen3MoeSparseMoeBlock"),
    ],
)
def test_an_mlp_without_an_up_projection_is_refused_by_name(
    architecture: str, changes: dict[str, object], mlp: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        student_of(architecture, **changes)
    assert f"layer 0 takes no steering: {mlp} has no up_proj next to a gate_proj" in str(caught.value)
    assert "\n" not in str(caught.value)
