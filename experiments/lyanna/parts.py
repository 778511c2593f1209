"""The time of a draft's parts: the draft graph cut after the layer and after the head, and a profile of the whole.

The cuts give a part's cost; differences of their times are small and may be noise. The profiler sees every kernel, but
adds some microseconds to each, which in a small model is more than most kernels take.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from experiments.lyanna.head import find_head, needed
from experiments.sessions import open_session, zeros
from redraft import names
from redraft.engines import Bundle
from redraft.engines.calls import Call, Calls
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.methods.lyanna import METHOD, LyannaShape
from redraft.names import TensorSpec
from redraft.runtime.verifier import Verifier

KV_LEN, PENDING_COUNT_ROWS = 200, 2
"""KV rows, and rows of pending features, at a call."""
VERIFIED = (1, 8)
"""Rows of the verifications between drafts."""
WARM_UP = 5
PARTS = ("layer", "head", "tree")
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

Times = dict[str, float]
"""Median and least milliseconds."""


def draft_graph(bundle: Bundle) -> str:
    """Return the draft graph for one sequence, lowered if the bundle has one."""
    drafter = bundle.drafter(METHOD.id)
    single = f"{names.DRAFT}{names.SINGLE}"
    return drafter.graph(single if single in drafter.record.graphs else names.DRAFT)


def times(values: Sequence[float]) -> Times:
    """Return median and least."""
    return {"median": float(np.median(values)), "least": float(min(values))}


def cut_calls(bundle: Bundle, shape: LyannaShape, threads: int, capacity: int) -> dict[str, Callable[[], None]]:
    """Return a call for the draft up to the layer's states, up to the head's logits, and whole."""
    record = bundle.graph(draft_graph(bundle))
    calls = {}
    for part, (model, outputs) in cuts(bundle.path / record.file, record, shape).items():
        session = open_session(model.SerializeToString(), threads, {_WEIGHTS_FOLDER: str(bundle.path)})
        calls[part] = _prepared(
            Calls(OnnxRuntimeProgram(session, replace(record, outputs=outputs))), bundle, shape, capacity
        ).run
    return calls


def cuts(file: Path, record: GraphRecord, shape: LyannaShape) -> dict[str, tuple[Any, tuple[TensorSpec, ...]]]:
    """Return a model for each part of a draft graph that ends with it, and its outputs."""
    found = {}
    caches = tuple(spec for spec in record.outputs if spec.in_place_of)
    logits = next(spec for spec in record.outputs if spec.name == names.CHAIN_LOGITS)
    for part in PARTS:
        model = onnx.load(str(file), load_external_data=False)
        graph = model.graph
        states = TensorSpec(find_head(graph).input[0], "float32", (logits.shape[0], shape.steps, shape.hidden))
        outputs = {"layer": (states, *caches), "head": (logits, *caches), "tree": record.outputs}[part]
        known = {value.name: value for value in graph.output}
        values = [known.get(spec.name) or _value(spec) for spec in outputs]
        kept = needed(graph, [spec.name for spec in outputs])
        nodes = [node for node in graph.node if node.name in kept]
        del graph.output[:], graph.node[:]
        graph.output.extend(values)
        graph.node.extend(nodes)
        found[part] = model, outputs
    return found


def profiled(verifier: Verifier, bundle: Bundle, shape: LyannaShape, threads: int, turns: int) -> dict[str, Times]:
    """Return the time of a draft's kernels by part, and the rest of the call, from ONNX Runtime's profiler."""
    record = bundle.graph(draft_graph(bundle))
    graph = onnx.load(str(bundle.path / record.file), load_external_data=False).graph
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "draft")
        session = open_session(bundle.path / record.file, threads, profile=prefix)
        program = OnnxRuntimeProgram(session, record)
        call = _prepared(Calls(program), bundle, shape, verifier.max_model_len + shape.steps)
        for _ in range(WARM_UP + turns):
            verifier.measure_ms(1, VERIFIED[-1], KV_LEN)
            call.run()
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    runs = split_runs(events, graph)[-turns:]
    return {name: times([run[name] for run in runs]) for name in (*PARTS, "rest", "call")}


def split_runs(events: Iterable[Mapping[str, Any]], graph: onnx.GraphProto) -> list[Times]:
    """Return milliseconds by part of every run of a profile; `rest` is the time of the `call` outside of kernels.

    The layer is all that the head depends on. A kernel that optimization made belongs to the place where it runs:
    before the head, or after it.
    """
    listed = list(events)
    head = find_head(graph)
    before, known = needed(graph, head.input), {node.name for node in graph.node}
    kernels = [event for event in listed if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    runs = []
    for call in (event for event in listed if event["name"] == "model_run"):
        spent, passed = dict.fromkeys(PARTS, 0.0), False
        ran = [kernel for kernel in kernels if call["ts"] <= kernel["ts"] < call["ts"] + call["dur"]]
        for kernel in sorted(ran, key=lambda kernel: kernel["ts"]):
            name = str(kernel["name"]).removesuffix("_kernel_time").split("/")[0]
            passed = passed or name == head.name
            in_layer = name in before if name in known else not passed
            spent["head" if name == head.name else "layer" if in_layer else "tree"] += kernel["dur"] / 1e3
        total = call["dur"] / 1e3
        runs.append({**spent, "rest": total - sum(spent.values()), "call": total})
    return runs


def _prepared(engine: Calls, bundle: Bundle, shape: LyannaShape, capacity: int) -> Call:
    """Return a call of PENDING_COUNT_ROWS rows after KV_LEN ones."""
    for cache in (names.key_cache(0), names.value_cache(0)):
        engine.bind(cache, zeros(1, shape.kv_heads, capacity, shape.head_dim))
    for name, table in bundle.tables(METHOD.id).items():
        engine.bind(name, table)
    engine.bind(names.DRAFT_LOGIT_SCALE, np.full(1, shape.draft_logit_scale, np.float32))
    batch = {"B": 1} if any("B" in spec.shape for spec in engine.inputs) else {}
    call = engine.prepare(**batch, M=PENDING_COUNT_ROWS)
    call.inputs[names.NUM_PENDING][:] = PENDING_COUNT_ROWS
    call.inputs[names.CACHE_LEN][:] = KV_LEN
    call.inputs[names.KV_LEN][0] = KV_LEN + PENDING_COUNT_ROWS
    call.inputs[names.POSITIONS][:] = np.arange(KV_LEN, KV_LEN + PENDING_COUNT_ROWS)
    return call


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, list(spec.shape))
