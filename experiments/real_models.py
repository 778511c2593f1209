"""Figures of a real model: its builds, then opening, prompts, decoding and memory, next to peers on the same file.

    python -m experiments.real_models MODEL --out build/models --precisions int8,int4 \\
        --peers llama-cpp-python openvino-genai --peers-python PEERS/bin/python

Every decoder opens in a process of its own (`real_models_worker.py`), `--rounds` times in an order that rotates. Each
time it decodes the same prompts of PROMPT_TOKENS token ids, code, prose and a word problem, and then as many new tokens
as `--new-tokens`; end tokens end none. The first round's opening is that of a machine that has not seen the bundle.

llama.cpp reads the file as it is next to int4, and its own Q8_0 of it next to int8. OpenVINO GenAI reads the file as it
is; what it computes with does not depend on a precision. `--peers-python` names the Python that has the peers.
Resident memory is Pss: pages of mapped files count too. A decoder that fails is named with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from redraft.assembly.resolve import held_out_texts
from redraft.bench.command import run
from redraft.bench.environment import environment
from redraft.engines import open_bundle
from redraft.engines.sizes import total_bytes
from redraft.files import read_text
from redraft.runtime.text.tokenizer import Tokenizer

PROMPT_TOKENS = 37
WORKER = Path(__file__).with_name("real_models_worker.py")
OURS, LLAMA, OPENVINO = "redraft", "llama-cpp-python", "openvino-genai"
QUALITY = ("perplexity", "perplexity_fp32", "rise_error", "divergence", "same_tokens", "choices", "weight_shares")


class Decoder(NamedTuple):
    """One decoder of a file: the library, and the path that it reads."""

    library: str
    path: Path


def main() -> dict[str, Any]:
    """Build in every precision, then measure all decoders in turns."""
    options = _arguments()
    builds, decoders = {}, list[Decoder]()
    for precision in options.precisions.split(","):
        out = options.out / f"{options.model.stem}-{precision}"
        builds[precision] = build(options.model, precision, out)
        decoders.append(Decoder(OURS, out))
    if LLAMA in options.peers:
        decoders += [Decoder(LLAMA, options.model), Decoder(LLAMA, _as_q8(options))]
    if OPENVINO in options.peers:
        decoders.append(Decoder(OPENVINO, options.model))
    measured, failed = measure(decoders, options)
    return {
        "environment": environment(options.threads),
        "model": options.model.name,
        "rounds": options.rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": options.new_tokens,
        "builds": builds,
        "decoders": [_summary(decoder, rounds) for decoder, rounds in measured.items() if decoder not in failed],
        "failed": [{"library": one.library, "reads": one.path.name, "reason": why} for one, why in failed.items()],
    }


def build(model: Path, precision: str, out: Path) -> dict[str, Any]:
    """Build a bundle in a process of its own. Returns its seconds, peak memory in bytes, size and quality."""
    command = [Path(sys.executable).with_name("redraft"), "build", model, "-o", out, "--precision", precision]
    command += ["--drafter", "none", "--force", "--json"]
    start = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(list(map(str, command)), stdout=printed)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        if status:
            raise SystemExit(f"redraft build ended with status {status}")
        printed.seek(0)
        summary = json.load(printed)
    bundle_bytes = total_bytes(open_bundle(out).manifest)
    sizes = {"seconds": seconds, "peak_bytes": used.ru_maxrss * 1024, "bundle_bytes": bundle_bytes}
    return {**sizes, **{name: summary.get(name) for name in QUALITY}}


def measure(
    decoders: Sequence[Decoder], options: argparse.Namespace
) -> tuple[dict[Decoder, list[dict[str, Any]]], dict[Decoder, str]]:
    """Return each decoder's measurements by round, and the reasons of those that failed."""
    bundle = open_bundle(decoders[0].path)
    manifest = bundle.manifest
    tokenizer = Tokenizer.load(bundle.path, manifest.bos_token_id, next(iter(manifest.eos_token_ids), None))
    prompts = [tokenizer.encode(read_text(path))[:PROMPT_TOKENS] for path in held_out_texts().values()]
    work = json.dumps({"prompts": prompts, "new_tokens": options.new_tokens, "threads": options.threads})
    measured: dict[Decoder, list[dict[str, Any]]] = {decoder: [] for decoder in decoders}
    failed: dict[Decoder, str] = {}
    with tempfile.TemporaryDirectory() as cache:  # so that the first opening measures what a new machine measures
        for number in range(options.rounds):
            turn = number % len(decoders)
            for decoder in (*decoders[turn:], *decoders[:turn]):
                print(f"round {number + 1}: {decoder.library} {decoder.path.name}", file=sys.stderr)
                if decoder in failed:
                    continue
                python = sys.executable if decoder.library == OURS else options.peers_python
                command = [python, str(WORKER), decoder.library, str(decoder.path)]
                done = subprocess.run(
                    command, input=work, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": cache}
                )
                if done.returncode:
                    failed[decoder] = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                else:
                    measured[decoder].append(json.loads(done.stdout.splitlines()[-1]))
    return measured, failed


def _summary(decoder: Decoder, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over rounds. `spread` is the largest over the smallest time of a token."""
    tokens = [one["token_ms"] for one in rounds]
    curves = [one["costs"] for one in rounds if "costs" in one]
    return {
        "library": decoder.library,
        "reads": decoder.path.name,
        "version": rounds[0]["version"],
        "first_opening_s": rounds[0]["opening_s"],
        "opening_s": median([one["opening_s"] for one in rounds[1:] or rounds]),
        "prompt_ms": median([one["prompt_ms"] for one in rounds]),
        "token_ms": median(tokens),
        "spread": max(tokens) / min(tokens),
        "resident_bytes": median([one["resident_bytes"] for one in rounds]),
        **({"costs": {size: median([curve[size] for curve in curves]) for size in curves[0]}} if curves else {}),
    }


def _as_q8(options: argparse.Namespace) -> Path:
    """Return llama.cpp's Q8_0 of the file, written now unless it is there."""
    target = Path(options.out) / f"{options.model.stem}-Q8_0.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        subprocess.run([options.peers_python, str(WORKER), "quantize", str(options.model), str(part)], check=True)
        part.rename(target)
    return target


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file, or a checkpoint folder that no peer reads")
    parser.add_argument("--out", type=Path, required=True, help="folder of the bundles, and of llama.cpp's Q8_0")
    parser.add_argument("--precisions", default="int8,int4", help="one or more, with commas")
    parser.add_argument("--peers", nargs="*", default=[], choices=(LLAMA, OPENVINO))
    parser.add_argument("--peers-python", default=sys.executable, help="the Python that has the peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.new_tokens < 2 or options.rounds < 1:
        parser.error("a time of a token needs --new-tokens of 2 or more, and a round")
    return options


if __name__ == "__main__":
    run(main)
