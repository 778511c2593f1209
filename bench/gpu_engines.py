"""A bundle's engines on a device: the same tokens as on the host, what they cost, and how near they come to the memory.

    python -m redraft.bench.gpu_engines --engines build/engines/tiny --prompts assets/tiny/prompts/code.jsonl \\
        [--device cuda] [--synthetic-acceptance 0.9,0.8,0.7] [--out build/gpu/engines.json]

Sections of the one JSON object: `tokens`, every method on the device against plain decoding on the host (not for random
weights, whose logits say nothing); `curve`, milliseconds by nodes verified at once; `plain`, the bytes of one token
over its time, beside the device's copy; `stages`, where the time of a run's steps goes; `bound`, speculation with
forced acceptance against what the curve allows. What cannot be measured says why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redraft import names
from redraft.bench.bound import achieved
from redraft.bench.command import budget, rates, run
from redraft.bench.compare import PLAIN, Settings, compare
from redraft.bench.environment import environment, execution_providers
from redraft.bench.gpu_device import copy_bytes_per_second, device_environment, missing_device
from redraft.bench.prompts import Prompt, load_prompts
from redraft.bench.roofline import traffic
from redraft.bench.stages import profile
from redraft.bench.statistics import first_difference
from redraft.config import Backend
from redraft.engines import open_bundle
from redraft.engines.manifest import Manifest
from redraft.engines.tensorrt.driver import find_gpu
from redraft.errors import BackendError, RedraftError, UsageError
from redraft.runtime import Budget, Runtime, SamplingParams
from redraft.runtime.cost import measure_curve
from redraft.runtime.watchers import Recording

SIZES = (1, 2, 4, 8, 13, 16, 32, 64)
LIVE = 256
_FORCED = (0.9, 0.8, 0.7)
_TENSORRT_PACKAGES = ("tensorrt", "polygraphy", "cuda.bindings")
"""What builds engines and runs them."""


def main() -> dict[str, Any]:
    """Measure what the options ask for, and write it where `--out` says."""
    options = _arguments()
    reason = missing_device() if options.device == "cuda" else None
    found = {"skipped": reason} if reason else measure(options)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All sections, or why nothing runs the engines here."""
    manifest = open_bundle(options.engines, verify=False).manifest
    prompts = load_prompts(options.prompts, options.limit)
    params = SamplingParams(max_tokens=options.max_new_tokens, ignore_eos=True)
    try:
        opened = Runtime.open(options.engines, device=options.device)
    except BackendError as error:
        return {"skipped": str(error)}
    with opened as runtime:
        methods = [PLAIN, *(["ngram", "lyanna"] if manifest.lyanna else ["ngram"])]
        texts = {method: _decoded(runtime, prompts, params, method, options.budget) for method in methods}
        settings = Settings(params, options.budget, options.synthetic_acceptance)
        curve = measure_curve(runtime.verifier, SIZES, seconds=3.0)
        runs = compare(runtime, prompts, ["ngram"], settings)
        stages = _stages(runtime, prompts[0], params, options.budget)
    return {
        "environment": device_environment() if options.device == "cuda" else environment(),
        "bundle": {"name": manifest.name, "backend": manifest.backend, "precision": manifest.precision,
                   "random_weights": manifest.model.random_weights},
        "device": options.device,
        "tokens": _section(lambda: _compared(options.engines, manifest, prompts, params, texts)),
        "curve": {"live": LIVE, "ms": {str(size): curve.table_ms[size] for size in SIZES if size <= curve.largest}},
        "plain": _section(lambda: _against_copy(options.engines, options.device, curve.table_ms[1])),
        "stages": stages,
        "bound": {"synthetic_acceptance": options.synthetic_acceptance, **achieved(runs, "ngram", curve.table_ms)},
    }  # fmt: skip


def missing(backend: Backend) -> str | None:
    """What is not here to run a backend's engines on a GPU, or None. What is here and fails is not missing."""
    try:
        find_gpu()
    except BackendError as error:
        return str(error)
    if backend == "onnxruntime":
        found = execution_providers()
        provider = "CUDAExecutionProvider"
        return None if provider in found else f"ONNX Runtime runs on {', '.join(found)}; install onnxruntime-gpu"
    absent = [package for package in _TENSORRT_PACKAGES if not _is_installed(package)]
    return f"not installed: {', '.join(absent)}" if absent else None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _section(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except RedraftError as error:
        return {"skipped": str(error)}


def _decoded(
    runtime: Runtime, prompts: Sequence[Prompt], params: SamplingParams, method: str, size: Budget
) -> list[tuple[int, ...]]:
    fixed = None if method == PLAIN else size
    return [runtime.generate([prompt.text], params, method, fixed)[0].token_ids for prompt in prompts]


def _compared(
    engines: Path, manifest: Manifest, prompts: Sequence[Prompt], params: SamplingParams,
    texts: dict[str, list[tuple[int, ...]]],
) -> dict[str, Any]:  # fmt: skip
    """Where a text leaves the host's, with the lead that the host's logits had there: a near-tie, or an error."""
    if manifest.model.random_weights:
        raise UsageError("random weights: rounding decides every token")
    if manifest.backend != "onnxruntime":
        raise UsageError("the host runs ONNX Runtime's bundles only: build one beside to compare with")
    with Runtime.open(engines) as host:
        expected = [host.generate([prompt.text], params, PLAIN, record_gaps=True)[0] for prompt in prompts]
    found: dict[str, Any] = {}
    for method, outputs in texts.items():
        differences = []
        for prompt, output, plain in zip(prompts, outputs, expected, strict=True):
            place = first_difference(output, plain.token_ids)
            if place is not None and plain.gaps is not None:
                differences.append({"prompt": prompt.id, "token": place, "gap": plain.gaps[place]})
        found[method] = {"prompts": len(prompts), "differences": differences}
    return found


def _against_copy(engines: Path, device: str, ms: float) -> dict[str, Any]:
    """One token's least bytes over its time, as a share of what the device copies."""
    if device != "cuda":
        raise UsageError("on the CPU `redraft profile --roofline` compares with the memory")
    moved = traffic(open_bundle(engines, verify=False), names.VERIFIER, 1, LIVE).total
    copied = copy_bytes_per_second()
    return {"ms": ms, "bytes": moved, "copy_gb_per_second": copied / 1e9, "share_of_copy": moved / ms / copied * 1e3}


def _stages(runtime: Runtime, prompt: Prompt, params: SamplingParams, size: Budget) -> dict[str, Any]:
    recording = Recording()
    with runtime.verifier.ranges.watched(recording):
        runtime.generate([prompt.text], params, None, size)
    return profile(recording.ranges).to_json()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=budget, default=Budget(12, 4, 4), help="nodes=12,depth=4,width=4 by default")
    parser.add_argument("--synthetic-acceptance", type=rates, default=_FORCED, help="forced by depth for `bound`")
    parser.add_argument("--limit", type=int, default=4, help="prompts a kind")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
