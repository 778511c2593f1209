"""llama.cpp's server with its own ways to draft, one prompt at a time, inside this process through xllamacpp.

It reads the checkpoint's GGUF file of 4 bits as it is, next to bundles of 8 and of 4 bits that were built from it. The
server sends text, which the checkpoint's tokenizer reads again: an answer whose tokens are not those of its text counts
as different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from redraft.bench.peers.base import DRAFT, NGRAM, PLAIN, Decoded, PeerError, PeerModel, PeerSource
from redraft.bench.peers.llamacpp import FILE, SLOTS, check_4_bits, gguf_file, rounded
from redraft.config import Precision
from redraft.export.gguf.file import read_header
from redraft.names import TOKENIZER_FILE

MATCHED, DRAFTED = 3, 4
"""Tokens of an n-gram, and of a draft. llama.cpp's defaults, 12 and 48, are for GPUs."""
KINDS = {NGRAM: "ngram_simple", "ngram map": "ngram_map_k"}
"""llama.cpp's names of its lookups: in the text, and in a map of its n-grams. Its n-gram cache keeps those of earlier
prompts, so it is left out."""


class LlamaDrafts:
    """An open file, once for each mode."""

    def __init__(self, model: PeerModel) -> None:
        import xllamacpp

        self._cpp = xllamacpp
        self._tokenizer = Tokenizer.from_file(str(model.path / TOKENIZER_FILE))
        self.modes = (PLAIN, *KINDS, *((DRAFT,) if model.draft is not None else ()))
        self._servers = {mode: xllamacpp.Server(self._params(mode, model)) for mode in self.modes}
        build = xllamacpp.get_system_info().strip(" |")
        self.settings = {"n_threads": model.threads, "matched": MATCHED, "drafted": DRAFTED, "build": build}

    def _params(self, mode: str, model: PeerModel) -> Any:
        params = self._cpp.CommonParams()
        params.model.path = str(model.path / FILE)
        _set(params, n_ctx=rounded(model.context), n_parallel=1, cache_ram_mib=0, verbosity=1)
        drafts = params.speculative
        for threads in (params.cpuparams, params.cpuparams_batch, drafts.draft.cpuparams, drafts.draft.cpuparams_batch):
            threads.n_threads = model.threads
        if mode == PLAIN:
            return params
        kind = KINDS.get(mode, "draft_simple")
        drafts.types = [getattr(self._cpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
        if mode == DRAFT:
            assert model.draft is not None
            drafts.draft.mparams.path = str(model.draft / FILE)
            _set(drafts.draft, n_max=DRAFTED)
        else:
            _set(getattr(drafts, kind), size_n=MATCHED, size_m=DRAFTED)
        return params

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """Continue a prompt greedily by `count` tokens. The time, from the first to the last, is the server's own."""
        request = {"prompt": list(token_ids), "n_predict": count, "ignore_eos": True, "cache_prompt": False}
        answers: list[dict[str, Any]] = []
        self._servers[mode].handle_completions({**request, "temperature": 0.0, "top_k": 1}, answers.append)
        answer = answers[-1] if answers else {}
        if "choices" not in answer:
            raise PeerError(f"llama.cpp's server answered {answer.get('error', answer)}")
        timings = answer["timings"]
        if timings["predicted_n"] != count:
            raise PeerError(f"llama.cpp's server wrote {timings['predicted_n']} tokens, not {count}")
        found = self._tokenizer.encode(answer["choices"][0]["text"], add_special_tokens=False).ids[:count]
        return Decoded((*found, *[-1] * (count - len(found))), timings["predicted_ms"] / 1e3)


def _set(params: Any, **values: int) -> None:
    for name, value in values.items():
        setattr(params, name, value)


def link(source: PeerSource, precision: Precision, folder: Path) -> None:
    """Link the checkpoint's GGUF file and tokenizer. Raises PeerError if one is missing or the file not of 4 bits."""
    tokenizer = source.checkpoint / TOKENIZER_FILE
    if not tokenizer.is_file():
        raise PeerError(f"{source.checkpoint} has no {TOKENIZER_FILE}", "give a folder in Hugging Face's form")
    given = gguf_file(source.checkpoint).resolve()
    check_4_bits(given, read_header(given).metadata.get("general.file_type"))
    (folder / FILE).symlink_to(given)
    (folder / TOKENIZER_FILE).symlink_to(tokenizer.resolve())


LLAMA_DRAFTS = replace(
    SLOTS,
    name="llama-server-given",
    formats=dict.fromkeys(("int8", "int4"), "the file itself"),
    convert=link,
    open=LlamaDrafts,
    pairs="*.gguf",
)
