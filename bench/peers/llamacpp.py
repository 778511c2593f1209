"""llama.cpp through llama-cpp-python, with files that llama.cpp itself converts from the checkpoint's GGUF file.

The n-gram modes are `LlamaPromptLookupDecoding`: it drafts the tokens that followed the last two tokens when they first
occurred, or else the last token. llama-cpp-python copies the logits of all verified tokens.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.bench.peers.base import (
    LONG_NGRAM,
    LOOKED_UP,
    NGRAM,
    PLAIN,
    Decoded,
    Peer,
    PeerError,
    PeerModel,
    PeerSource,
)
from redraft.config import Precision
from redraft.export.gguf.file import read_header

LOOKUPS = {
    mode: {"max_ngram_size": 2, "num_pred_tokens": drafted} for mode, drafted in (LOOKED_UP | {NGRAM: 2}).items()
}
"""Its documentation says that two drafted tokens are best on CPUs; the default is 10."""
TYPES: dict[Precision, str] = {"fp32": "ALL_F32", "int8": "MOSTLY_Q8_0", "int4": "MOSTLY_Q4_0"}
"""llama.cpp's 4-bit type whose CPU kernels pack rows of weights together."""
OF_4_BITS = ("2", "3", "14", "15")
"""`general.file_type` of files in Q4_0, Q4_1, Q4_K_S and Q4_K_M, those that bundles are built from too."""
FILE = "model.gguf"
_STEP = 256  # tokens; llama.cpp rounds contexts up to such multiples


class LlamaDecoder:
    """An open file, once for each mode; all share its pages. Flash attention is llama.cpp's own default."""

    modes = (PLAIN, *LOOKUPS)

    def __init__(self, model: PeerModel) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        options: dict[str, Any] = {
            "n_ctx": rounded(model.context + LOOKED_UP[LONG_NGRAM]),
            "n_threads": model.threads,
            "n_threads_batch": model.threads,
            "flash_attn": True,
        }
        if model.precision == "fp32":  # the default is f16
            options |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        path = str(model.path / FILE)
        drafts = {PLAIN: None} | {mode: LlamaPromptLookupDecoding(**lookup) for mode, lookup in LOOKUPS.items()}
        self._llama = {
            mode: llama_cpp.Llama(path, draft_model=draft, verbose=False, **options) for mode, draft in drafts.items()
        }
        file_type = self._llama[PLAIN].metadata.get("general.file_type")
        build = llama_cpp.llama_print_system_info().decode().strip(" |")
        self.settings = {**options, **LOOKUPS, "general.file_type": file_type, "build": build}

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """See `Decoder.decode`. `generate` of llama-cpp-python never ends by itself."""
        tokens: list[int] = []
        start = 0.0
        for token in self._llama[mode].generate(list(token_ids), temp=0.0, repeat_penalty=1.0):
            start = start or time.perf_counter()
            tokens.append(int(token))
            if len(tokens) == count:
                break
        return Decoded(tuple(tokens), time.perf_counter() - start)


def rounded(context: int) -> int:
    """Return the context that llama.cpp makes of one."""
    return -(-context // _STEP) * _STEP


def quantize(source: PeerSource, precision: Precision, folder: Path) -> None:
    """Convert the checkpoint's GGUF file to the type of a precision by `llama_model_quantize`."""
    import llama_cpp

    given = gguf_file(source.checkpoint)
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # it lists every tensor otherwise
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{TYPES[precision]}")
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(str(given).encode(), str(folder / FILE).encode(), ctypes.byref(params))
    if status:
        raise PeerError(f"llama_model_quantize cannot make {TYPES[precision]} of {given} (status {status})")


def link(source: PeerSource, precision: Precision, folder: Path) -> None:
    """Link the checkpoint's GGUF file. Raises PeerError if it is not OF_4_BITS, and the errors of reading it."""
    given = gguf_file(source.checkpoint).resolve()
    found = read_header(given).metadata.get("general.file_type")
    if str(found) not in OF_4_BITS:
        raise PeerError(f"{given} is not in Q4_0, Q4_1, Q4_K_S or Q4_K_M (general.file_type {found})")
    (folder / FILE).symlink_to(given)


def gguf_file(checkpoint: Path) -> Path:
    """Return the only GGUF file of a checkpoint. Raises PeerError if there is none, or more than one."""
    found = sorted(checkpoint.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise PeerError(f"expected one GGUF file in {checkpoint}, found {names}", "leave one there")
    return found[0]


LLAMA = Peer(
    name="llama-cpp-python",
    package="llama-cpp-python",
    module="llama_cpp",
    install="CMAKE_ARGS=-DGGML_NATIVE=ON pip install 'redraft[llama-cpp]'",
    formats={"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"},
    convert=quantize,
    open=LlamaDecoder,
)
