"""A bundle's engines on a device: their tokens against the host's, their costs, and their speed against its bounds.

    python -m redraft.bench.gpu --engines build/engines/tiny --prompts assets/tiny/prompts/code.jsonl \\
        [--reference BUNDLE] [--device cuda] [--synthetic-acceptance 0.9,0.8,0.7] [--out build/gpu/engines.json]
    python -m redraft.bench.gpu --build vicuna-7b --backend tensorrt --weights random --go-on ...

Sections of the one JSON object, each written when it is complete:

    tokens   every method on the device against plain decoding on the host. The host runs the same bundle, or, for
             TensorRT's engines, --reference: an ONNX Runtime bundle of the same model. Skipped for random weights:
             their logits are meaningless. A differing token without a near-tie of the host's logits is an error at the
             end.
    curve    milliseconds by nodes verified at once.
    plain    plain decoding: its step and its verification alone, and the bytes of each over the device's copy speed.
    bound    speculation with forced acceptance against the curve's bound, accepted on the host and on the device.
    figures  the shares and their targets, the host's time of a step, and CUDA graphs.
    stages   time of every stage of a run's steps.

`skipped` names the parts that this machine lacks. With --go-on any failure except wrong tokens is a line under `error`.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from redraft.bench.command import Sections, budget, bundle_parser, rates, reason_of, run
from redraft.bench.compare import PLAIN, Settings, decode
from redraft.bench.environment import environment, execution_providers, nvidia_smi
from redraft.bench.gpu_speed import Load, measure_speed
from redraft.bench.prompts import BenchPrompt, load_prompts
from redraft.bench.statistics import first_difference
from redraft.config import Backend, Precision
from redraft.engines import Bundle, open_bundle
from redraft.engines.gpu import cuda_version, find_gpu
from redraft.engines.manifest import Manifest
from redraft.errors import BackendError, RedraftError, UsageError
from redraft.packages import gpu_requirement, package_version
from redraft.runtime import Budget, Runtime, SamplingParams
from redraft.runtime.drafters import method_words

WHOLE = Budget(12, 12, 12)
"""The default: it limits only the nodes of a drafter's tree, so the tree stays on the device."""
_FORCED = (0.9, 0.8, 0.7)
_OF_BUILD = ("backend", "weights", "precision", "max_model_len", "drafter")
"""Options that are passed on to `redraft build`."""
_PACKAGES: Mapping[Backend, tuple[str, ...]] = {
    "onnxruntime": ("cuda.bindings",), "tensorrt": ("tensorrt", "cuda.bindings"),
    "tensorrt-rtx": ("tensorrt_rtx_bindings", "cuda.bindings"),
}  # fmt: skip
"""Packages that build engines and run them, in addition to ONNX Runtime."""
_GIB = 1 << 30
NEAR_TIES: Mapping[Precision, float] = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.8}
"""Logit margins of the host that rounding may reverse; the largest logits are about 16. With weights in fewer bits,
every backend rounds differently: their differing texts are reported, without an error.
"""
Texts = dict[str, list[tuple[int, ...]]]
"""Tokens of every prompt by method."""


class WrongTokens(RedraftError):
    """A device writes other tokens than the host, which rounding does not explain."""


def main() -> dict[str, Any]:
    """Take the measurements that the options ask for, and write them to `--out`."""
    options = _arguments()
    sections = Sections(options.out)
    try:
        return sections.fill(partial(measure, options))
    except WrongTokens:
        raise
    except Exception as error:
        if not options.go_on:
            raise
        traceback.print_exc()
        print(f"not measured: {reason_of(error)}", file=sys.stderr)
        return sections.figures


def measure(options: argparse.Namespace, sections: Sections) -> None:
    """Measure all sections, or report the missing parts. Raises WrongTokens, and UsageError for another model."""
    if reason := missing_for(options):
        sections.put("skipped", reason)
        return
    if options.build:
        build(options)
    bundle = open_bundle(options.engines, verify=False)
    manifest = bundle.manifest
    if options.reference:
        check_reference(manifest, open_bundle(options.reference, verify=False).manifest)
    sections.put("environment", gpu_environment() if options.device == "cuda" else environment())
    sections.put("device", options.device)
    sections.put("bundle", {"name": manifest.name, "backend": manifest.backend, "precision": manifest.precision,
                            "random_weights": manifest.model.random_weights})  # fmt: skip
    prompts, size = load_prompts(options.prompts, options.limit), options.budget
    params = SamplingParams(max_tokens=options.max_new_tokens, ignore_eos=True)
    with Runtime.open(options.engines, device=options.device, verify=False) as runtime:
        measure_speed(runtime, bundle, Load(prompts, params, size, options.synthetic_acceptance), sections)
        methods = [] if manifest.model.random_weights else [PLAIN, *method_words(manifest.drafters)[1:]]
        settings = Settings(params, size)
        texts = {  # last: a loaded drafter works in every step
            method: [decode(runtime, prompt.text, method, settings).token_ids for prompt in prompts]
            for method in methods
        }
    try:
        tokens = compared(bundle, options.reference, prompts, texts, params)
    except UsageError as error:
        tokens = {"skipped": str(error)}
    sections.put("tokens", tokens)
    if wrong := [f"{method}: {each}" for method in texts for each in tokens.get(method, {}).get("wrong", ())]:
        raise WrongTokens(f"{manifest.backend} on {options.device} writes other tokens than the host: {wrong[0]}")


def check_reference(manifest: Manifest, reference: Manifest) -> None:
    """Raise UsageError if `reference` is of another model, or cannot run on the host."""
    if reference.backend != "onnxruntime":
        raise UsageError(f"the host runs ONNX Runtime's bundles only, the reference is for {reference.backend}")
    ours, theirs = (
        (dict(each.model.weights) or each.model.source, each.model.random_weights, each.shape.vocabulary)
        for each in (manifest, reference)
    )
    if ours != theirs:
        raise UsageError(
            f"the reference is of another model: expected the weights of {manifest.model.source}, "
            f"found those of {reference.model.source}",
            "build it of the same checkpoint with --backend onnxruntime",
        )


def compared(
    bundle: Bundle, reference: Path | None, prompts: Sequence[BenchPrompt], texts: Texts, params: SamplingParams
) -> dict[str, Any]:
    """Return the places at which a text differs from the host's, with the host's logit margin: a near-tie, or an error.

    The host runs `reference`, or the bundle itself. Raises UsageError if nothing can be compared.
    """
    manifest = bundle.manifest
    if manifest.model.random_weights:
        raise UsageError("random weights: rounding decides every token")
    if manifest.backend != "onnxruntime" and not reference:
        raise UsageError("the host runs ONNX Runtime's bundles only: give one of the same model as --reference")
    path = reference or bundle.path
    other = open_bundle(path, verify=False).manifest
    with Runtime.open(path, verify=False) as host:
        expected = [host.generate([prompt.text], params, PLAIN, record_logit_margins=True)[0] for prompt in prompts]
    near = max(NEAR_TIES.get(each, math.inf) for each in (manifest.rounding, other.rounding))
    figures: dict[str, Any] = {"reference": {"bundle": str(path), "precision": other.precisions}}
    for method, outputs in texts.items():
        differences: list[dict[str, Any]] = []
        for prompt, output, plain in zip(prompts, outputs, expected, strict=True):
            token, margins = first_difference(output, plain.token_ids), plain.logit_margins or ()
            if token is not None:  # past the end of either text, there is no margin
                margin = margins[token] if token < min(len(output), len(margins)) else None
                differences.append({"prompt": prompt.id, "token": token, "logit_margin": margin})
        wrong = [
            f"prompt {each['prompt']}, token {each['token']}, which led by {each['logit_margin']}"
            for each in differences
            if each["logit_margin"] is None or each["logit_margin"] >= near
        ]
        figures[method] = {"prompts": len(prompts), "differences": differences, "wrong": wrong}
    return figures


def gpu_environment() -> dict[str, Any]:
    """Return the machine, and the GPU as its driver knows it: a JSON object. Raises BackendError without a GPU."""
    gpu = find_gpu()
    return {
        **environment(),
        "device": gpu.name,
        "compute_capability": ".".join(map(str, gpu.compute_capability)),
        "memory_bytes": gpu.total_bytes,
        "newest_cuda_of_driver": ".".join(map(str, cuda_version())),
        "driver_and_clocks": nvidia_smi(),
    }


def missing(backend: Backend) -> str | None:
    """Return the part that this machine lacks to run a backend's engines on a GPU, or None.

    Installed parts that fail are not missing.
    """
    try:
        find_gpu()
    except BackendError as error:
        return str(error)
    if backend == "onnxruntime" and "CUDAExecutionProvider" not in (found := execution_providers()):
        wanted = gpu_requirement("onnxruntime", package_version("onnxruntime"))
        return f"ONNX Runtime runs on {', '.join(found)}; install {wanted} in its place"
    absent = [package for package in _PACKAGES[backend] if not _is_installed(package)]
    return f"not installed: {', '.join(absent)}" if absent else None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def missing_for(options: argparse.Namespace) -> str | None:
    """Return the device, backend, memory or disk that the options ask for and this machine lacks, or None."""
    if options.device != "cuda":
        return None
    try:
        gpu = find_gpu()
    except BackendError as error:
        return str(error)
    backend: Backend = options.backend or open_bundle(options.engines, verify=False).manifest.backend
    if reason := missing(backend):
        return reason
    if gpu.free_bytes < options.gpu_gib * _GIB:
        return f"{options.gpu_gib} GiB of GPU memory needed, {gpu.name} has {gpu.free_bytes / _GIB:.1f} free"
    there = next(folder for folder in (options.engines, *options.engines.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free / _GIB
    if options.build and not options.engines.is_dir() and free < options.disk_gib:
        return f"{options.disk_gib} GiB of disk needed for the engines, {free:.1f} free"
    return None


def build(options: argparse.Namespace) -> None:
    """Run `redraft build`, which does nothing if the bundle is current. Raises BackendError with its last line."""
    command = [str(Path(sys.executable).parent / "redraft"), "build", options.build, "-o", str(options.engines)]
    for name in _OF_BUILD:
        command += [f"--{name.replace('_', '-')}", str(value)] if (value := getattr(options, name)) is not None else []
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BackendError(f"`{' '.join(['redraft', *command[1:]])}` failed: {lines[-1]}")


def _arguments() -> argparse.Namespace:
    parser = bundle_parser(__doc__, 128, 4)
    parser.add_argument("--reference", type=Path, help="an ONNX Runtime bundle of the same model, which the host runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=budget, default=WHOLE, help="nodes=12,depth=12,width=12 by default")
    parser.add_argument("--synthetic-acceptance", type=rates, default=_FORCED, help="forced by depth for `bound`")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--go-on", action="store_true", help="fail for wrong tokens only; the rest is in the JSON")
    building = parser.add_argument_group("building the bundle first, if it is not current")
    building.add_argument("--build", metavar="MODEL", help="the model for `redraft build`, which also gets:")
    building.add_argument("--backend", choices=("onnxruntime", "tensorrt"))
    for name in _OF_BUILD[1:]:
        building.add_argument(f"--{name}")
    building.add_argument("--gpu-gib", type=float, default=0, help="skip if less GPU memory is free")
    building.add_argument("--disk-gib", type=float, default=0, help="skip if less disk is free for a new bundle")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
