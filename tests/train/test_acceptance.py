"""Conditional acceptance of handmade drafts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.export.drafters.lyanna import LyannaConfig
from redraft.train import acceptance as acceptance_module
from redraft.train.acceptance import (
    DRAFT_LOGIT_SCALES,
    RANKS,
    acceptance_of,
    greedy_draft_logit_scale,
    greedy_rows,
    rank_accuracies,
)
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives.lyanna import LyannaObjective, LyannaTable
from redraft.train.states import states_of

VOCAB = 12
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2}  # fmt: skip
TEXT = [0, 1, 2, 3, 4, 5, 6]
GREEDY = [1, 2, 3, 4, 5, 6, 7]  # after each position


def objective(drafts, greedy=GREEDY, vocabulary=None):
    """Two steps. `drafts[step][start]` are candidates, most probable first."""
    vocabulary = vocabulary or DraftColumns.whole(VOCAB)

    def logits(candidates):
        scores = torch.zeros(len(vocabulary))
        for rank, token in enumerate(candidates):
            scores[vocabulary.columns_of(torch.tensor(token))] = 10.0 - rank
        return scores

    def verify(batch):
        target = torch.nn.functional.one_hot(torch.tensor(greedy), VOCAB).float()[None]
        return states_of({}, target.expand(len(batch.tokens), -1, -1))

    def both(batch, states):
        starts = batch.starts[0].tolist()
        for step in drafts:
            yield torch.stack([logits(step[start]) for start in starts])[None].expand(len(batch.tokens), -1, -1)

    cpu = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    return SimpleNamespace(lookahead=2, states=verify, drafts=both, verifier=cpu, vocabulary=vocabulary)


def acceptance(found, rows, first):
    return acceptance_of(found, greedy_rows(np.array(rows), first, found.lookahead))


# Five starts. Depth 1 from start p predicts p + 2, depth 2 predicts p + 3.
FIRST = [[2, 9, 10, 11], [3, 9, 10, 11], [9, 4, 10, 11], [9, 10, 11, 8], [6, 9, 10, 11]]
SECOND = [[3, 9, 10, 11], [9, 4, 10, 11], [5, 9, 10, 11], [6, 9, 10, 11], [9, 10, 11, 8]]


def test_a_depth_counts_only_if_all_earlier_ones_were_right():
    found = acceptance(objective([FIRST, SECOND]), [TEXT], 0)
    assert found.top == pytest.approx((3 / 5, 1 / 3))  # starts 0, 1, 4 right at depth 1; of them 0 at depth 2
    assert found.wide == pytest.approx((4 / 5, 3 / 4))  # starts 0, 1, 2, 4; of them 0, 1, 2
    assert found.starts == (5, 3)


def test_a_draft_ends_if_the_text_differs_from_the_verifier():
    """Later tokens of such a draft are never verified."""
    greedy = list(GREEDY)
    greedy[1] = 9  # after position 1 the verifier's token is 9, the text continues with 2
    found = acceptance(objective([[[9], *FIRST[1:]], SECOND], greedy), [TEXT], 0)
    assert found.top[0] == pytest.approx(3 / 5)  # the verifier's token counts: start 0 drafted 9
    assert found.starts == (5, 2)  # but start 0 does not continue


def test_texts_of_several_lengths_are_counted_together():
    """Drafts before the first position of the second batch do not count."""
    batches = [*greedy_rows(np.array([TEXT]), 0, 2), *greedy_rows(np.array([TEXT, TEXT]), 4, 2)]
    found = acceptance_of(objective([FIRST, SECOND]), batches)
    assert found.starts == (7, 5)
    assert found.top == pytest.approx((5 / 7, 1 / 5))


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_bf16_verifier_is_measured_with_a_drafter_in_fp32(device):
    """As in training on a GPU, products of both use the verifier's type in every measurement."""
    torch.manual_seed(0)
    verifier = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device, torch.bfloat16).eval().requires_grad_(False)
    config = LyannaConfig(hidden_size=16, vocab_size=VOCAB, intermediate_size=16, heads=2, kv_heads=2, head_dim=8,
                          rank=2, steps=2)  # fmt: skip
    own = LyannaObjective(verifier, config, LyannaTable())
    own.to(device)
    batches = greedy_rows(np.array([TEXT, TEXT[::-1]]), 0, 2)
    assert acceptance_of(own, batches).starts[0] == 10
    assert greedy_draft_logit_scale(own, batches) in DRAFT_LOGIT_SCALES
    loss, _ = own.loss(batches[0])
    assert torch.isfinite(loss)


def test_a_token_outside_the_draft_vocabulary_is_a_wrong_draft():
    """Columns are mapped to tokens, and the share of right drafts counts all tokens of the verifier."""
    some = DraftColumns(torch.tensor([2, 3, 5, 6, 7, 8, 9, 10, 11]), VOCAB)  # without 4
    first = [[2, 9], [3, 9], [9, 10], [5, 9], [6, 9]]
    found = acceptance(objective([first, SECOND], vocabulary=some), [TEXT], 0)
    assert found.top[0] == pytest.approx(4 / 5)


def test_the_scale_is_the_best_of_all_factors(monkeypatch):
    """Each candidate's logit is 1 below the one before. Of ten drafts one is right with its second candidate."""
    monkeypatch.setattr(acceptance_module, "_EVERY", 1)
    drafts = [[[token, 9, 10, 11] for token in GREEDY[depth:][:5]] for depth in (1, 2)]
    drafts[0][3][:2] = drafts[0][3][1::-1]
    ranks = np.array([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])[..., None]
    logits = np.where(np.arange(VOCAB) < 4, 10.0 - np.arange(VOCAB), 0.0)
    sums = [
        float((factor * (10.0 - ranks) - np.log(np.exp(factor * logits).sum())).sum()) for factor in DRAFT_LOGIT_SCALES
    ]
    best = int(np.argmax(sums))
    assert 4 < best < len(DRAFT_LOGIT_SCALES) - 1
    assert greedy_draft_logit_scale(objective(drafts), greedy_rows(np.array([TEXT]), 0, 2)) == DRAFT_LOGIT_SCALES[best]


def test_accuracies_by_rank_count_drafts_that_were_wrong_before():
    """Of five starts, by rank: depth 1 is right at 0, 1, 4; then at 2; then nowhere; at 3. Depth 2 likewise."""
    found = rank_accuracies(objective([FIRST, SECOND]), greedy_rows(np.array([TEXT]), 0, 2))
    assert [len(shares) for shares in found] == [RANKS, RANKS]
    assert [shares[:4] for shares in found] == [pytest.approx([3 / 5, 1 / 5, 0, 0])] * 2
    some = DraftColumns(torch.tensor([2, 3, 5, 6, 7, 8]), VOCAB)  # without 4, and with fewer tokens than RANKS
    first, second = [[2, 8], [3, 8], [8], [5, 8], [6, 8]], [[3, 8], [8], [5, 8], [6, 8], [8, 7]]
    found = rank_accuracies(objective([first, second], vocabulary=some), greedy_rows(np.array([TEXT]), 0, 2))
    assert [len(shares) for shares in found] == [6, 6]
    assert (found[0][0], found[1][:2]) == (4 / 5, [3 / 5, 1 / 5])
