"""onnxruntime-genai, which generates token by token as its own examples do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from redraft.bench.peers.base import NGRAM, PLAIN, Decoded, Model, Peer, Source
from redraft.bench.peers.models import run_tool
from redraft.config import Precision

SPECULATIVE: dict[str, dict[str, int]] = {PLAIN: {}, NGRAM: {"ngram_size": 3, "max_draft_tokens": 4}}
"""Its options by mode. It looks up a suffix one token shorter than `ngram_size`."""


class GenaiDecoder:
    """An open model. Its end token becomes the vocabulary's last token, so that text continues past its end."""

    modes = (PLAIN, NGRAM)

    def __init__(self, model: Model) -> None:
        import onnxruntime_genai as genai

        session = {"intra_op_num_threads": model.threads}
        found = json.loads((model.path / "genai_config.json").read_text())["model"]
        last = found["vocab_size"] - 1
        end = [last] if isinstance(found["eos_token_id"], list) else last  # a list does not replace a number
        config = genai.Config(str(model.path))
        config.overlay(json.dumps({"model": {"eos_token_id": end, "decoder": {"session_options": session}}}))
        self._genai, self._model = genai, genai.Model(config)
        self.settings = {"session_options": session, NGRAM: SPECULATIVE[NGRAM]}

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """See `Decoder.decode`."""
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=len(token_ids) + count, do_sample=False)
        if options := SPECULATIVE[mode]:
            params.set_speculative_options(**options)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(list(token_ids))
        generator.generate_next_token()
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return Decoded(tuple(map(int, generator.get_sequence(0)[len(token_ids) :])), seconds)


def convert(source: Source, precision: Precision, folder: Path) -> None:
    """Run its model builder, whose defaults for CPUs are blocks of 32 and accuracy level 4."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", precision]
    run_tool([*builder, "-i", source.checkpoint, "-o", folder, "-c", folder / "cache"])


GENAI = Peer(
    name="onnxruntime-genai",
    package="onnxruntime-genai",
    module="onnxruntime_genai",
    install="pip install 'redraft[bench,export]'",
    formats={"fp32": "builder -p fp32", "int8": "builder -p int8", "int4": "builder -p int4"},
    convert=convert,
    open=GenaiDecoder,
)
