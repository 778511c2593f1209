"""One decoder in a process of its own, for `experiments.real_models`. A peer's Python, which may lack redraft, runs it.

python real_models_worker.py LIBRARY PATH < WORK.json       prints a JSON object
python real_models_worker.py quantize FILE.gguf OUT.gguf    writes llama.cpp's Q8_0 of a file
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Decode = Callable[[list[int], int], tuple[float, float]]
"""Decodes so many tokens after a prompt, and returns the seconds to the first one and those to the last."""
CURVE = (1, 2, 4, 8)


def redraft(path: str, work: dict[str, Any]) -> tuple[Decode, Callable[[], dict[str, Any]]]:
    """Plain decoding, and the milliseconds of verifications by nodes."""
    from redraft.runtime import Runtime, SamplingParams
    from redraft.runtime.steps import measurements

    runtime = Runtime.open(path, threads=work["threads"])

    def decode(ids: list[int], count: int) -> tuple[float, float]:
        start = time.perf_counter()
        metrics = runtime.generate([ids], SamplingParams(max_tokens=count, ignore_eos=True), "none")[0].metrics
        return metrics.time_to_first_token_ms / 1e3, time.perf_counter() - start

    def more() -> dict[str, Any]:
        curve = measurements.measure_curve(runtime.verifier, CURVE, 3.0).table_ms
        return {"costs": {str(size): curve[size] for size in CURVE}}

    return decode, more


def llama(path: str, work: dict[str, Any]) -> tuple[Decode, Callable[[], dict[str, Any]]]:
    """llama.cpp with its flash attention, in a context that holds the text."""
    import llama_cpp

    threads, longest = work["threads"], max(map(len, work["prompts"])) + work["new_tokens"]
    model = llama_cpp.Llama(
        path, n_ctx=-(-longest // 256) * 256, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )

    def decode(ids: list[int], count: int) -> tuple[float, float]:
        model.reset()
        start, first = time.perf_counter(), 0.0
        for made, _ in enumerate(model.generate(list(ids), temp=0.0, repeat_penalty=1.0), 1):
            first = first or time.perf_counter() - start
            if made == count:
                break
        return first, time.perf_counter() - start

    return decode, dict


def openvino(path: str, work: dict[str, Any]) -> tuple[Decode, Callable[[], dict[str, Any]]]:
    """OpenVINO GenAI with its latency hint."""
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(
        path, "CPU", INFERENCE_NUM_THREADS=work["threads"], PERFORMANCE_HINT="LATENCY"
    )

    def decode(ids: list[int], count: int) -> tuple[float, float]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=count, do_sample=False, ignore_eos=True, apply_chat_template=False
        )
        mask = openvino.Tensor(np.ones((1, len(ids)), np.int64))
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(np.array([ids], np.int64)), mask)
        start = time.perf_counter()
        done = pipeline.generate(inputs, config)
        return done.perf_metrics.get_ttft().mean / 1e3, time.perf_counter() - start

    return decode, dict


def quantize(file: str, out: str) -> None:
    """Write llama.cpp's Q8_0 of a file."""
    import ctypes

    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
    if llama_cpp.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp cannot make Q8_0 of {file}")


def resident_bytes() -> int:
    """Return this process's share of the memory."""
    with open("/proc/self/smaps_rollup") as rollup:
        (found,) = (line.split()[1] for line in rollup if line.startswith("Pss:"))
    return int(found) * 1024


def main(library: str, path: str) -> None:
    """Open, decode every prompt once to warm up and once to measure, and print the medians."""
    from importlib import import_module
    from importlib.metadata import version
    from statistics import median

    work = json.load(sys.stdin)
    module = {"redraft": "redraft.runtime", "llama-cpp-python": "llama_cpp", "openvino-genai": "openvino_genai"}
    import_module(module[library])  # so that opening leaves out imports
    start = time.perf_counter()
    opened = {"redraft": redraft, "llama-cpp-python": llama, "openvino-genai": openvino}[library]
    decode, more = opened(path, work)
    opening = time.perf_counter() - start
    decode(work["prompts"][0], 4)
    times = [decode(ids, work["new_tokens"]) for ids in work["prompts"]]
    resident = resident_bytes()
    found = {
        "version": version(library),
        "opening_s": opening,
        "prompt_ms": median(first for first, _ in times) * 1e3,
        "token_ms": median((last - first) / (work["new_tokens"] - 1) for first, last in times) * 1e3,
        "resident_bytes": resident,
        **more(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    quantize(*sys.argv[2:]) if sys.argv[1] == "quantize" else main(*sys.argv[1:])
