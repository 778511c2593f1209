"""The configuration of onnxruntime-genai's converted models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redraft.bench.peers import genai
from redraft.bench.peers.base import PeerSource


def test_no_token_that_a_text_has_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several end tokens, as Qwen's models have, are replaced by the vocabulary's last one."""
    config = tmp_path / genai.CONFIG
    written = {"model": {"eos_token_id": [2, 3], "vocab_size": 9, "bos_token_id": 1}}
    monkeypatch.setattr(genai, "run_tool", lambda command: config.write_text(json.dumps(written)))
    genai.convert(PeerSource(tmp_path, Path("none")), "int8", tmp_path)
    assert json.loads(config.read_text())["model"] == {"eos_token_id": 8, "vocab_size": 9, "bos_token_id": 1}
