"""Greedy decoding of one checkpoint by redraft and by its peers, in turns.

    python -m redraft.bench.peers --engines build/fp32 build/int8 build/int4 --checkpoint DIR --chat \\
        --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --limit 4 --keep build/peers

Peers are onnxruntime-genai, OpenVINO GenAI, llama.cpp and transformers. Each bundle is a column: peers decode models of
its precision. They convert the checkpoint, and `--keep` keeps their
models. Each library and precision has a process of its own. Every decoder continues a prompt before the next prompt,
with the same token ids and as many new tokens as the plain answer of the first bundle has. End tokens do not end a
text. A time is the seconds from the first new token to the last, over the tokens after the first.

`--draft` measures drafts by a second model too, with every library that can take one; `redraft train publish --format
transformers` writes a student as such a checkpoint.

Peers that are not installed are left out, unless `--peers` names them. A peer that fails is named, and the exit status
is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from redraft.bench.command import as_json, bundle_parser
from redraft.bench.environment import environment
from redraft.bench.peers.base import Peer, PeerError, PeerModel, PeerSource, open_peer
from redraft.bench.peers.figures import figures, markdown
from redraft.bench.peers.genai import GENAI
from redraft.bench.peers.huggingface import HUGGING_FACE
from redraft.bench.peers.llamacpp import GIVEN, LLAMA
from redraft.bench.peers.openvino import OPENVINO
from redraft.bench.peers.ours import NAME, Ours, draft_model_of
from redraft.bench.peers.turns import Key, make_questions, take_turns
from redraft.bench.peers.worker import Opener, Worker
from redraft.bench.prompts import load_prompts
from redraft.config import Precision
from redraft.engines import open_bundle
from redraft.errors import UsageError
from redraft.packages import package_version
from redraft.runtime import Runtime
from redraft.runtime.conversation import check_system

PEERS = (GENAI, OPENVINO, LLAMA, GIVEN, HUGGING_FACE)


def main() -> None:
    """Measure and print a table, or JSON. Raises PeerError at the end if a peer has failed."""
    options = _arguments()
    result = measure(options)
    print(as_json(result) if options.json else markdown(result))
    if result["failed"]:
        raise PeerError(f"not measured: {', '.join(result['failed'])}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements that the options ask for: a JSON object. Raises UsageError, BundleError, DataError."""
    bundles = _bundles(options.engines)
    for flag, folder in (("--checkpoint", options.checkpoint), ("--draft", options.draft)):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"no checkpoint folder {folder}", f"check {flag}")
    if options.draft is not None:
        for path in bundles.values():
            draft_model_of(path)
    check_system(options.system, options.chat)
    peers = _peers(options.peers)
    prompts = load_prompts(options.prompts, options.limit)
    with Runtime.open(options.engines[0], threads=options.threads) as runtime:
        questions = make_questions(runtime, prompts, options.max_new_tokens, options.chat, options.system)
    context = max(len(question.token_ids) + len(question.answer) for question in questions)
    with ExitStack() as stack:
        keep = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: dict[Key, Worker] = {}
        failed: dict[Key, str] = {}
        for key, opener in _openers(bundles, peers, options, keep, context):
            _report(f"opening {key}")
            try:
                workers[key] = stack.enter_context(closing(Worker(opener)))
            except PeerError as error:
                failed[key] = str(error)
        results = take_turns(workers, questions, _report)
    results.failed |= failed
    for key, reason in results.failed.items():
        _report(f"{key} failed: {reason}")
    return {
        "environment": environment(options.threads),
        "rule": "every text has as many new tokens as the plain answer of the first bundle; end tokens end none",
        "chat": options.chat,
        "max_new_tokens": options.max_new_tokens,
        "precisions": list(bundles),
        "peers": [peer.name for peer in peers],
        "versions": {NAME: package_version(NAME), **{peer.name: package_version(peer.package) for peer in peers}},
        "left_out": {peer.name: peer.install for peer in peers if not peer.installed},
        **figures(results, questions, {key: worker.settings for key, worker in workers.items()}),
    }


def _peers(names: Sequence[str] | None) -> list[Peer]:
    """Return the peers of these names, or all. Raises UsageError for a named one that is not installed."""
    if names is None:
        return list(PEERS)
    named = [peer for peer in PEERS if peer.name in names]
    for peer in named:
        if not peer.installed:
            raise UsageError(f"{peer.name} is not installed", f"run `{peer.install}`")
    return named


def _bundles(paths: Sequence[Path]) -> dict[Precision, Path]:
    """Return bundles by precision. Raises UsageError for two of one precision, and BundleError."""
    bundles: dict[Precision, Path] = {}
    for path in paths:
        precision = open_bundle(path).manifest.precision
        if precision in bundles:
            raise UsageError(f"{bundles[precision]} and {path} both are {precision}", "give one bundle a precision")
        bundles[precision] = path
    return bundles


def _openers(
    bundles: Mapping[Precision, Path], peers: Sequence[Peer], options: argparse.Namespace, keep: Path, context: int
) -> Iterator[tuple[Key, Opener]]:  # fmt: skip
    """Yield the decoders to open, ours first in each precision."""
    source, threads = PeerSource(options.checkpoint, options.optimum_cli, options.draft), options.threads
    for precision, path in bundles.items():
        yield Key(NAME, precision), partial(Ours, PeerModel(path, precision, threads, context, source.draft))
        for peer in peers:
            if peer.installed and precision in peer.formats:
                yield Key(peer.name, precision), partial(open_peer, peer, source, precision, keep, threads, context)


def _report(line: str) -> None:
    print(f"peers: {line}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = bundle_parser(__doc__, 96, bundles=True)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint of all bundles")
    parser.add_argument("--draft", type=Path, help="a draft model's checkpoint; the bundles have it as a drafter")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the chat template")
    parser.add_argument("--system", help="the system message of each chat")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", choices=[peer.name for peer in PEERS], help="all by default")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the peers' models for the next run")
    exporter = Path(sys.executable).with_name("optimum-cli")
    parser.add_argument("--optimum-cli", type=Path, default=exporter, help="the program that exports to OpenVINO")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()
