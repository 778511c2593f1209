"""Published drafters that draft a block: converted, they compute the authors' forward pass, and faults are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from redraft.errors import CheckpointError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.block_drafter import BlockConfig, BlockDrafter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.published import named_method, read_states, recognise
from redraft.export.drafters.published_conversion import convert
from redraft.train.objectives.block_drafter import block_attention
from tests.export.models import write_checkpoint

from .block_by_hand import Sizes, block_states, chance, token_bias
from .published_checkpoints import (
    HEADS,
    KV_HEADS,
    LAYERS,
    H,
    N,
    Tensors,
    V,
    block_tensors,
    deepspec,
    draw,
    sizes,
    speculators_block,
    write,
    z_lab,
)
from .test_block_graphs import AFTER_TOKENS, BOTH_WAYS, ONE_WAY

EMBEDDING, HEAD, MASK = "model.embed_tokens.weight", "lm_head.weight", 5
Made = tuple[dict[str, Any], Tensors]


def older() -> Made:
    """A DSpark of speculators from before `sample_from_anchor`, whose layers come from another block drafter."""
    values, tensors = speculators_block("dspark", markov_rank=6)
    values["transformer_layer_config"]["block_size"] = 16
    return {name: value for name, value in values.items() if name != "sample_from_anchor"}, tensors


CASES: dict[str, tuple[Callable[[], Made], str, int, tuple[str, ...]]] = {
    "z-lab": (z_lab, BOTH_WAYS, 5, ("1", "3", "last")),
    "of other ids": (lambda: z_lab(None, biases=True), BOTH_WAYS, 5, ("1", "5")),
    "causal": (lambda: z_lab(causal_head=True), ONE_WAY, 5, ("1", "3", "last")),
    "deepspec": (deepspec, AFTER_TOKENS, 6, ("1", "3", "last")),
    "without tokens": (lambda: deepspec(0, False), AFTER_TOKENS, 6, ("1", "3", "last")),
    "confidence of states": (lambda: deepspec(with_markov=False), AFTER_TOKENS, 6, ("1", "3", "last")),
    "speculators": (speculators_block, BOTH_WAYS, 5, ("1", "3", "7")),
    "of its ids": (
        lambda: speculators_block(aux_hidden_state_layer_ids=None, small=False), BOTH_WAYS, 5, ("1", "3", "4"),
    ),
    "of its tokens": (lambda: speculators_block("dspark", markov_rank=6), AFTER_TOKENS, 6, ("1", "3", "7")),
    "masks after tokens": (
        lambda: speculators_block("dspark", markov_rank=6, sample_from_anchor=False), BOTH_WAYS, 5, ("1", "3", "7"),
    ),
    "of an older file": (older, BOTH_WAYS, 5, ("1", "3", "7")),
}  # fmt: skip
"""Checkpoints, with their method, the tokens of a block and the hidden states that they read."""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("verifier")
    return Checkpoint.open(write_checkpoint(folder, "llama", num_hidden_layers=LAYERS, rope_parameters=None))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def converted(folder: Path, verifier: Checkpoint, out: Path) -> tuple[BlockConfig, BlockDrafter, DrafterCheckpoint]:
    drafter = convert(folder, verifier, Identity(("weights",), "tokenizer"), out)
    config = drafter.configure(BlockConfig)
    module = BlockDrafter(config).requires_grad_(False)
    drafter.load(module)
    return config, module, drafter


@pytest.mark.parametrize("name", CASES)
def test_a_drafter_computes_its_authors_forward_pass(verifier: Checkpoint, tmp_path: Path, name: str) -> None:
    """Two blocks over one text, each over the context up to its start."""
    make, method, steps, states = CASES[name]
    values, tensors = make()
    folder = write(tmp_path / "published", values, tensors)
    config, module, drafter = converted(folder, verifier, tmp_path / "drafter")
    assert (drafter.method, config.steps, config.hidden_states) == (method, steps, states)
    assert named_method(folder) == method
    assert read_states(folder, verifier) == states
    embedding = load_file(str(verifier.path / "model.safetensors"))[EMBEDDING]
    starts, rows, length, tokens = torch.tensor([[3, 5]]), values["block_size"], 7, torch.tensor([[11, 40]])
    features = torch.randn(1, length, N * len(states))
    own = (starts + 1)[:, :, None] + torch.arange(rows)
    positions = torch.cat([torch.arange(length)[None], own.flatten(1)], dim=1)
    attend = block_attention(config, starts, length)
    found = module(features, F.embedding(tokens, embedding), positions, rows, attend)
    sizes = Sizes(2, HEADS, KV_HEADS, 16, method == ONE_WAY, 700.0)
    for block, (start, token) in enumerate(zip(starts[0].tolist(), tokens[0].tolist(), strict=True)):
        read = torch.cat([embedding[token][None], embedding[MASK].bfloat16().float().expand(rows - 1, -1)])
        wanted = block_states(tensors, sizes, features[0, : start + 1], read)[rows - steps :]
        torch.testing.assert_close(found[0, block], wanted, rtol=1e-4, atol=1e-4)
    if config.token_rank:
        bias = module.token_head(module.tokens(tokens[0]))
        torch.testing.assert_close(bias[1], token_bias(tensors, 40), rtol=1e-4, atol=1e-4)
    if config.confidence and config.token_rank and name != "confidence of states":
        sure = torch.sigmoid(module.confidences(found[0, 0, 2], module.tokens(tokens[0, 0])))
        torch.testing.assert_close(sure, chance(tensors, found[0, 0, 2], 11), rtol=1e-4, atol=1e-4)
    elif config.confidence:
        weight, (offset,) = tensors["confidence_head.proj.weight"][0], tensors["confidence_head.proj.bias"]
        before = module.tokens(tokens[0, 0]) if config.token_rank else None
        expected = weight @ found[0, 0, 2] + offset
        torch.testing.assert_close(module.confidences(found[0, 0, 2], before), expected, rtol=1e-4, atol=1e-4)


def test_a_verifier_that_scales_its_embeddings_is_refused(tmp_path: Path) -> None:
    """The authors' programs embed anchors and masks by the verifier's own module."""
    verifier = Checkpoint.open(write_checkpoint(tmp_path / "verifier", "gemma2"))
    with pytest.raises(CheckpointError, match=r"reads embeddings that its verifier has scaled \(Gemma2"):
        converted(write(tmp_path / "a", *z_lab()), verifier, tmp_path / "b")


def test_copies_of_the_verifiers_matrices_are_compared_and_left_out(verifier: Checkpoint, tmp_path: Path) -> None:
    values, tensors = deepspec()
    stored = load_file(str(verifier.path / "model.safetensors"))
    tensors |= {"embed_tokens.weight": stored[EMBEDDING], "lm_head.weight": stored[HEAD]}
    _, module, _ = converted(write(tmp_path / "a", values, tensors), verifier, tmp_path / "b")
    assert not {"embed_tokens.weight", "head.weight"} & set(module.state_dict())
    tensors["lm_head.weight"] = stored[HEAD] + 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the verifier's head, first in row 0"):
        converted(write(tmp_path / "c", values, tensors), verifier, tmp_path / "d")


def test_rows_of_the_head_are_those_of_the_draft_vocabulary(verifier: Checkpoint, tmp_path: Path) -> None:
    values, tensors = speculators_block("dspark", markov_rank=6)
    stored = load_file(str(verifier.path / "model.safetensors"))
    drafted = tensors["d2t"] + torch.arange(H)
    tensors |= {"embed_tokens.weight": stored[EMBEDDING], "lm_head.weight": stored[HEAD][drafted]}
    config, module, drafter = converted(write(tmp_path / "a", values, tensors), verifier, tmp_path / "b")
    assert config.draft_vocab_size == H
    assert module.token_head.weight.shape == (H, 6)
    assert drafter.load(module).draft_vocabulary.tolist() == drafted.tolist()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"][7] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the verifier's head, first in row 7"):
        converted(write(tmp_path / "c", values, tensors), verifier, tmp_path / "d")


@pytest.mark.parametrize(
    ("make", "description"),
    [
        (z_lab, "DFlash in z-lab's layout"),
        (lambda: z_lab(causal_head=True), "JetSpec in z-lab's layout"),
        (deepspec, "DSpark in DeepSpec's layout"),
        (speculators_block, "DFlash in speculators' layout"),
        (lambda: speculators_block("dspark", markov_rank=6), "DSpark in speculators' layout"),
    ],
)
def test_layouts_are_recognised(tmp_path: Path, make: Callable[[], Made], description: str) -> None:
    found = recognise(write(tmp_path, *make()))
    assert found is not None
    assert found.description == description


def with_values(made: Made, **values: Any) -> Made:
    return {**made[0], **values}, made[1]


def with_tensor(made: Made, name: str, tensor: torch.Tensor) -> Made:
    return made[0], {**made[1], name: tensor}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: z_lab(mask_token_id=None), f"mask_token_id None is no token of the verifier, from 0 to {V - 1}"),
        (lambda: z_lab((3, 3)), r"reads the outputs of layers \[3, 3\], expected different layers from 0 to 7"),
        (lambda: z_lab((3, 8)), r"reads the outputs of layers \[3, 8\]"),
        (lambda: z_lab((-1, 3)), r"reads embeddings \(layer -1\), which redraft's drafters do not"),
        (lambda: with_values(z_lab(), num_target_layers=9), "is for a verifier of 9 layers, not 8; give the verifier"),
        (lambda: with_values(z_lab(), block_size=1), "block_size 1 is no number of a block's rows"),
        (lambda: with_values(z_lab(), hidden_act="gelu"), "has the activation 'gelu', which redraft's drafters do not"),
        (lambda: z_lab(target_hidden_size=64), f"has hidden states of width 64, the verifier has {N}"),
        (lambda: speculators_block(aux_hidden_state_layer_ids=[0, 3, 4]), r"reads embeddings \(layer -1\)"),
        (lambda: speculators_block(aux_hidden_state_layer_ids=[2, 4, 9]), r"the outputs of layers \[1, 3, 8\]"),
        (lambda: speculators_block(draft_vocab_size="x"), "draft_vocab_size 'x' is no number of tokens"),
        (lambda: (speculators_block()[0], speculators_block(small=False)[1]), r"missing d2t"),
        (lambda: speculators_block("dspark", markov_rank=6, markov_head_type="gated"), "a Markov head of type 'gated'"),
        (
            lambda: speculators_block(transformer_layer_config=sizes(head_dim=16, layer_types=["sliding_attention"])),
            "has a layer that does not attend to all tokens",
        ),
        (
            lambda: with_values(deepspec(), rope_parameters={"full_attention": {}}),
            "has rotary embeddings by type of layer",
        ),
        (lambda: deepspec(markov_rank="many"), "markov_rank 'many' is no number of columns"),
        (lambda: deepspec(markov_head_type="rnn"), "has a Markov head of type 'rnn', which redraft's drafters do not"),
        (lambda: with_tensor(z_lab(), "gate.weight", draw(3)), r"surplus gate\.weight; give the checkpoint that its"),
        (lambda: (z_lab()[0], block_tensors(1, 3)), r"missing layers\.1\.input_layernorm\.weight"),
    ],
)
def test_faults_are_named_in_one_line(
    verifier: Checkpoint, tmp_path: Path, make: Callable[[], Made], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        converted(write(tmp_path / "published", *make()), verifier, tmp_path / "drafter")
    assert "\n" not in str(caught.value)
