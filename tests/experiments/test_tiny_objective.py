"""The verifier's objective, its MTP module and its growth."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from experiments.tiny.objective import VerifierObjective, grow
from redraft.train.batches import Batch


@pytest.fixture
def objective(recipe):
    torch.manual_seed(0)
    objective = VerifierObjective(recipe)
    for parameter in objective.parameters():  # no zeros, so that every path counts
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return objective


def test_losses_match_a_loop_over_positions(objective):
    """Computed by hand: the MTP module predicts x[t + 2] from the state at t and the embedding of x[t + 1]."""
    tokens = torch.randint(0, 400, (3, 10))
    main, mtp = objective.row_losses(tokens)
    assert main.shape == (3,)
    assert mtp.shape == (2,)  # rows 0 and 2
    embed = objective.model.get_input_embeddings()
    for row in range(3):
        hidden = objective.model.model(input_ids=tokens[row : row + 1, :8]).last_hidden_state[0]
        expected = [F.cross_entropy(hidden[t] @ embed.weight.T, tokens[row, t + 1]) for t in range(8)]
        assert main[row].item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)
        if row % 2 == 0:
            following = torch.stack([embed.weight[tokens[row, t + 1]] for t in range(8)])
            states = objective.mtp(hidden[None], following[None])[0]
            expected = [F.cross_entropy(states[t] @ embed.weight.T, tokens[row, t + 2]) for t in range(8)]
            assert mtp[row // 2].item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)


def test_mtp_module_is_causal_and_sees_only_the_next_token(objective):
    """State t may depend on h[..t] and x[..t+1]; a leak of x[t + 2] would make its loss and acceptance worthless."""
    hidden, following = torch.randn(1, 6, 32), torch.randn(1, 6, 32)
    before = objective.mtp(hidden, following)
    hidden[:, 4:] += 1
    following[:, 4:] += 1
    after = objective.mtp(hidden, following)
    assert torch.allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert not torch.allclose(before[:, 4], after[:, 4], atol=1e-3)


def test_main_loss_does_not_see_its_target(objective):
    tokens = torch.randint(0, 400, (1, 10))
    other = tokens.clone()
    other[0, 9] = (other[0, 9] + 1) % 400  # only the MTP module's last target
    assert torch.equal(objective.row_losses(tokens)[0], objective.row_losses(other)[0])
    assert not torch.equal(objective.row_losses(tokens)[1], objective.row_losses(other)[1])


def test_metrics_are_means_by_kind(objective):
    tokens = torch.randint(0, 400, (4, 10))
    main, mtp = objective.row_losses(tokens)
    loss, metrics = objective.loss(Batch.whole(tokens, ("a", "b", "a", "b"), objective.lookahead))
    assert metrics["a"] == pytest.approx((main[0] + main[2]).item() / 2)
    assert metrics["mtp"] == pytest.approx(mtp.mean().item())
    assert loss.item() == pytest.approx((main.mean() + 0.3 * mtp.mean()).item(), rel=1e-5)


def test_growth_keeps_the_function_and_its_layers_can_learn(objective):
    tokens = torch.randint(0, 400, (2, 10))
    before = objective.row_losses(tokens)[0]
    grow(objective.model, 4)
    assert len(objective.model.model.layers) == objective.model.config.num_hidden_layers == 4
    assert [layer.self_attn.layer_idx for layer in objective.model.model.layers] == [0, 1, 2, 3]
    after = objective.row_losses(tokens)[0]
    assert torch.allclose(before, after, atol=1e-5)
    after.mean().backward()
    assert objective.model.model.layers[1].mlp.down_proj.weight.grad.abs().max() > 0
    with pytest.raises(ValueError, match="grow"):
        grow(objective.model, 6)
