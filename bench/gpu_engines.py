"""A bundle's engines on a device: the host's tokens, what they cost, and how near they come to what they could.

    python -m redraft.bench.gpu_engines --engines build/engines/tiny --prompts assets/tiny/prompts/code.jsonl \\
        [--reference BUNDLE] [--device cuda] [--synthetic-acceptance 0.9,0.8,0.7] [--out build/gpu/engines.json]
    python -m redraft.bench.gpu_engines --build vicuna-7b --backend tensorrt --weights random --go-on ...

Sections of the one JSON object, each written when it is there:

    tokens   every method on the device against plain decoding on the host: of the same bundle, of TensorRT's engines by
             --reference, an ONNX Runtime bundle of the same model. Not for random weights, whose logits say nothing.
             Another token where the host's logits do not nearly tie is an error, after the rest was measured.
    curve    milliseconds by nodes verified at once.
    plain    plain decoding: its step and its verification alone, and the bytes of each over what the device copies.
    bound    speculation with forced acceptance against what the curve allows, judged on the host and on the device.
    figures  the shares that are asked for, with what they are of, the host's time of a step, and CUDA graphs.
    stages   where the time of a run's steps goes.

What is not here is said under `skipped`; with --go-on whatever else fails, but wrong tokens, is a line under `error`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from redraft.bench.command import budget, rates, run
from redraft.bench.environment import environment
from redraft.bench.gpu_bundle import build, missing_for
from redraft.bench.gpu_device import gpu_environment
from redraft.bench.gpu_report import Report, reason_of
from redraft.bench.gpu_speed import Load, measure_speed
from redraft.bench.gpu_tokens import WrongTokens, check_reference, compared, said
from redraft.bench.prompts import load_prompts
from redraft.engines import open_bundle
from redraft.errors import UsageError
from redraft.runtime import Budget, Runtime, SamplingParams

_FORCED = (0.9, 0.8, 0.7)


def main() -> dict[str, Any]:
    """Measure what the options ask for, and write it where `--out` says."""
    options = _arguments()
    report = Report(options.out)
    try:
        return report.fill(partial(measure, options))
    except WrongTokens:
        raise
    except Exception as error:
        if not options.go_on:
            raise
        print(f"not measured: {reason_of(error)}", file=sys.stderr)
        return report.found


WHOLE = Budget(12, 12, 12)
"""Of a drafter's tree it limits the nodes only, so that the tree stays on the device."""


def measure(options: argparse.Namespace, report: Report) -> None:
    """All sections, or why nothing runs the engines here. Raises WrongTokens, and UsageError for another model."""
    if reason := missing_for(options):
        report.put("skipped", reason)
        return
    if options.build:
        build(options)
    bundle = open_bundle(options.engines, verify=False)
    manifest = bundle.manifest
    if options.reference:
        check_reference(manifest, open_bundle(options.reference, verify=False).manifest)
    report.put("environment", gpu_environment() if options.device == "cuda" else environment())
    report.put("device", options.device)
    report.put("bundle", {"name": manifest.name, "backend": manifest.backend, "precision": manifest.precision,
                          "random_weights": manifest.model.random_weights})  # fmt: skip
    prompts, size = load_prompts(options.prompts, options.limit), options.budget
    params = SamplingParams(max_tokens=options.max_new_tokens, ignore_eos=True)
    with Runtime.open(options.engines, device=options.device, verify=False) as runtime:
        measure_speed(runtime, bundle, Load(prompts, params, size, options.synthetic_acceptance), report)
        texts = said(runtime, manifest, prompts, params, size)  # after it: a drafter once loaded works in every step
    report.put("tokens", found := _section(partial(compared, bundle, options.reference, prompts, texts, params)))
    if wrong := [f"{method}: {each}" for method in texts for each in found.get(method, {}).get("wrong", ())]:
        raise WrongTokens(f"{manifest.backend} on {options.device} says other tokens than the host: {wrong[0]}")


def _section(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A section, or what keeps it from being measured."""
    try:
        return make()
    except UsageError as error:
        return {"skipped": str(error)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--reference", type=Path, help="an ONNX Runtime bundle of the same model: the host's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=budget, default=WHOLE, help="nodes=12,depth=12,width=12 by default")
    parser.add_argument("--synthetic-acceptance", type=rates, default=_FORCED, help="forced by depth for `bound`")
    parser.add_argument("--limit", type=int, default=4, help="prompts a kind")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--go-on", action="store_true", help="fail for wrong tokens only; the rest is in the JSON")
    building = parser.add_argument_group("building the bundle first, where it is not current")
    building.add_argument("--build", metavar="MODEL", help="what `redraft build` is given, and with it:")
    building.add_argument("--backend", choices=("onnxruntime", "tensorrt"))
    for name in ("weights", "precision", "max_model_len", "drafter"):
        building.add_argument(f"--{name}")
    building.add_argument("--gpu-gib", type=float, default=0, help="skip where less GPU memory is free")
    building.add_argument("--disk-gib", type=float, default=0, help="skip where less disk is free for a new bundle")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
