"""OpenVINO GenAI, one prompt at a time and with continuous batching.

One at a time, each mode has a pipeline of its own, since prompt lookup is an option of opening.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from redraft.bench.peers.base import (
    DRAFT,
    LOOKED_UP,
    PLAIN,
    Asked,
    Continued,
    Decoded,
    Peer,
    PeerError,
    PeerModel,
    PeerSource,
    run_tool,
)
from redraft.config import Precision

ASSISTANT: dict[str, dict[str, int]] = {
    PLAIN: {},
    **{mode: {"num_assistant_tokens": drafted, "max_ngram_size": 3} for mode, drafted in LOOKED_UP.items()},
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
    """An open model: a pipeline without drafts, one of lookups, and one with a draft model."""

    def __init__(self, model: PeerModel) -> None:
        import openvino_genai

        properties = _properties(model)
        opened = partial(openvino_genai.LLMPipeline, str(model.path), "CPU", **properties)
        self._pipelines = {PLAIN: opened()} | dict.fromkeys(LOOKED_UP, opened(prompt_lookup=True))
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

        config = _generation(count, mode)
        mask = openvino.Tensor(np.ones((1, len(token_ids)), np.int64))
        inputs = openvino_genai.TokenizedInputs(_tensor(token_ids), mask)
        start = time.perf_counter()
        done = self._pipelines[mode].generate(inputs, config)
        seconds = time.perf_counter() - start - done.perf_metrics.get_ttft().mean / 1e3
        return Decoded(tuple(map(int, done.tokens[0])), seconds)


class OpenVinoServer:
    """A pipeline with continuous batching. It does not keep prefixes, so that a prompt's later turns cost as much."""

    modes = (PLAIN,)

    def __init__(self, model: PeerModel) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = self._clients = model.max_num_seqs
        scheduler.enable_prefix_caching = False
        properties = _properties(model)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(model.path), scheduler, "CPU", properties)
        self.settings = {**properties, "max_num_batched_tokens": scheduler.max_num_batched_tokens}

    def decode(self, mode: str, asked: Sequence[Asked]) -> list[Continued]:
        """See `Server.decode`. Tokens come after each step."""
        from openvino_genai import GenerationStatus

        waiting, running, found = iter(asked), list[tuple[Continued, Any]](), list[Continued]()
        while True:
            for one in islice(waiting, self._clients - len(running)):
                found.append(Continued(time.perf_counter()))
                config = _generation(one.count, mode)
                running.append((found[-1], self._pipeline.add_request(len(found), _tensor(one.token_ids), config)))
            if not running:
                return found
            self._pipeline.step()
            now = time.perf_counter()
            for served, handle in running:
                if handle.can_read():
                    (output,) = handle.read().values()
                    served.tokens += len(output.generated_ids)
                    served.outputs.append(now)
            running = [pair for pair in running if pair[1].get_status() == GenerationStatus.RUNNING]


def _properties(model: PeerModel) -> dict[str, Any]:
    exact = EXACT if model.precision == "fp32" else {}
    return {"INFERENCE_NUM_THREADS": model.threads, "PERFORMANCE_HINT": "LATENCY", **exact}


def _generation(count: int, mode: str) -> Any:
    from openvino_genai import GenerationConfig

    return GenerationConfig(
        max_new_tokens=count, do_sample=False, ignore_eos=True, apply_chat_template=False, **ASSISTANT[mode]
    )


def _tensor(token_ids: Sequence[int]) -> Any:
    import numpy as np
    import openvino

    return openvino.Tensor(np.array([token_ids], np.int64))


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
    pairs="config.json",
)
OPENVINO_SERVER = replace(OPENVINO, open=OpenVinoServer, pairs="")
