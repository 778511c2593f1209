"""Muon and its parameters."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from redraft.train.config import Recipe
from redraft.train.optim import Muon, optimizers_for, orthogonalise


@pytest.mark.parametrize("shape", [(4, 16, 16), (3, 8, 32), (3, 32, 8)])
def test_orthogonalise_brings_singular_values_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_muon_steps_by_the_orthogonalised_nesterov_momentum():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 4))
    before, first, second = weight.detach().clone(), torch.randn(8, 4), torch.randn(8, 4)
    muon = Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.5)
    momentum = torch.zeros(8, 4)
    for grad in (first, second):
        weight.grad = grad.clone()
        muon.step()
        momentum = 0.9 * momentum + 0.1 * grad
        update = orthogonalise((0.9 * momentum + 0.1 * grad)[None])[0]
        before = before * (1 - 0.1 * 0.5) - 0.1 * 2**0.5 * update
    assert torch.allclose(weight, before, atol=1e-5)


def stepped(recipe, gradient):
    """Return an embedding, a gain and a matrix of ones after one step at half the rate."""
    names = ("model.embed_tokens.weight", "norm.weight", "o_proj.weight")
    named = [(name, nn.Parameter(torch.ones(4) if "norm" in name else torch.ones(4, 4))) for name in names]
    optimizers = optimizers_for(named, recipe)
    for _, parameter in named:
        parameter.grad = gradient(parameter)
    optimizers.step(0.5)
    return [parameter for _, parameter in named]


def first_row(parameter):
    gradient = torch.zeros_like(parameter)
    gradient[0] = 1.0
    return gradient


def test_embeddings_and_gains_go_to_adam_and_other_matrices_to_muon():
    """Muon would change an embedding's rows of tokens that did not occur."""
    recipe = Recipe(matrix_lr=0.1, embedding_lr=0.01, momentum=0.9, weight_decay=0.0)
    embed, gain, matrix = stepped(recipe, first_row)
    assert embed[0, 0].item() == pytest.approx(1 - 0.005, abs=1e-5)
    assert torch.equal(embed[1], torch.ones(4))
    assert gain[0].item() == pytest.approx(1 - 0.005, abs=1e-5)
    assert matrix[0, 0].item() < 1 - 0.005
    assert matrix.grad is None


def test_adam_takes_every_parameter_at_its_own_rate():
    """The paper's optimiser: Adam's first step has the length of the learning rate, for any parameter."""
    for parameter in stepped(Recipe(optimizer="adam", lr=0.01), torch.ones_like):
        assert torch.allclose(parameter, torch.full_like(parameter, 1 - 0.005), atol=1e-5)


def test_adamw_has_the_recipes_betas_and_decay_and_clips_by_value():
    """GRIFFIN, appendix C. Two steps by the definition, with gradients of which one is clipped."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    recipe = Recipe(optimizer="adamw", lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, grad_clip=0.5, clip_by="value")
    optimizers = optimizers_for([("weight", weight)], recipe)
    expected, mean, square = weight.detach().clone(), torch.zeros(2), torch.zeros(2)
    for step, grad in enumerate((torch.tensor([3.0, 0.25]), torch.tensor([-0.1, -4.0])), 1):
        weight.grad = grad.clone()
        optimizers.step(1.0)
        clipped = grad.clamp(-0.5, 0.5)
        mean, square = 0.8 * mean + 0.2 * clipped, 0.9 * square + 0.1 * clipped**2
        expected = expected * (1 - 0.1 * 0.5)
        expected = expected - 0.1 * (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-8)
    assert torch.allclose(weight, expected, atol=1e-6)


def scaled(model, lr=0.01):
    recipe = Recipe(optimizer="scaled_adam", lr=lr, grad_clip=1e9)
    return optimizers_for(model.named_parameters(), recipe, model.modules())


def test_a_step_of_a_column_is_divided_by_the_size_of_its_input():
    """So every input moves the output alike. A bias steps as in Adam."""
    model = nn.Linear(3, 2)
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizers = scaled(model)
    inputs = torch.tensor([[100.0, 1.0, 0.1], [-100.0, 1.0, -0.1]])
    model(inputs).square().sum().backward()
    signs = model.weight.grad.sign()
    with torch.no_grad():
        model(torch.full((1, 3), 1e6))  # a measurement without gradients is none of training
    optimizers.step(1.0)
    assert torch.allclose(before - model.weight, 0.01 * signs / torch.tensor([100.0, 1.0, 0.1]), rtol=1e-3)
    assert torch.allclose((bias - model.bias).abs(), torch.full((2,), 0.01), rtol=1e-3)


def test_a_resumed_optimizer_has_the_sizes_of_inputs():
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 1.0, 0.2])
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [scaled(model) for model in models]
    models[0](inputs).square().sum().backward()
    optimizers[0].step(1.0)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
    for model, each in zip(models, optimizers, strict=True):
        model(inputs * 2).square().sum().backward()
        each.step(1.0)
    assert torch.equal(models[0].weight, models[1].weight)
