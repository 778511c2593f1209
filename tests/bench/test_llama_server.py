"""llama.cpp's server as a decoder of one prompt, with a stand-in for its library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from tests.little import write_tokenizer

from redraft.bench.peers.base import (
    DRAFT,
    LONG_NGRAM,
    NGRAM,
    PLAIN,
    PeerError,
    PeerModel,
    PeerSource,
    converted,
    open_peer,
)
from redraft.bench.peers.llama_server import LLAMA_DRAFTS, LlamaDrafts
from redraft.bench.peers.llamacpp import FILE

MODES = (PLAIN, NGRAM, LONG_NGRAM)


class FakeServer:
    """Answers with three letters, by what it was opened with."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def handle_completions(self, request: Any, heard: Any) -> None:
        assert (request["ignore_eos"], request["cache_prompt"], request["temperature"]) == (True, False, 0.0)
        if request["prompt"] == [9]:
            heard({"error": {"message": "too long"}})
            return
        written = 2 if request["prompt"] == [8] else request["n_predict"]
        heard({"choices": [{"text": "abc"}], "timings": {"predicted_n": written, "predicted_ms": 250.0}})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and the library."""

    def params() -> SimpleNamespace:
        names = ("ngram_simple", "mparams", "cpuparams", "cpuparams_batch")
        parts = {name: SimpleNamespace() for name in names}
        draft = SimpleNamespace(**{name: SimpleNamespace() for name in names[1:]})
        return SimpleNamespace(
            model=SimpleNamespace(), speculative=SimpleNamespace(draft=draft, types=[], **parts), **parts
        )

    cpp = ModuleType("xllamacpp")
    kinds = ("NGRAM_SIMPLE", "DRAFT_SIMPLE")
    cpp.common_speculative_type = SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{kind}": kind for kind in kinds})
    cpp.CommonParams, cpp.Server, cpp.get_system_info = params, FakeServer, lambda: "CPU : AVX2 = 1 | "
    monkeypatch.setitem(sys.modules, "xllamacpp", cpp)
    monkeypatch.setattr("redraft.bench.peers.base.package_version", lambda name: "1")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_tokenizer(checkpoint)
    write_file(checkpoint / "some.gguf", gguf.LlamaFileType.MOSTLY_Q4_K_M)
    return checkpoint


def write_file(path: Path, file_type: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    writer.add_tensor("one", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_of(folder: Path, draft: Path | None = None) -> PeerModel:
    path = converted(LLAMA_DRAFTS, PeerSource(folder, Path("none")), "int4", folder.parent / "keep")
    return PeerModel(path, "int4", threads=3, context=300, draft=draft)


def test_each_mode_drafts_in_its_own_way(folder: Path) -> None:
    decoder = LlamaDrafts(model_of(folder, draft=Path("small")))
    assert decoder.modes == (*MODES, DRAFT)
    params = {mode: server.params for mode, server in decoder._servers.items()}
    assert params[PLAIN].speculative.types == []
    assert [params[mode].speculative.types for mode in decoder.modes[1:]] == [
        ["NGRAM_SIMPLE"], ["NGRAM_SIMPLE"], ["DRAFT_SIMPLE"]
    ]  # fmt: skip
    lookups = [params[mode].speculative.ngram_simple for mode in MODES[1:]]
    assert [(one.size_n, one.size_m) for one in lookups] == [(3, 4), (3, 12)]
    assert params[DRAFT].speculative.draft.mparams.path == f"small/{FILE}"
    assert {one.n_ctx for one in params.values()} == {512}
    assert {one.speculative.draft.cpuparams.n_threads for one in params.values()} == {3}
    assert LlamaDrafts(model_of(folder)).modes == MODES


def test_answers_are_tokens_of_their_text(folder: Path) -> None:
    decoder = LlamaDrafts(model_of(folder))
    found = decoder.decode(NGRAM, [5], 3)
    assert (found.token_ids, found.seconds) == ((3, 4, 5), 0.25)
    assert decoder.decode(PLAIN, [5], 4).token_ids == (3, 4, 5, -1)
    with pytest.raises(PeerError, match="too long"):
        decoder.decode(PLAIN, [9], 3)
    with pytest.raises(PeerError, match="wrote 2 tokens, not 3"):
        decoder.decode(PLAIN, [8], 3)


def test_the_file_must_be_of_4_bits_with_its_tokenizer_beside_it(folder: Path) -> None:
    assert (model_of(folder).path / FILE).resolve() == folder / "some.gguf"
    write_file(folder / "some.gguf", gguf.LlamaFileType.MOSTLY_F16)
    with pytest.raises(PeerError, match="is not in Q4_0, Q4_1"):
        model_of(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(PeerError, match="has no tokenizer"):
        model_of(folder)


def test_a_draft_model_without_a_file_leaves_the_lookups(folder: Path) -> None:
    """As a student that `redraft train publish` wrote."""
    draft, keep = folder.parent / "student", folder.parent / "keep"
    draft.mkdir()
    asked = PeerModel(Path("none"), "int8", threads=3, context=300)
    found = open_peer(LLAMA_DRAFTS, PeerSource(folder, Path("none"), draft), keep, asked)
    assert tuple(found.modes) == MODES
    write_tokenizer(draft)
    write_file(draft / "small.gguf", gguf.LlamaFileType.MOSTLY_Q4_0)
    assert DRAFT in open_peer(LLAMA_DRAFTS, PeerSource(folder, Path("none"), draft), keep, asked).modes
