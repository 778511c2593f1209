"""Greedy decoding of one checkpoint by redraft and by its peers, in turns.

    python -m redraft.bench.peers --engines build/fp32 build/int8 build/int4 --checkpoint DIR --chat \\
        --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --limit 4 --keep build/peers

Peers are onnxruntime-genai, OpenVINO GenAI, llama.cpp and transformers. Each bundle is a column: peers decode models of
its precision, and llama.cpp's server a file of 4 bits next to 8 too. They convert the checkpoint, and `--keep` keeps
their models. Peers draft from n-grams in two lengths, as two modes. Each library and precision has a process of its
own. Every decoder continues a prompt before the next prompt, with the same token ids and as many new tokens as the
plain answer of the first bundle has. End tokens do not end a text. A time is the seconds from the first new token to
the last, over the tokens after the first.

`--batch 1,4,8` measures load instead: so many clients, each of which submits its next prompt when its last one has
ended, with redraft, OpenVINO GenAI's continuous batching and the slots of llama.cpp's server.

`--draft` measures drafts by a second model too, with every library that can take one; `redraft train publish --format
transformers` writes a student as such a checkpoint.

Peers that are not installed are left out, unless `--peers` names them. A peer that fails is named, and the exit status
is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from redraft.bench.command import as_json, bundle_parser, sizes
from redraft.bench.compare import Run
from redraft.bench.environment import environment
from redraft.bench.peers.base import Asked, Peer, PeerError, PeerModel, PeerSource, open_peer
from redraft.bench.peers.figures import figures, markdown, summary
from redraft.bench.peers.genai import GENAI
from redraft.bench.peers.huggingface import HUGGING_FACE
from redraft.bench.peers.llama_server import LLAMA_DRAFTS, SLOTS
from redraft.bench.peers.llamacpp import LLAMA
from redraft.bench.peers.load import load_figures, load_markdown, take_blocks
from redraft.bench.peers.openvino import OPENVINO, OPENVINO_SERVER
from redraft.bench.peers.ours import NAME, Ours, OursUnderLoad, draft_model_of
from redraft.bench.peers.turns import Key, make_questions, take_turns
from redraft.bench.peers.worker import Opener, Worker
from redraft.bench.prompts import load_prompts
from redraft.config import Precision
from redraft.engines import open_bundle
from redraft.errors import UsageError
from redraft.packages import package_version
from redraft.runtime import Runtime
from redraft.runtime.conversation import check_system

PEERS = (GENAI, OPENVINO, LLAMA, LLAMA_DRAFTS, HUGGING_FACE)
SERVERS = (OPENVINO_SERVER, SLOTS)
"""Peers that continue several prompts at once."""
Workers = Mapping[Key, Worker]
Reasons = dict[Key, str]
Opened = Callable[[int], AbstractContextManager[tuple[Workers, Reasons]]]
"""Opens all libraries for so many prompts at once."""


def main() -> None:
    """Measure and print a table, or JSON. Raises PeerError at the end if a peer has failed."""
    options = _arguments()
    result = measure(options)
    shown = load_markdown if options.batch else markdown
    print(as_json(result) if options.json else shown(result))
    if result["failed"]:
        raise PeerError(f"not measured: {', '.join(result['failed'])}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements that the options ask for: a JSON object. Raises UsageError, BundleError, DataError."""
    if options.batch and options.draft is not None:
        raise UsageError("--batch takes no --draft", "leave one of the two out")
    bundles = bundles_of(options.engines)
    for flag, folder in (("--checkpoint", options.checkpoint), ("--draft", options.draft)):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"no checkpoint folder {folder}", f"check {flag}")
    if options.draft is not None:
        for path in bundles.values():
            draft_model_of(path)
    check_system(options.system, options.chat)
    peers = _peers(options.peers, SERVERS if options.batch else PEERS)
    prompts = load_prompts(options.prompts, options.limit)
    with Runtime.open(options.engines[0], threads=options.threads) as runtime:
        questions = make_questions(runtime, prompts, options.max_new_tokens, options.chat, options.system)
    context = max(len(question.token_ids) + len(question.answer) for question in questions)
    with ExitStack() as stack:
        keep = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        opened = partial(_opened, partial(_openers, bundles, peers, options, keep, context))
        found = _under_load(opened, questions, options.batch) if options.batch else _one_by_one(opened, questions)
    for key, reason in found["failed"].items():
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
        **found,
    }


def _one_by_one(opened: Opened, questions: Sequence[Run]) -> dict[str, Any]:
    with opened(1) as (workers, failed):
        results = take_turns(workers, questions, _report)
    results.failed |= failed
    return figures(results, questions, {key: worker.settings for key, worker in workers.items()})


def _under_load(opened: Opened, questions: Sequence[Run], batches: Sequence[int]) -> dict[str, Any]:
    """Return figures by batch size. Raises UsageError for fewer prompts than the largest batch."""
    if len(questions) < max(batches):
        raise UsageError(
            f"--batch {max(batches)} needs {max(batches)} prompts, found {len(questions)}: different ones run at once",
            "give more prompts, or smaller batches",
        )
    prompts = [Asked(tuple(question.token_ids), len(question.answer)) for question in questions]
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for batch in batches:
        with opened(batch) as (workers, failed):
            results = take_blocks(workers, prompts, batch, _report)
        found[str(batch)] = load_figures(results, {key: worker.settings for key, worker in workers.items()})
        reasons |= {f"batch {batch}, {key}": reason for key, reason in (failed | results.failed).items()}
    return {**summary(questions), "batches": found, "failed": reasons}


def _peers(names: Sequence[str] | None, known: Sequence[Peer]) -> list[Peer]:
    """Return the peers of these names, or all. Raises UsageError for one that is not installed, or not known."""
    if names is None:
        return list(known)
    named = [peer for peer in known if peer.name in names]
    if unknown := set(names) - {peer.name for peer in named}:
        found = ", ".join(peer.name for peer in known)
        raise UsageError(f"{', '.join(sorted(unknown))} cannot be measured this way", f"give {found}")
    for peer in named:
        if not peer.installed:
            raise UsageError(f"{peer.name} is not installed", f"run `{peer.install}`")
    return named


def bundles_of(paths: Sequence[Path]) -> dict[Precision, Path]:
    """Return bundles by precision. Raises UsageError for two of one precision, and BundleError."""
    bundles: dict[Precision, Path] = {}
    for path in paths:
        precision = open_bundle(path).manifest.precision
        if precision in bundles:
            raise UsageError(f"{bundles[precision]} and {path} both are {precision}", "give one bundle a precision")
        bundles[precision] = path
    return bundles


@contextmanager
def _opened(openers: Callable[[int], Iterator[tuple[Key, Opener]]], batch: int) -> Iterator[tuple[Workers, Reasons]]:
    """Open all libraries for so many prompts at once, and close them. Those that cannot be opened have a reason."""
    workers: dict[Key, Worker] = {}
    failed: Reasons = {}
    with ExitStack() as stack:
        for key, opener in openers(batch):
            _report(f"opening {key}")
            try:
                workers[key] = stack.enter_context(closing(Worker(opener)))
            except PeerError as error:
                failed[key] = str(error)
        yield workers, failed


def _openers(
    bundles: Mapping[Precision, Path], peers: Sequence[Peer], options: argparse.Namespace, keep: Path, context: int,
    batch: int,
) -> Iterator[tuple[Key, Opener]]:  # fmt: skip
    """Yield the decoders to open, ours first in each precision."""
    source, threads = PeerSource(options.checkpoint, options.optimum_cli, options.draft), options.threads
    ours = OursUnderLoad if options.batch else Ours
    for precision, path in bundles.items():
        model = PeerModel(path, precision, threads, context, source.draft, batch)
        yield Key(NAME, precision), partial(ours, model)
        for peer in peers:
            if peer.installed and precision in peer.formats:
                yield Key(peer.name, precision), partial(open_peer, peer, source, keep, model)


def _report(line: str) -> None:
    print(f"peers: {line}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = bundle_parser(__doc__, 96, bundles=True)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint of all bundles")
    parser.add_argument("--draft", type=Path, help="a draft model's checkpoint; the bundles have it as a drafter")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the chat template")
    parser.add_argument("--system", help="the system message of each chat")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=sizes, default=(), help="measure load by so many clients, such as 1,4,8")
    names = dict.fromkeys(peer.name for peer in (*PEERS, *SERVERS))
    parser.add_argument("--peers", nargs="*", choices=[*names], help="all by default")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the peers' models for the next run")
    exporter = Path(sys.executable).with_name("optimum-cli")
    parser.add_argument("--optimum-cli", type=Path, default=exporter, help="the program that exports to OpenVINO")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()
