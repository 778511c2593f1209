"""OpenVINO GenAI. Each mode has a pipeline of its own, since prompt lookup is an option of opening."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from redraft.bench.peers.base import DRAFT, NGRAM, PLAIN, Decoded, Peer, PeerError, PeerModel, PeerSource, run_tool
from redraft.config import Precision

ASSISTANT: dict[str, dict[str, int]] = {
    PLAIN: {},
    NGRAM: {"num_assistant_tokens": 4, "max_ngram_size": 3},
    DRAFT: {"num_assistant_tokens": 4},
}
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Properties of fp32 models. Without them, OpenVINO computes in bf16 on processors that can."""
OPTIONS: dict[Precision, tuple[str, ...]] = {
    "fp32": ("--weight-format", "fp32"),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "32"),
}
"""Options of its exporter. The default group of 128 needs widths that are multiples of it."""
EXPORTER = (
    "python -m venv V && V/bin/pip install 'optimum-intel[openvino]==2.2.0', then give --optimum-cli V/bin/optimum-cli"
)


class OpenVinoDecoder:
    """An open model: a pipeline for each mode."""

    def __init__(self, model: PeerModel) -> None:
        import openvino_genai

        exact = EXACT if model.precision == "fp32" else {}
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": model.threads, "PERFORMANCE_HINT": "LATENCY", **exact}
        opened = partial(openvino_genai.LLMPipeline, str(model.path), "CPU", **properties)
        self._pipelines = {PLAIN: opened(), NGRAM: opened(prompt_lookup=True)}
        if model.draft is not None:
            draft = openvino_genai.draft_model(str(model.draft), "CPU", **properties)
            self._pipelines[DRAFT] = opened(draft_model=draft)
        self.modes = tuple(self._pipelines)
        self.settings = properties | {mode: ASSISTANT[mode] for mode in self.modes[1:]}

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """See `Decoder.decode`. OpenVINO times the first token."""
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig(
            max_new_tokens=count, do_sample=False, ignore_eos=True, apply_chat_template=False, **ASSISTANT[mode]
        )
        tokens = openvino.Tensor(np.array([token_ids], np.int64))
        inputs = openvino_genai.TokenizedInputs(tokens, openvino.Tensor(np.ones((1, len(token_ids)), np.int64)))
        start = time.perf_counter()
        done = self._pipelines[mode].generate(inputs, config)
        seconds = time.perf_counter() - start - done.perf_metrics.get_ttft().mean / 1e3
        return Decoded(tuple(map(int, done.tokens[0])), seconds)


def convert(source: PeerSource, precision: Precision, folder: Path) -> None:
    """Run `optimum-cli export openvino`. Raises PeerError without that program."""
    if shutil.which(source.optimum_cli) is None:
        raise PeerError(f"no exporter {source.optimum_cli}", f"run {EXPORTER}")
    task = ("--model", source.checkpoint, "--task", "text-generation-with-past")
    run_tool([source.optimum_cli, "export", "openvino", *task, *OPTIONS[precision], folder])


OPENVINO = Peer(
    name="openvino-genai",
    package="openvino-genai",
    module="openvino_genai",
    install="pip install 'redraft[openvino]'",
    formats={precision: " ".join(options) for precision, options in OPTIONS.items()},
    convert=convert,
    open=OpenVinoDecoder,
    pairs=True,
)
