"""llama.cpp's own server, inside this process through xllamacpp: parallel slots, or its own ways to draft.

The drafts continue one prompt at a time, by the checkpoint's GGUF file of 4 bits as it is, next to bundles of 8 and of
4 bits that were built from it. The server sends text, which the checkpoint's tokenizer reads again: an answer whose
tokens are not those of its text counts as different.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from redraft.bench.peers import llamacpp
from redraft.bench.peers.base import (
    DRAFT,
    LOOKED_UP,
    PLAIN,
    Asked,
    Continued,
    Decoded,
    PeerError,
    PeerModel,
    PeerSource,
)
from redraft.bench.peers.llamacpp import FILE, LLAMA, rounded
from redraft.config import Precision
from redraft.names import TOKENIZER_FILE

MATCHED, DRAFTED = 3, 4
"""Tokens of an n-gram, and of a model's draft. llama.cpp's own n-grams of 12 and drafts of 48 tokens are for GPUs."""
ALONE = {"cache_ram_mib": 0, "verbosity": 1}
"""A server keeps no prompts of idle slots, and is quiet."""


def _params(model: PeerModel, options: dict[str, int]) -> Any:
    """Return a server's parameters: the options, and those of every mode."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model.path / FILE)
    if model.precision == "fp32":  # the default is f16
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = model.threads
    _set(params, **ALONE, **options)
    return params


def _set(params: Any, **values: int) -> None:
    for name, value in values.items():
        setattr(params, name, value)


def _settings(model: PeerModel, **own: Any) -> dict[str, Any]:
    import xllamacpp

    return {**ALONE, **own, "n_threads": model.threads, "build": xllamacpp.get_system_info().strip(" |")}


def _request(token_ids: Sequence[int], count: int) -> dict[str, Any]:
    """Return a request for `count` greedy tokens, past end tokens."""
    alone = {"ignore_eos": True, "cache_prompt": False, "temperature": 0.0, "top_k": 1}
    return {"prompt": list(token_ids), "n_predict": count, **alone}


class LlamaServer:
    """llama.cpp's server, called without HTTP. It keeps no prefixes and no prompts of idle slots."""

    modes = (PLAIN,)

    def __init__(self, model: PeerModel) -> None:
        import xllamacpp

        self._clients = model.max_num_seqs
        options = {"n_ctx": rounded(model.context) * model.max_num_seqs, "n_parallel": model.max_num_seqs}
        self._server = xllamacpp.Server(_params(model, options))
        self.settings = _settings(model, **options)

    def decode(self, mode: str, asked: Sequence[Asked]) -> list[Continued]:
        """See `Server.decode`. Each client is a thread."""
        with ThreadPoolExecutor(self._clients) as clients:
            return list(clients.map(self._continue, asked))

    def _continue(self, asked: Asked) -> Continued:
        """Continue one prompt. Raises PeerError with the server's words if it refuses."""
        found, last = Continued(time.perf_counter()), dict[str, Any]()

        def heard(chunk: dict[str, Any]) -> None:
            nonlocal last
            last = chunk
            if "error" not in chunk and chunk["choices"][0]["finish_reason"] is None:
                found.outputs.append(time.perf_counter())

        self._server.handle_completions({**_request(asked.token_ids, asked.count), "stream": True}, heard)
        if "usage" not in last:
            raise PeerError(f"llama.cpp's server answered {last.get('error', last)}")
        found.tokens = last["usage"]["completion_tokens"]
        return found


class LlamaDrafts:
    """An open file, once for each mode."""

    def __init__(self, model: PeerModel) -> None:
        import xllamacpp

        self._tokenizer = Tokenizer.from_file(str(model.path / TOKENIZER_FILE))
        self.modes = (PLAIN, *LOOKED_UP, *((DRAFT,) if model.draft is not None else ()))
        self._servers = {mode: xllamacpp.Server(_drafting(mode, model)) for mode in self.modes}
        self.settings = _settings(model, matched=MATCHED, drafted=LOOKED_UP | {DRAFT: DRAFTED})

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """Continue a prompt greedily by `count` tokens. The time, from the first to the last, is the server's own."""
        answers: list[dict[str, Any]] = []
        self._servers[mode].handle_completions(_request(token_ids, count), answers.append)
        answer = answers[-1] if answers else {}
        if "choices" not in answer:
            raise PeerError(f"llama.cpp's server answered {answer.get('error', answer)}")
        timings = answer["timings"]
        if timings["predicted_n"] != count:
            raise PeerError(f"llama.cpp's server wrote {timings['predicted_n']} tokens, not {count}")
        found = self._tokenizer.encode(answer["choices"][0]["text"], add_special_tokens=False).ids[:count]
        return Decoded((*found, *[-1] * (count - len(found))), timings["predicted_ms"] / 1e3)


def _drafting(mode: str, model: PeerModel) -> Any:
    """Return the parameters of a server that drafts in one of the modes of `LlamaDrafts`."""
    import xllamacpp

    params = _params(model, {"n_ctx": rounded(model.context), "n_parallel": 1})
    drafts, kind = params.speculative, "draft_simple" if mode == DRAFT else "ngram_simple"
    for threads in (drafts.draft.cpuparams, drafts.draft.cpuparams_batch):
        threads.n_threads = model.threads
    if mode == PLAIN:
        return params
    drafts.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
    if mode != DRAFT:
        _set(drafts.ngram_simple, size_n=MATCHED, size_m=LOOKED_UP[mode])
        return params
    assert model.draft is not None
    drafts.draft.mparams.path = str(model.draft / FILE)
    _set(drafts.draft, n_max=DRAFTED)
    return params


def link(source: PeerSource, precision: Precision, folder: Path) -> None:
    """Link the checkpoint's GGUF file and tokenizer. Raises PeerError if one is missing or the file not of 4 bits."""
    tokenizer = source.checkpoint / TOKENIZER_FILE
    if not tokenizer.is_file():
        raise PeerError(f"{source.checkpoint} has no {TOKENIZER_FILE}", "give a folder in Hugging Face's form")
    llamacpp.link(source, precision, folder)
    (folder / TOKENIZER_FILE).symlink_to(tokenizer.resolve())


SLOTS = replace(LLAMA, name="llama-server", package="xllamacpp", module="xllamacpp", open=LlamaServer)
LLAMA_DRAFTS = replace(
    SLOTS,
    name="llama-server-given",
    formats=dict.fromkeys(("int8", "int4"), "the file itself"),
    convert=link,
    open=LlamaDrafts,
    pairs="*.gguf",
)
