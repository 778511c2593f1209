"""Calls of transformers' own mask functions find the keys that a mask hides."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils as masks

from redraft.errors import UnsupportedModelError
from redraft.export.graph.attention import Mask, mask_of

POSITIONS = 40


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (masks.causal_mask_function, Mask()),
        (masks.sliding_window_causal_mask_function(8), Mask(window=8)),
        (masks.sliding_window_causal_mask_function(1), Mask(window=1)),
        (masks.sliding_window_causal_mask_function(POSITIONS), Mask()),
        (masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)), Mask(chunk=8)),
        (masks.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.long)), Mask(chunk=7)),
        (masks.chunked_causal_mask_function(39, torch.zeros(1, dtype=torch.long)), Mask(chunk=39)),
        (masks.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.long)), Mask()),
    ],
    ids=["causal", "window", "itself", "whole window", "chunk", "odd chunk", "long chunk", "whole chunk"],
)
def test_masks_are_recognized(function, expected):
    found = mask_of(function, POSITIONS)
    seen = [[found.sees(q, k) for k in range(POSITIONS)] for q in range(POSITIONS)]
    wanted = [[expected.sees(q, k) for k in range(POSITIONS)] for q in range(POSITIONS)]
    assert found == expected or seen == wanted  # a window of one and chunks of one are the same


@pytest.mark.parametrize(
    "function",
    [
        masks.bidirectional_mask_function,
        masks.sliding_window_bidirectional_mask_function(8),
        masks.or_masks(masks.causal_mask_function, lambda b, h, q, k: k < 4),
        masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: k != 3),
    ],
    ids=["both directions", "window in both directions", "prefix", "a hole"],
)
def test_other_masks_are_refused(function):
    with pytest.raises(UnsupportedModelError, match="not causal, nor causal within a window or a chunk"):
        mask_of(function, POSITIONS)


def test_short_contexts():
    for positions in (1, 2, 3):
        assert mask_of(masks.causal_mask_function, positions) == Mask()
