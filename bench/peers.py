"""Greedy decoding of the same checkpoint and prompts by redraft and by onnxruntime-genai, taking turns in one process.

    python -m redraft.bench.peers --engines build/engines/tiny --checkpoint assets/tiny \\
        --prompts assets/tiny/prompts/*.jsonl --limit 10

Compares plain and n-gram decoding of both, and our drafter with their n-grams. A rate is new tokens after the first
over the time from the first to the last, on both sides. The texts are compared too. With `--openvino DIR`, a checkpoint
that `optimum-cli export openvino` wrote in fp32, openvino-genai takes its turn as well, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redraft.bench.command import bundle_parser, run
from redraft.bench.environment import SETTLE_SECONDS, environment
from redraft.bench.prompts import Prompt, load_prompts
from redraft.bench.statistics import first_difference, median_estimate
from redraft.errors import UsageError
from redraft.runtime import Runtime, SamplingParams

NGRAM = {"ngram_size": 3, "max_draft_tokens": 4}
"""onnxruntime-genai's options: it looks up a suffix one token shorter than `ngram_size`."""
OPENVINO_NGRAM = {"num_assistant_tokens": 4, "max_ngram_size": 3}
SHORTEST = 8
PEERS = ("genai", "openvino")

Decoded = tuple[list[int], float]
"""New tokens, and tokens a second after the first."""
Decode = Callable[[list[int]], Decoded]


def main() -> dict[str, Any]:
    """Take the measurements that the options ask for."""
    options = _arguments()
    if find_spec("onnxruntime_genai") is None:
        raise UsageError("onnxruntime-genai is not installed", "run `pip install 'redraft[bench]'`")
    prompts = load_prompts(options.prompts, options.limit)
    with genai_model(options) as folder, Runtime.open(options.engines, threads=options.threads) as runtime:
        decoders = {**redraft_decoders(runtime, options), **genai_decoders(folder, options)}
        decoders |= openvino_decoders(options) if options.openvino else {}
        results = measure(decoders, prompts, runtime)
    return {
        "environment": environment(options.threads),
        "genai_ngram_options": NGRAM,
        "openvino_genai": "measured" if options.openvino else "not measured: no --openvino",
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "tokens_per_second": {name: _median_rate(results, name) for name in decoders},
        "ratios": {" / ".join(pair): _ratio(results, pair, prompts) for pair in pairs(results)},
        "first_differences": _differences(results, prompts),
    }


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs to compare: plain decoding with plain decoding, all else with n-gram lookup."""
    ours = [name for name in names if name.startswith("redraft ")]
    wanted = [(name, f"{peer} {'none' if name == 'redraft none' else 'ngram'}") for peer in PEERS for name in ours]
    return [pair for pair in wanted if pair[1] in names]


def measure(decoders: dict[str, Decode], prompts: Sequence[Prompt], runtime: Runtime) -> dict[str, list[Decoded]]:
    """Decode every prompt by every decoder, in an order that flips each time, after a warm-up on the first."""
    results: dict[str, list[Decoded]] = {name: [] for name in decoders}
    encoded = [runtime.encode(prompt.text) for prompt in prompts]
    for decode in decoders.values():
        decode(encoded[0])
    for index, ids in enumerate(encoded):
        for name in sorted(decoders, reverse=bool(index % 2)):
            time.sleep(SETTLE_SECONDS)
            results[name].append(decoders[name](ids))
    return results


def redraft_decoders(runtime: Runtime, options: argparse.Namespace) -> dict[str, Decode]:
    """Return our decoders: plain, n-gram, and the bundle's own drafter."""
    params = SamplingParams(max_tokens=options.max_new_tokens)

    def decoder(method: str) -> Decode:
        def decode(ids: list[int]) -> Decoded:
            start = time.perf_counter()
            done = runtime.generate([ids], params, method)[0]
            seconds = time.perf_counter() - start - done.metrics.time_to_first_token_ms / 1e3
            return list(done.token_ids), (len(done.token_ids) - 1) / seconds

        return decode

    return {f"redraft {method}": decoder(method) for method in dict.fromkeys(("none", "ngram", runtime.default_method))}


def genai_decoders(folder: Path, options: argparse.Namespace) -> dict[str, Decode]:
    """Return their decoders, token by token, as their own examples decode."""
    import onnxruntime_genai as genai

    model = genai.Model(str(folder))

    def decoder(speculative: dict[str, int]) -> Decode:
        def decode(ids: list[int]) -> Decoded:
            params = genai.GeneratorParams(model)
            params.set_search_options(max_length=len(ids) + options.max_new_tokens, do_sample=False)
            if speculative:
                params.set_speculative_options(**speculative)
            generator = genai.Generator(model, params)
            generator.append_tokens(ids)
            generator.generate_next_token()
            start = time.perf_counter()
            while not generator.is_done():
                generator.generate_next_token()
            seconds = time.perf_counter() - start
            written = [int(token) for token in generator.get_sequence(0)[len(ids) :]]
            return written, (len(written) - 1) / seconds if seconds > 0 else 0.0

        return decode

    return {"genai none": decoder({}), "genai ngram": decoder(NGRAM)}


def openvino_decoders(options: argparse.Namespace) -> dict[str, Decode]:
    """Return OpenVINO's decoders, in fp32 with an fp32 cache and our threads; they time the first token."""
    if find_spec("openvino_genai") is None:
        raise UsageError("openvino-genai is not installed", "run `pip install openvino-genai`, or leave --openvino out")
    import numpy as np
    import openvino
    import openvino_genai

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    settings = {**exact, "INFERENCE_NUM_THREADS": options.threads, "PERFORMANCE_HINT": "LATENCY"}

    def decoder(pipeline: Any, lookup: dict[str, int]) -> Decode:
        def decode(ids: list[int]) -> Decoded:
            config = openvino_genai.GenerationConfig(
                max_new_tokens=options.max_new_tokens, do_sample=False, apply_chat_template=False, **lookup
            )
            tokens = openvino.Tensor(np.array([ids], np.int64))
            inputs = openvino_genai.TokenizedInputs(tokens, openvino.Tensor(np.ones((1, len(ids)), np.int64)))
            start = time.perf_counter()
            done = pipeline.generate(inputs, config)
            seconds = time.perf_counter() - start - done.perf_metrics.get_ttft().mean / 1e3
            return list(done.tokens[0]), (len(done.tokens[0]) - 1) / seconds

        return decode

    folder = str(options.openvino)
    plain = openvino_genai.LLMPipeline(folder, "CPU", **settings)
    lookup = openvino_genai.LLMPipeline(folder, "CPU", prompt_lookup=True, **settings)
    return {"openvino none": decoder(plain, {}), "openvino ngram": decoder(lookup, OPENVINO_NGRAM)}


@contextmanager
def genai_model(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the checkpoint as their own model builder writes it in fp32, with our number of threads."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / "genai_config.json").exists():
            command = [
                "onnxruntime_genai.models.builder",
                "-i",
                options.checkpoint,
                "-o",
                folder,
                "-p",
                "fp32",
                "-e",
                "cpu",
            ]
            built = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True)
            if built.returncode:
                reason = next(reversed(built.stderr.strip().splitlines()), "no reason given")
                raise UsageError(f"onnxruntime-genai cannot build {options.checkpoint}: {reason}")
        config = json.loads((folder / "genai_config.json").read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = options.threads
        (folder / "genai_config.json").write_text(json.dumps(config))
        yield folder


def _median_rate(results: dict[str, list[Decoded]], name: str) -> float:
    return median_estimate([rate for tokens, rate in results[name] if len(tokens) >= SHORTEST]).median


def _ratio(results: dict[str, list[Decoded]], pair: tuple[str, str], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return our rate over theirs by prompt: the median with its interval, over all prompts and by kind."""
    rows = list(zip(prompts, *(results[name] for name in pair), strict=True))
    long = [(prompt.kind, a[1] / b[1]) for prompt, a, b in rows if min(len(a[0]), len(b[0])) >= SHORTEST]
    kinds = sorted({kind for kind, _ in long})
    values = {"all": [ratio for _, ratio in long], **{k: [ratio for kind, ratio in long if kind == k] for k in kinds}}
    return {name: vars(median_estimate(ratios)) for name, ratios in values.items()}


def _differences(results: dict[str, list[Decoded]], prompts: Sequence[Prompt]) -> dict[str, list[dict[str, Any]]]:
    """Return the places at which each decoder's tokens differ from those of our plain decoding."""
    plain = [tokens for tokens, _ in results["redraft none"]]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, decoded in results.items():
        places = [first_difference(a, b) for a, (b, _) in zip(plain, decoded, strict=True)]
        pairs = zip(prompts, places, strict=True)
        found[name] = [{"prompt": prompt.id, "token": place} for prompt, place in pairs if place is not None]
    return found


def _arguments() -> argparse.Namespace:
    parser = bundle_parser(__doc__, 128)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint that it was built from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--openvino", type=Path, help="the checkpoint as OpenVINO's exporter writes it")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the peer's model for the next run")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
