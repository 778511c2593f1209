"""onnxruntime-genai itself: its builder and its decoding of the embedded model."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from redraft.bench.peers.base import NGRAM, PLAIN, Source
from redraft.bench.peers.genai import GENAI
from redraft.bench.peers.models import open_peer
from redraft.bench.peers.worker import Worker
from redraft.runtime import Runtime, SamplingParams

COUNT = 48


@pytest.mark.slow
@pytest.mark.skipif(not GENAI.installed, reason=GENAI.install)
def test_it_writes_our_fp32_text_in_both_modes(
    root: Path, redraft: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    tiny, engines = root / "assets/tiny", tmp_path / "engines"
    assert redraft("build", tiny, "-o", engines, "--eval-text", "none").returncode == 0
    with Runtime.open(engines, threads=2) as runtime:
        prompt = runtime.encode("def first_line(path):\n")
        ours = runtime.generate([prompt], SamplingParams(max_tokens=COUNT, ignore_eos=True), "none")[0].token_ids
    opener = partial(open_peer, GENAI, Source(tiny, Path("none")), "fp32", tmp_path, 2, len(prompt) + COUNT)
    with closing(Worker(opener)) as worker:
        turns = [worker.decode(mode, prompt, COUNT) for mode in (PLAIN, NGRAM)]
    assert [turn.decoded.token_ids for turn in turns] == [ours, ours]
    assert all(0 < turn.decoded.seconds < turn.wall_seconds for turn in turns)
