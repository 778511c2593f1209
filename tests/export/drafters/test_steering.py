"""Steering adds W_s g to the up projections of any gated MLP, as equation 2 of SD² has it, and refuses other MLPs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.drafters.decoder_drafter import DraftModel, configuration_of
from redraft.export.drafters.steering import Steering
from tests.export.models import config_of

STATES = ("2", "1", "0")


def student_of(architecture: str, **changes: object) -> DraftModel:
    """A steered student of two layers, whose steering is random."""
    torch.manual_seed(0)
    config = configuration_of(config_of(architecture, **changes), 97, (0, 2), hidden_states=STATES)
    student = DraftModel(config).eval().requires_grad_(False)
    for parameter in student.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return student


def test_at_first_g_is_the_sum_of_the_hidden_states_and_changes_nothing() -> None:
    steering = Steering(8, 3, (5, 6)).requires_grad_(False)
    features = torch.randn(2, 4, 24)
    torch.testing.assert_close(steering.vector(features), features.unflatten(-1, (3, 8)).sum(-2))
    positions = torch.arange(4).expand(2, -1)
    assert torch.equal(steering(features, positions), torch.zeros(2, 4, 11))
    config = configuration_of(config_of("llama"), 97, (0, 2), hidden_states=STATES)
    student, rows = DraftModel(config).eval().requires_grad_(False), torch.randn(1, 4, 48)
    plain = student.body(inputs_embeds=rows, use_cache=False).last_hidden_state
    assert student.steering is not None
    found = student(rows, student.steering(torch.randn(1, 4, 144), positions[:1]))
    assert torch.equal(found, plain)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma2"])
def test_each_mlp_is_equation_2_with_its_own_product_of_g(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The student equals one whose MLPs are written from the paper. Each row has its own g."""
    student = student_of(architecture)
    steering = student.steering
    assert steering is not None
    rows, features, positions = torch.randn(2, 5, 48), torch.randn(2, 5, 144), torch.arange(3, 8).expand(2, -1)
    found = student(rows, steering(features, positions))
    g = features @ steering.vector.weight.T
    products = steering.bias.weight.split(steering.sizes)

    def written(mlp: nn.Module, w_s: torch.Tensor) -> nn.Module:
        class Written(nn.Module):
            def forward(self, a: torch.Tensor) -> torch.Tensor:
                up, gate, down = (getattr(mlp, f"{name}_proj").weight for name in ("up", "gate", "down"))
                return ((a @ up.T + g @ w_s.T) * mlp.act_fn(a @ gate.T)) @ down.T

        return Written()

    for layer, w_s in zip(student.body.layers, products, strict=True):
        monkeypatch.setattr(layer, "mlp", written(layer.mlp, w_s))
    expected = student.body(inputs_embeds=rows, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


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


def test_hidden_states_are_different() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_states must be different names, not \['1', '1'\]"):
        configuration_of(config_of("llama"), 97, (0,), hidden_states=("1", "1"))
