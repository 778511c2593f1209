"""A sample of the cases of docs/architectures.md, those with earlier faults included."""

from __future__ import annotations

import pytest

from .check import Result, check

SAME = (
    "glm4_moe",  # a buffer of the router
    "gemma4_text",  # a buffer for each layer, layers of different heads
    "gpt_neox",  # a head of another name
    "granitemoe",  # experts of other names
    "gpt_oss",  # sinks, experts stored transposed
    "bloom",  # ALiBi, its own attention
    "deepseek_v2",  # keys and values of different sizes, complex rotation
    "gpt_neo",  # its own attention, windows
    "llama4_text",  # chunks
    "gemma3",  # the text model of a multimodal folder
)
REFUSED = {
    "doge": "DogeAttention makes its own attention mask",
    "bart": "bart counts token positions itself",
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SAME)
def test_same_tokens_and_logits(tmp_path, architecture):
    """Plainly, with n-grams, and with trees with accepted branches; one text and two at a time."""
    found = check(tmp_path, architecture, {})
    assert found.result is Result.SAME, found.note


@pytest.mark.parametrize("architecture", REFUSED)
def test_refused_by_name(tmp_path, architecture):
    found = check(tmp_path, architecture, {})
    assert (found.result, REFUSED[architecture] in found.note) == (Result.REFUSED, True), found.note
