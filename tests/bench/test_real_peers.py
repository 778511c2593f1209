"""onnxruntime-genai and transformers themselves: they decode the same text of the embedded model in every mode."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from redraft.bench.peers.base import DRAFT, NGRAM, PLAIN, PeerModel, PeerSource, open_peer
from redraft.bench.peers.genai import GENAI
from redraft.bench.peers.huggingface import HUGGING_FACE
from redraft.bench.peers.worker import Worker

COUNT = 48


@pytest.mark.slow
def test_libraries_write_the_same_fp32_text_in_every_mode(root: Path, tmp_path: Path) -> None:
    """The model is its own draft model, which is converted once. onnxruntime-genai has a process of its own.

    transformers decodes in this one, so it gets the threads that torch has here.
    """
    if not GENAI.installed:
        pytest.skip(GENAI.install)
    prompt = Tokenizer.from_file(str(root / "assets/tiny/tokenizer.json")).encode("def first_line(path):\n").ids
    source = PeerSource(root / "assets/tiny", Path("none"), draft=root / "assets/tiny")
    (tmp_path / "draft").symlink_to(tmp_path)
    texts = []
    model = PeerModel(tmp_path, "fp32", threads=2, context=len(prompt) + COUNT)
    with closing(Worker(partial(open_peer, GENAI, source, tmp_path, model))) as worker:
        assert worker.modes == (PLAIN, NGRAM, DRAFT)
        for mode in worker.modes:
            turn = worker.decode(mode, prompt, COUNT)
            assert 0 < turn.decoded.seconds < turn.wall_seconds
            texts.append(turn.decoded.token_ids)
    decoder = open_peer(HUGGING_FACE, source, tmp_path, replace(model, threads=torch.get_num_threads()))
    assert decoder.modes == (PLAIN, NGRAM, DRAFT)
    texts += [decoder.decode(mode, prompt, COUNT).token_ids for mode in decoder.modes]
    assert texts == [texts[0]] * 6
    assert len(texts[0]) == COUNT
