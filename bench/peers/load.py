"""Peers under load: blocks of prompts in a closed loop, by every library in turn, and their figures.

As `redraft.bench.load` measures methods: B clients each submit their next prompt when their last one has ended, and a
ratio comes from six pairs of blocks with the same prompts. Here each library has a process of its own, opened for B
prompts, and every text has as many new tokens in all libraries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from redraft.bench.command import markdown_table
from redraft.bench.compare import Progress
from redraft.bench.load import latency_text, requests_of_blocks, times_ms
from redraft.bench.peers import turns
from redraft.bench.peers.base import Asked, Continued, PeerError
from redraft.bench.peers.figures import processor, speedup_text
from redraft.bench.peers.ours import NAME
from redraft.bench.peers.turns import Key, Results
from redraft.bench.peers.worker import Turn, Worker
from redraft.bench.statistics import Timing, rate_of, rate_text, speedup

Block = Turn[list[Continued]]


def take_blocks(
    workers: Mapping[Key, Worker], prompts: Sequence[Asked], batch: int, progress: Progress
) -> Results[list[Continued]]:
    """Have every library continue every block in each of its modes, after a warm-up of `batch` prompts.

    workers: of servers that were opened for `batch` prompts. The order rotates from block to block.
    """
    results: Results[list[Continued]] = Results({key: {mode: [] for mode in workers[key].modes} for key in workers})
    ways = [(key, mode) for key, modes in results.turns.items() for mode in modes]
    for number, block in enumerate([range(batch), *requests_of_blocks(len(prompts), batch)]):
        progress(f"batch {batch}: " + (f"block {number}" if number else "warming up"))
        first = number % max(len(ways), 1)
        for key, mode in ways[first:] + ways[:first]:
            if key in results.failed:
                continue
            time.sleep(turns.SETTLE_SECONDS)
            try:
                turn = workers[key].serve(mode, [prompts[one] for one in block])
            except PeerError as error:
                results.fail(key, error)
            else:
                results.turns[key][mode] += [turn] if number else []
    return results


def timing(block: Block) -> Timing:
    """Return all tokens of a block, and the seconds from the first submission to the last output."""
    tokens = sum(one.tokens for one in block.decoded)
    return Timing(tokens, max(one.outputs[-1] for one in block.decoded) - min(one.submitted for one in block.decoded))


def load_figures(
    results: Results[list[Continued]], settings: Mapping[Key, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return figures of one batch size, by library and precision.

    `over` has the speeds of our modes over a peer's mode, from pairs of blocks; it is empty if our bundle failed.
    """
    found = {}
    for key, modes in results.turns.items():
        ours = {} if key.name == NAME else results.turns.get(Key(NAME, key.precision), {})
        found[str(key)] = {
            "settings": dict(settings[key]),
            "modes": {mode: _figures(blocks, ours) for mode, blocks in modes.items()},
            **processor([block for blocks in modes.values() for block in blocks]),
        }
    return found


def _figures(blocks: Sequence[Block], ours: Mapping[str, Sequence[Block]]) -> dict[str, Any]:
    served = [one for block in blocks for one in block.decoded]
    timings = [timing(block) for block in blocks]
    return {
        "tokens_per_second": rate_of(timings),
        "time_to_first_token_ms": times_ms([one.outputs[0] - one.submitted for one in served]),
        "time_between_outputs_ms": times_ms([gap for one in served for gap in np.diff(one.outputs)]),
        "outputs": len(served),
        "tokens": sum(one.tokens for one in timings),
        "seconds": sum(one.seconds for one in timings),
        "over": {mode: asdict(speedup(timings, [timing(block) for block in own])) for mode, own in ours.items()},
    }


def load_markdown(result: Mapping[str, Any]) -> str:
    """Return the result of the command with `--batch` as Markdown: a table, and a line for each library's settings."""
    machine, batches = result["environment"], result["batches"]
    rows = [["batch", "library", "mode", "tokens/s", "first token, ms", "between outputs, ms", f"{NAME} over it"]]
    notes: dict[str, None] = {}
    for batch, decoders in batches.items():
        for name, decoder in decoders.items():
            rows += [[batch, name, mode, *_cells(each)] for mode, each in decoder["modes"].items()]
            notes[
                f"- batch {batch}, {name}: {decoder['settings']}; {decoder['busy_threads']:.1f} busy threads, at most "
                f"{decoder['idle_cpu_ms']:.0f} ms of processor time between turns"
            ] = None
    return "\n".join([
        f"{result['prompts']} prompts with {result['new_tokens']} new tokens, {result['looping_answers']} answers that "
        f"loop; {machine['threads']} threads, {machine['cpu']}; medians / 99th percentiles.",
        "",
        markdown_table(rows),
        "",
        *notes,
        *(f"- {name} is not installed: `{install}`" for name, install in result["left_out"].items()),
        *(f"- {key} failed: {reason}" for key, reason in result["failed"].items()),
    ])  # fmt: skip


def _cells(figures: Mapping[str, Any]) -> list[str]:
    ratios = (f"{mode} {speedup_text(each)}" for mode, each in figures["over"].items())
    return [
        rate_text(figures["tokens_per_second"]),
        latency_text(figures["time_to_first_token_ms"]),
        latency_text(figures["time_between_outputs_ms"]),
        ", ".join(ratios) or "-",
    ]
