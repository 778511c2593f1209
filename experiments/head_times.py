"""Times of heads alone, next to the verifications of a bundle: `python -m experiments.factorized_head time`."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from experiments.lyanna import in_turns_ms
from redraft import names
from redraft.bench.environment import environment
from redraft.engines import open_bundle
from redraft.engines.onnxruntime_backend import register_operators, session_options
from redraft.export.checkpoint.sources import RandomSource
from redraft.export.drafters.draft_head import DraftHead
from redraft.export.graph import passes, tracing
from redraft.export.graph.decoder import finish
from redraft.export.weights import place
from redraft.names import TensorSpec
from redraft.plugins.operators import find_operators
from redraft.runtime import Runtime

KV_LEN = 200
"""Rows of the KV cache at a verification."""
ROW_COUNTS = (1, 4, 8)


def head_times(options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of each head and number of rows, and their shares of a verification of as many rows."""
    shape = open_bundle(options.engines).manifest.shape
    heads = {"exact": (shape.vocabulary, 0)}
    heads |= {f"rank {rank}": (shape.vocabulary, rank) for rank in options.ranks}
    heads |= {f"{tokens} tokens": (tokens, 0) for tokens in options.tokens}
    with Runtime.open(options.engines, threads=options.threads) as runtime, tempfile.TemporaryDirectory() as folder:
        sessions = {
            name: session_of(tokens, shape.hidden, rank, Path(folder) / str(number), options.threads)
            for number, (name, (tokens, rank)) in enumerate(heads.items())
        }
        verify = runtime.verifier.measure_ms
        found = {}
        for rows in ROW_COUNTS:
            calls = {"verification": lambda rows=rows: verify(1, rows, KV_LEN)}
            calls |= {name: timed(session, rows, shape.hidden) for name, session in sessions.items()}
            found[str(rows)] = in_turns_ms(calls, options.turns)
    shares = {
        rows: {name: round(ms["median"] / times["verification"]["median"], 4) for name, ms in times.items()}
        for rows, times in found.items()
    }
    return {"environment": environment(options.threads), "vocabulary": shape.vocabulary, "ms": found, "shares": shares}


def session_of(tokens: int, hidden: int, rank: int, folder: Path, threads: int) -> ort.InferenceSession:
    """Return a session of a head with random weights in int8, as in a draft."""
    module = DraftHead(tokens, hidden, rank, torch.float32)
    states = TensorSpec("states", "float32", (1, "T", hidden))
    logits = TensorSpec(names.LOGITS, "float32", (1, "T", tokens))
    rows = torch.export.Dim("T", min=1)
    model = tracing.trace_graph(module, (torch.zeros(1, 2, hidden),), ({1: rows},), (states,), (logits,))
    passes.simplify(model)
    folder.mkdir()
    source = RandomSource.write(
        {name: tuple(value.shape) for name, value in module.state_dict().items()}, folder, "F32"
    )
    place(model, source, folder, "int8", lambda stage, done, total: None)
    finish(model)
    ir.save(model, folder / "head.onnx")
    options = session_options(threads, "error")
    if operators := find_operators():
        register_operators(options, operators)
    return ort.InferenceSession(str(folder / "head.onnx"), options, providers=["CPUExecutionProvider"])


def timed(session: ort.InferenceSession, rows: int, hidden: int) -> Callable[[], float]:
    """Return a function that runs a head for so many rows, and returns its milliseconds."""
    drawn = np.random.default_rng(0)

    def call() -> float:
        values = {"states": drawn.standard_normal((1, rows, hidden), np.float32)}  # the same ones would sort faster
        start = time.perf_counter()
        session.run(None, values)
        return (time.perf_counter() - start) * 1e3

    return call
