"""Runs a draft graph without the runtime: two sequences catch up in two calls, the second of which is padded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redraft import names
from redraft.engines.calls import Calls
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.export.drafters import graph_file
from redraft.methods import Method
from tests.engines.sessions import session_of
from tests.noise import keys_of, noise_rows

CAPACITY = 40
LENGTHS = (9, 6)
SPLITS = ([4, 4], [5, 2])
"""Rows of each sequence in each call."""

Expected = Callable[[torch.Tensor, list[int], np.ndarray], np.ndarray]
"""Features [T, n], the T + 1 tokens of a text, noise [N, H] -> the logits [N, H] of the steps."""


def check_drafts(
    folder: Path, name: str, method: Method[Any], shape: Any, expected: Expected, vocabulary: np.ndarray,
    scales: tuple[float, float] = (1.0, 0.7), tolerance: float = 1e-4,
) -> None:  # fmt: skip
    """Compare the drafts of the graph with those that `expected` computes again for every text.

    Each sequence has a draft logit scale of its own, and the second one has noise.   vocabulary: the columns' tokens.
    """
    signature = method.signatures(shape)[names.DRAFT]
    record = GraphRecord(graph_file(name, names.DRAFT), *signature)
    calls = Calls(OnnxRuntimeProgram(session_of(folder / record.file), record))
    for cache in (names.key_cache(0), names.value_cache(0)):
        calls.bind(cache, np.full((2, shape.kv_heads, CAPACITY, shape.head_dim), 7.0, np.float32))
    if len(vocabulary) != shape.vocabulary:
        calls.bind(names.DRAFT_VOCABULARY, vocabulary)
    temperatures = np.array([0, 1.4], np.float32)
    noises = [np.float32(t) * noise_rows(seed, 21, shape.steps, vocabulary) for seed, t in enumerate(temperatures)]
    calls.bind(names.DRAFT_LOGIT_SCALE, np.array(scales, np.float32))
    calls.bind(names.NOISE_SCALE, temperatures)
    calls.bind(names.NOISE_KEYS, keys_of((0, 1), 21, shape.steps))
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(0, shape.vocabulary, (length + 1,), generator=generator).tolist() for length in LENGTHS]
    features = [torch.randn(length, shape.hidden, generator=generator) for length in LENGTHS]
    past = [0, 0]
    for rows in SPLITS:
        width = max(rows) + 1
        call = calls.prepare(B=2, M=width)
        for slot, count in enumerate(rows):
            start = past[slot]
            call.inputs[names.FEATURE_ROWS][slot] = 99.0
            call.inputs[names.FEATURE_ROWS][slot, :count] = features[slot][start : start + count]
            call.inputs[names.TOKENS][slot, :count] = texts[slot][start + 1 : start + count + 1]
            call.inputs[names.POSITIONS][slot] = np.arange(start, start + width)
            call.inputs[names.NUM_PENDING][slot] = count
            call.inputs[names.CACHE_LEN][slot] = start
            past[slot] += count
        call.inputs[names.KV_LEN][0] = max(call.inputs[names.CACHE_LEN]) + width
        call.run()
        for slot, end in enumerate(past):
            chain = expected(features[slot][:end], texts[slot][: end + 1], noises[slot])
            assert float(chain.std()) > 0.1
            np.testing.assert_allclose(call.outputs[names.CHAIN_LOGITS][slot], chain, atol=tolerance)
            z = (chain + noises[slot]) * np.float32(scales[slot])
            tokens = vocabulary[z.argmax(1)].tolist()
            assert call.outputs[names.TREE_TOKENS][slot].tolist() == [texts[slot][end], *tokens]
            assert call.outputs[names.TREE_PARENTS][slot].tolist() == list(range(-1, shape.steps))
            joint = np.cumsum(-np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)))
            np.testing.assert_allclose(call.outputs[names.TREE_LOG_PROBS][slot][1:], joint, atol=1e-3)
