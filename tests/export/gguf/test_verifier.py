"""A graph exported from a GGUF file computes the results of transformers for the file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft import names
from redraft.config import BuildConfig
from redraft.export.gguf.checkpoint import GgufCheckpoint
from redraft.export.verifier import export_verifier
from tests.export.gguf_files import by_transformers, random_file
from tests.export.test_verifier import TOLERANCE, Graph

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gemma2", "phi3", "qwen3moe")]
KEYS = {
    "gemma2": dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "qwen3moe": dict(expert_feed_forward_length=768),
}
"""transformers reads none of these keys, and has these values for every file."""


@pytest.mark.parametrize("name", ["llama", "gemma3", *SLOW])
def test_logits_are_those_of_transformers(name, tmp_path):
    file = random_file(name, "Q8_0", **dict(moe_intermediate_size=768) if name == "qwen3moe" else {})
    file.keys |= KEYS.get(name, {})
    path = file.write(tmp_path / "m.gguf")
    model = by_transformers(path)
    if name == "phi3":
        model.config.sliding_window = 16  # the file has this value; transformers does not read it
    export = export_verifier(GgufCheckpoint.open(path), tmp_path, BuildConfig())
    prompt = np.random.default_rng(0).integers(3, model.config.vocab_size, 20)
    graph = Graph(tmp_path, export, 1)
    graph.prefill([prompt[:-1].tolist()])
    found = graph.call(prompt[None, -1:], np.array([[-1]]), np.array([[0]]))[names.LOGITS]
    with torch.no_grad():
        expected = model(torch.tensor(prompt)[None]).logits[0, -1].numpy()
    np.testing.assert_allclose(found.ravel(), expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
