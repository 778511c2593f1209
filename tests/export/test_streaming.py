"""transformers' model run one layer at a time gives the numbers of the whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.export.gguf.checkpoint import GgufCheckpoint
from redraft.export.reference import reference_logits
from tests.export.gguf_files import random_file


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen2moe", "stablelm"])
def test_layers_one_by_one_are_the_whole_model(name: str, tmp_path: Path) -> None:
    file = random_file(name)
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    tokens = [5, 9, 3, 11, 4, 7, 8, 6, 10, 3, 5, 12]
    (found,) = reference_logits(checkpoint, [tokens])
    with torch.no_grad():
        expected = file.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
