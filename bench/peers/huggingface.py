"""transformers, with its own generation loop. It can only be measured in fp32: its 8-bit modes are for GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from redraft.bench.peers.base import DRAFT, LOOKED_UP, PLAIN, Decoded, Peer, PeerModel, PeerSource
from redraft.config import Precision

LINK = "checkpoint"
LOOKUPS = {
    mode: {"prompt_lookup_num_tokens": drafted, "max_matching_ngram_size": 3} for mode, drafted in LOOKED_UP.items()
}


class HuggingFaceDecoder:
    """An open checkpoint. Drafts by a second model have the library's defaults: a length that a confidence ends."""

    def __init__(self, model: PeerModel) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(model.threads)

        def opened(folder: Any) -> Any:
            found = AutoModelForCausalLM.from_pretrained(str(folder / LINK), dtype=torch.float32).eval()
            found.generation_config = GenerationConfig()  # the checkpoint's may have penalties, and end tokens
            return found

        self._model = opened(model.path)
        self._options: dict[str, dict[str, Any]] = {PLAIN: {}, **LOOKUPS}
        self.settings: dict[str, Any] = {"threads": model.threads, **LOOKUPS}
        if model.draft is not None:
            self._options[DRAFT] = {"assistant_model": opened(model.draft)}
            self.settings[DRAFT] = "the library's defaults"
        self.modes = tuple(self._options)

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """See `Decoder.decode`. The first tokens may come together; their time is that of the rest in proportion."""
        import torch

        ids = torch.tensor([list(token_ids)])
        watch = Watch()
        done = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
            streamer=watch, **self._options[mode],
        )  # fmt: skip
        rest = max(count - watch.first, 1)
        seconds = (time.perf_counter() - watch.since) * (count - 1) / rest
        return Decoded(tuple(done[0, len(token_ids) :].tolist()), seconds)


class Watch:
    """A streamer that notes when the first new tokens came, and how many they were."""

    def __init__(self) -> None:
        self.since, self.first = 0.0, 0
        self._calls = 0

    def put(self, tokens: Any) -> None:
        """Take the prompt, then new tokens."""
        self._calls += 1
        if self._calls == 2:
            self.since, self.first = time.perf_counter(), tokens.numel()

    def end(self) -> None:
        """Do nothing."""


def link(source: PeerSource, precision: Precision, folder: Any) -> None:
    """Link the checkpoint."""
    (folder / LINK).symlink_to(source.checkpoint.resolve())


HUGGING_FACE = Peer(
    name="transformers",
    package="transformers",
    module="transformers",
    install="pip install 'redraft[export]'",
    formats={"fp32": "the checkpoint"},
    convert=link,
    open=HuggingFaceDecoder,
    pairs="config.json",
)
