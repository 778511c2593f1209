"""`python -m experiments.multi_head`: the joint loss, and a variant trained, published and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.export.drafters.trunk_heads import head_logits
from transformers import AutoModelForCausalLM

from experiments.multi_head.__main__ import main
from experiments.multi_head.objective import JointObjective
from experiments.multi_head.recipe import VariantRecipe
from experiments.tiny.publish import publish as publish_verifier
from redraft.errors import CheckpointError, UsageError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.train.batches import Batch
from redraft.train.run import load_corpora


@pytest.fixture(scope="module")
def start(run, sources, recipe, tmp_path_factory) -> Path:
    """A verifier to begin with, with its held-out text."""
    out = tmp_path_factory.mktemp("start")
    publish_verifier(run, out, load_corpora(sources, recipe))
    return out


@pytest.fixture
def objective(start):
    """With heads that differ, so that every path counts."""
    torch.manual_seed(0)
    found = JointObjective(start, VariantRecipe(draft_heads=2))
    for parameter in (*found.drafter.layers.parameters(), *found.model.parameters()):
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return found


def test_all_heads_begin_as_the_verifier(start):
    found, tokens = JointObjective(start, VariantRecipe()), torch.randint(3, 400, (2, 12))
    with torch.no_grad():
        wanted = found.model.model(tokens).last_hidden_state
        states = list(found.states(found.trunk(tokens)))
    assert len(states) == found.lookahead == 4
    for state in states:
        torch.testing.assert_close(state, wanted, rtol=1e-4, atol=1e-5)


def test_losses_match_a_loop_over_heads_and_positions(objective):
    """Head i at row t predicts the token at t + i; the verifier's own is head 1."""
    tokens = torch.randint(3, 400, (2, 9))
    rows = tokens.shape[1] - objective.lookahead
    with torch.no_grad():
        trunk = objective.trunk(tokens[:, :rows])
        found = list(objective.head_losses(trunk, tokens))
        matrix, logits = objective.model.lm_head.weight, objective.model(tokens).logits
        for row in range(2):
            own = [F.cross_entropy(logits[row, t], tokens[row, t + 1]) for t in range(rows)]
            assert found[0][row].item() == pytest.approx(torch.stack(own).mean().item(), rel=1e-4)
            for head in range(2):
                wanted = [
                    F.cross_entropy(head_logits(objective.drafter, head, trunk[row, : t + 1], matrix), token)
                    for t, token in enumerate(tokens[row, 2 + head : 2 + head + rows])
                ]
                assert found[1 + head][row].item() == pytest.approx(torch.stack(wanted).mean().item(), rel=1e-4)


def test_head_by_head_has_the_gradient_of_the_mean(objective):
    """Of trunk, last layer, heads, and of the embedding, which all share. Metrics are by kind and by head."""
    tokens = torch.randint(3, 400, (2, 12))
    batch = Batch.whole(tokens, ("a", "b"), objective.lookahead)
    loss, metrics = objective.loss(batch)
    loss.backward()
    found = {name: parameter.grad for name, parameter in objective.named_parameters()}
    objective.zero_grad()
    by_head = torch.stack(list(objective.head_losses(objective.trunk(tokens[:, : -objective.lookahead]), tokens)))
    by_head.mean().backward()
    assert loss.item() == pytest.approx(by_head.mean().item(), rel=1e-5)
    assert metrics == pytest.approx(
        {"a": by_head[0, 0].item(), "b": by_head[0, 1].item(), "head 1": by_head[1].mean().item(),
         "head 2": by_head[2].mean().item()}, rel=1e-5,
    )  # fmt: skip
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def data_options(sources):
    return [option for kind, source in sources.items() for option in ("--data", f"{kind}={source}")]


def test_train_publish_evaluate(sources, start, tmp_path):
    """From training to measuring: `evaluate` measures the figures again, of the folder alone."""
    recipe, run, out = tmp_path / "small.toml", tmp_path / "run", tmp_path / "out"
    recipe.write_text(
        "steps = 4\nbatch_tokens = 64\nseq_len = 16\ndecay_seq_len = 16\nheld_out_every = 3\ndraft_heads = 2\n"
    )
    common = ["train", *data_options(sources), "--out", str(run), "--config", str(recipe), "--start", str(start)]
    assert main([*common, "--checkpoint-every", "2"])["steps_run"] == 4
    assert main([*common, "--resume"])["steps_run"] == 0
    with pytest.raises(UsageError, match="--resume"):
        main(common)

    published = main(["publish", str(run), "--start", str(start), "--out", str(out)])
    figures = {name: published[name] for name in ("parameters", "head_parameters", "kinds")}
    assert json.dumps(main(["evaluate", str(out), "--start", str(start)])) == json.dumps(figures)
    assert set(figures["kinds"]) == {"code", "word_problems", "prose"}
    for kind in figures["kinds"].values():
        assert kind["bits_per_byte"] != kind["before"]
        assert len(kind["right"]) == len(kind["accepted"]) == 2

    _, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "redraft_mtp" not in json.loads((out / "config.json").read_text())
    opened = DrafterCheckpoint.open(out / "multi_head")
    assert opened.verifier == Identity.of(Checkpoint.open(out))
    assert opened.config["hidden_states"] == ["2"]
    assert [len(shares) for shares in opened.config["rank_accuracies"]] == [10, 10]
    stored, weights = load_file(out / "multi_head" / "model.safetensors"), out / "model.safetensors"
    verifier = load_file(weights)
    assert torch.equal(stored["norm.weight"].float(), verifier["model.norm.weight"].float())
    assert int(stored["token_counts"].sum()) > 0

    save_file({**verifier, "model.norm.weight": verifier["model.norm.weight"] * 2}, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="was trained for another verifier"):
        main(["evaluate", str(out)])


def test_sources_and_recipes_that_cannot_be(sources, tmp_path):
    with pytest.raises(UsageError, match=r"has no tokenizer\.json; give --start a folder like assets/tiny"):
        main(["train", *data_options(sources), "--out", str(tmp_path / "run"), "--start", str(tmp_path)])
    with pytest.raises(UsageError, match="draft_heads must be a number from 1 to 16, not 17"):
        VariantRecipe(draft_heads=17)
