"""onnxruntime-genai and transformers themselves: what they decode of the embedded model."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.engines.bundles import build_tiny

from redraft.bench.peers.base import DRAFT, NGRAM, PLAIN, Peer, PeerSource, open_peer
from redraft.bench.peers.genai import GENAI
from redraft.bench.peers.huggingface import HUGGING_FACE
from redraft.bench.peers.worker import Worker
from redraft.runtime import Runtime, SamplingParams

COUNT = 48


@pytest.fixture(scope="module")
def engines(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(root, tmp_path_factory.mktemp("engines") / "tiny", "onnxruntime", "fp32", None).path


@pytest.mark.slow
@pytest.mark.parametrize("peer", [GENAI, HUGGING_FACE], ids=lambda peer: peer.name)
def test_it_writes_our_fp32_text_in_every_mode(root: Path, engines: Path, tmp_path: Path, peer: Peer) -> None:
    """The model is its own draft model."""
    if not peer.installed:
        pytest.skip(peer.install)
    with Runtime.open(engines, threads=2) as runtime:
        prompt = runtime.encode("def first_line(path):\n")
        ours = runtime.generate([prompt], SamplingParams(max_tokens=COUNT, ignore_eos=True), "none")[0].token_ids
    source = PeerSource(root / "assets/tiny", Path("none"), draft=root / "assets/tiny")
    opener = partial(open_peer, peer, source, "fp32", tmp_path, 2, len(prompt) + COUNT)
    with closing(Worker(opener)) as worker:
        assert worker.opened.modes == (PLAIN, NGRAM, DRAFT)
        turns = [worker.decode(mode, prompt, COUNT) for mode in worker.opened.modes]
    assert [turn.decoded.token_ids for turn in turns] == [ours] * 3
    assert all(0 < turn.decoded.seconds < turn.wall_seconds for turn in turns)
