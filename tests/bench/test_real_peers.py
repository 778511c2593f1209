"""onnxruntime-genai and transformers themselves: they decode the same text of the embedded model in every mode."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from redraft.bench.peers.base import DRAFT, LOOKED_UP, PLAIN, PeerModel, PeerSource, open_peer
from redraft.bench.peers.genai import GENAI
from redraft.bench.peers.huggingface import HUGGING_FACE
from redraft.bench.peers.worker import Worker

COUNT = 48


@pytest.mark.slow
def test_libraries_write_the_same_fp32_text_in_every_mode(root: Path, tmp_path: Path) -> None:
    """The model is its own draft model, which is converted once. onnxruntime-genai has a process of its own.

    transformers decodes in this one, so it gets the threads that torch has here, and a checkpoint with a penalty.
    """
    if not GENAI.installed:
        pytest.skip(GENAI.install)
    prompt = Tokenizer.from_file(str(root / "assets/tiny/tokenizer.json")).encode("def first_line(path):\n").ids
    source = PeerSource(root / "assets/tiny", Path("none"), draft=root / "assets/tiny")
    (tmp_path / "draft").symlink_to(tmp_path)
    texts = []
    model = PeerModel(tmp_path, "fp32", threads=2, context=len(prompt) + COUNT)
    with closing(Worker(partial(open_peer, GENAI, source, tmp_path, model))) as worker:
        assert worker.modes == (PLAIN, *LOOKED_UP, DRAFT)
        for mode in worker.modes:
            turn = worker.decode(mode, prompt, COUNT)
            assert 0 < turn.decoded.seconds < turn.wall_seconds
            texts.append(turn.decoded.token_ids)
    penalized = tmp_path / "penalized"
    shutil.copytree(source.checkpoint, penalized, ignore=lambda folder, names: [n for n in names if "." not in n])
    own = {"repetition_penalty": 2.0, "eos_token_id": prompt[0]}
    (penalized / "generation_config.json").write_text(json.dumps(own))
    source = replace(source, checkpoint=penalized)
    decoder = open_peer(HUGGING_FACE, source, tmp_path, replace(model, threads=torch.get_num_threads()))
    assert decoder.modes == (PLAIN, *LOOKED_UP, DRAFT)
    texts += [decoder.decode(mode, prompt, COUNT).token_ids for mode in decoder.modes]
    assert texts == [texts[0]] * 8
    assert len(texts[0]) == COUNT
