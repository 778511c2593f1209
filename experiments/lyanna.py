"""Figure 13 of Lyanna's paper: logits in one pass against one row after another, and the time of a draft's parts.

    python -m experiments.lyanna latency --engines build/engines/tiny [--json]

The parts are those of the draft graph cut after the layer and after the head, and of a profile. Differences
of cuts are small and may be noise. The profiler adds some microseconds to each kernel, which in a small model is more
than most kernels take. An EAGLE-like draft, which needs its head after every step, is not run but computed from the
same parts.
"""

# pylint: disable=too-many-lines  # one page of tables
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.convenience import extract

from redraft import names
from redraft.bench.command import as_json, one_line_errors
from redraft.bench.environment import SETTLE_SECONDS, environment
from redraft.bench.report_inputs import TOGETHER, latency_tables
from redraft.cli.console import print_table
from redraft.engines import Bundle, open_bundle
from redraft.engines.calls import Call, Calls
from redraft.engines.host_memory import huge_pages
from redraft.engines.onnxruntime_backend import session_options
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.errors import BundleError
from redraft.methods.lyanna import METHOD, LyannaShape
from redraft.names import TensorSpec
from redraft.runtime import Runtime
from redraft.runtime.drafters.lyanna import LyannaDrafter

MOST_STEPS = 6
"""Largest N of the logits, if the drafter's steps and width are not larger."""
KV_LEN, PENDING_ROWS = 200, 2
"""KV rows, and rows of pending features, at a call."""
WARM_UP, BLOCKS, RUNS = 5, 8, 12
PARTS = ("layer", "head", "tree")
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

Times = dict[str, float]
"""Median and least milliseconds."""
Run = Callable[[], None]


class Draft(NamedTuple):
    """The draft graph for one sequence of a bundle."""

    bundle: Bundle
    graph: str
    shape: LyannaShape
    threads: int

    def load(self) -> tuple[ir.Model, ir.Node]:
        """Return the model, and the product that gives the chain's logits. Raises BundleError if none does."""
        model = ir.load(self.bundle.path / self.bundle.graph(self.graph).file)
        value = next(output for output in model.graph.outputs if output.name == names.CHAIN_LOGITS)
        while (node := value.producer()) is not None:
            if node.op_type.startswith("MatMul"):
                return model, node
            value = next(given for given in node.inputs if given is not None and not given.is_initializer())
        raise BundleError(f"no product of the LM head gives {names.CHAIN_LOGITS}", "build the bundle again")

    def open(self, model: ir.Model, profile: str | None = None) -> ort.InferenceSession:
        """Load a model over the bundle's weights with an engine's options. profile: beginning of the file's name."""
        options = session_options(self.threads, "error")
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(self.bundle.path))
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, profile
        with huge_pages():
            return ort.InferenceSession(
                ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
            )

    def call(self, session: ort.InferenceSession, outputs: tuple[TensorSpec, ...], capacity: int) -> Call:
        """Return a call of PENDING_ROWS rows after KV_LEN ones."""
        record = replace(self.bundle.graph(self.graph), outputs=outputs)
        engine = Calls(OnnxRuntimeProgram(session, record))
        for cache in (names.key_cache(0), names.value_cache(0)):
            engine.bind(cache, np.zeros((1, self.shape.kv_heads, capacity, self.shape.head_dim), np.float32))
        for name, table in self.bundle.tables(METHOD.id).items():
            engine.bind(name, table)
        engine.bind(names.DRAFT_LOGIT_SCALE, np.full(1, self.shape.draft_logit_scale, np.float32))
        batch = {"B": 1} if any("B" in spec.shape for spec in engine.inputs) else {}
        call = engine.prepare(**batch, M=PENDING_ROWS)
        call.inputs[names.NUM_PENDING][:] = PENDING_ROWS
        call.inputs[names.CACHE_LEN][:] = KV_LEN
        call.inputs[names.KV_LEN][0] = KV_LEN + PENDING_ROWS
        call.inputs[names.POSITIONS][:] = np.arange(KV_LEN, KV_LEN + PENDING_ROWS)
        return call


def main() -> None:
    """Measure and print the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("latency",))
    parser.add_argument("--engines", type=Path, required=True, help="an engine bundle with a Lyanna drafter")
    parser.add_argument("--turns", type=int, default=100, help="number of timed drafts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with one_line_errors():
        result = measure(options.engines, options.threads, options.turns)
        if options.json:
            print(as_json(result))
            return
        for title, rows in latency_tables(result).items():
            print_table(rows, title)


def measure(engines: Path, threads: int, turns: int) -> dict[str, Any]:
    """Measure everything. Raises BundleError if the bundle has no Lyanna drafter."""
    bundle = open_bundle(engines)
    record = bundle.manifest.drafters.get(METHOD.id)
    shape = METHOD.parse_shape(record.shape) if record else None
    if record is None or shape is None:
        raise BundleError(f"{engines} has no drafter", "build it with `redraft build MODEL --drafter DIR`")
    single = f"{names.DRAFT}{names.SINGLE}"
    graph = bundle.drafter(METHOD.id).graph(single if single in record.graphs else names.DRAFT)
    draft = Draft(bundle, graph, shape, threads)
    print("logits", file=sys.stderr)
    logits = logits_ms(draft)
    with Runtime.open(engines, threads=threads) as runtime:
        drafter = LyannaDrafter.create(runtime.verifier, {}, bundle, METHOD.id)
        capacity = runtime.verifier.max_model_len + shape.steps

        def verify(rows: int = 8) -> float:
            return runtime.verifier.measure_ms(1, rows, KV_LEN)

        print("calls in turn, and parts of a draft", file=sys.stderr)
        calls = {
            "t(1)": lambda: verify(1),
            "draft": lambda: drafter.measure_ms(PENDING_ROWS, KV_LEN)[0],
            "t(8)": verify,
            "resample": lambda: drafter.measure_ms(PENDING_ROWS, KV_LEN)[1],
        }
        turns_ms = in_turns_ms(calls, turns)
        parts = parts_ms(draft, verify, capacity, turns)
        profile = profile_ms(draft, verify, capacity, turns)
    return {
        "environment": environment(threads),
        "live_rows": KV_LEN,
        "steps": shape.steps,
        "logits_ms": logits,
        "turns_ms": turns_ms,
        "parts_ms": parts,
        "profile_ms": profile,
        "computed_from_parts_ms": from_parts(parts["layer"]["median"], logits, shape.steps, shape.width),
    }


def times(values: Sequence[float]) -> Times:
    """Return median and least."""
    return {"median": float(np.median(values)), "least": float(min(values))}


def logits_ms(draft: Draft) -> dict[str, dict[str, dict[str, Times]]]:
    """Return times by number of steps N, `one_pass` (N rows) and `iterative` (N times a row), then by stage."""
    sessions = {stage: draft.open(model) for stage, model in stages(draft).items()}
    found: dict[str, dict[str, dict[str, Times]]] = {}
    for count in range(1, max(MOST_STEPS, draft.shape.steps, draft.shape.width) + 1):
        calls: dict[str, tuple[Run, int]] = {}
        for stage, session in sessions.items():
            calls[f"one_pass {stage}"] = _stage_call(session, count, draft.shape), 1
            calls[f"iterative {stage}"] = _stage_call(session, 1, draft.shape), count
        taken = _blocks_in_turn(calls)
        found[str(count)] = {
            way: {stage: times(taken[f"{way} {stage}"]) for stage in sessions} for way in ("one_pass", "iterative")
        }
    return found


def stages(draft: Draft) -> dict[str, ir.Model]:
    """Return the LM head, a softmax and a top-k as separate graphs, and one of all of them."""
    model, head = draft.load()
    graph, rows, logits = model.graph, head.inputs[0], head.outputs[0]
    assert rows is not None
    rows.shape, logits.shape = (ir.Shape([1, "M", size]) for size in (draft.shape.hidden, draft.shape.draft_vocabulary))
    rows.dtype = logits.dtype = ir.DataType.FLOAT
    width = ir.Value(name="width", const_value=ir.tensor(np.array([draft.shape.width])))
    graph.register_initializer(width)
    softmax = ir.node("Softmax", [logits], {"axis": -1}, name="softmax")
    probs = softmax.outputs[0]
    probs.name, probs.shape, probs.dtype = "probabilities", logits.shape, ir.DataType.FLOAT
    top_k = ir.node("TopK", [probs, width], {"axis": -1}, num_outputs=2, name="top_k")
    for value, name, kind in zip(
        top_k.outputs, ("best", "chosen"), (ir.DataType.FLOAT, ir.DataType.INT64), strict=True
    ):
        value.name, value.shape, value.dtype = name, ir.Shape([1, "M", draft.shape.width]), kind
    graph.extend([softmax, top_k])
    ends = {
        "head": (rows, [logits]),
        "softmax": (logits, [probs]),
        "top_k": (probs, top_k.outputs),
        TOGETHER: (rows, top_k.outputs),
    }
    return {
        stage: ir.Model(extract(graph, [source], outputs), ir_version=model.ir_version)
        for stage, (source, outputs) in ends.items()
    }


def _stage_call(session: ort.InferenceSession, rows: int, shape: LyannaShape) -> Run:
    (taken,) = session.get_inputs()
    values = np.random.default_rng(0).standard_normal((1, rows, taken.shape[2]), np.float32)
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    outputs: dict[str, NDArray[Any]] = {
        spec.name: np.zeros((1, rows, spec.shape[2]), types[spec.type]) for spec in session.get_outputs()
    }
    binding = session.io_binding()
    for name, array, bind in (
        (taken.name, values, binding.bind_input),
        *((name, array, binding.bind_output) for name, array in outputs.items()),
    ):
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run(_keep: object = (values, outputs)) -> None:
        session.run_with_iobinding(binding)

    return run


def _blocks_in_turn(calls: Mapping[str, tuple[Run, int]]) -> dict[str, list[float]]:
    """Return milliseconds of every run by name: a call so many times. Blocks of runs take turns, so that a slow
    minute of the machine affects all alike.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BLOCKS):
        for name, (call, count) in calls.items():
            time.sleep(SETTLE_SECONDS)
            for run in range(WARM_UP + RUNS):
                start = time.perf_counter()
                for _ in range(count):
                    call()
                if run >= WARM_UP:
                    taken[name].append((time.perf_counter() - start) * 1e3)
    return taken


def in_turns_ms(calls: Mapping[str, Callable[[], float]], turns: int) -> dict[str, Times]:
    """Return times of calls that return their milliseconds, in turn, as in decoding."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + turns):
        for name, call in calls.items():
            ms = call()
            if turn >= WARM_UP:
                taken[name].append(ms)
    return {name: times(values) for name, values in taken.items()}


def after(verify: Callable[[], float], call: Call) -> Callable[[], float]:
    """Return a function that returns the milliseconds of a call after a verification."""

    def run() -> float:
        verify()
        start = time.perf_counter()
        call.run()
        return (time.perf_counter() - start) * 1e3

    return run


def parts_ms(draft: Draft, verify: Callable[[], float], capacity: int, turns: int) -> dict[str, Times]:
    """Return the time of a draft by part, and of the whole `draft`: differences of the cut graphs' times."""
    calls = {part: draft.call(draft.open(model), outputs, capacity) for part, (model, outputs) in cuts(draft).items()}
    ends = in_turns_ms({part: after(verify, call) for part, call in calls.items()}, turns)
    starts = [dict.fromkeys(ends[PARTS[0]], 0.0), *ends.values()]
    own = {
        part: {kind: ms - start[kind] for kind, ms in end.items()}
        for (part, end), start in zip(ends.items(), starts, strict=False)
    }
    return {**own, "draft": ends[PARTS[-1]]}


def cuts(draft: Draft) -> dict[str, tuple[ir.Model, tuple[TensorSpec, ...]]]:
    """Return a model for each part of the draft graph that ends with it, and its outputs."""
    record = draft.bundle.graph(draft.graph)
    caches = tuple(spec for spec in record.outputs if spec.in_place_of)
    logits = next(spec for spec in record.outputs if spec.name == names.CHAIN_LOGITS)
    found = {}
    for part in PARTS:
        model, head = draft.load()
        states = head.inputs[0]
        assert states is not None
        shape = (logits.shape[0], draft.shape.steps, draft.shape.hidden)
        states.shape, states.dtype = ir.Shape(shape), ir.DataType.FLOAT
        layer = (TensorSpec(str(states.name), "float32", shape), *caches)
        outputs = {"layer": layer, "head": (logits, *caches), "tree": record.outputs}[part]
        graph = extract(model.graph, list(model.graph.inputs), [spec.name for spec in outputs])
        cut = ir.Model(graph, ir_version=model.ir_version)
        cut.functions.update(model.functions)
        found[part] = cut, outputs
    return found


def profile_ms(draft: Draft, verify: Callable[[], float], capacity: int, turns: int) -> dict[str, Times]:
    """Return the time of a draft's kernels by part, and the rest of the call, from ONNX Runtime's profiler."""
    model, head = draft.load()
    layer = extract(model.graph, list(model.graph.inputs), [value for value in head.inputs[:1] if value is not None])
    parts = {str(node.name): "tree" for node in model.graph} | {str(node.name): "layer" for node in layer}
    parts[str(head.name)] = "head"
    with tempfile.TemporaryDirectory() as folder:
        session = draft.open(model, str(Path(folder) / "draft"))
        call = draft.call(session, draft.bundle.graph(draft.graph).outputs, capacity)
        in_turns_ms({"call": after(verify, call)}, turns)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    runs = list(split_runs(events, parts))[-turns:]
    return {name: times([run[name] for run in runs]) for name in (*PARTS, "rest", "call")}


def split_runs(events: Sequence[Mapping[str, Any]], parts: Mapping[str, str]) -> Iterable[Times]:
    """Yield milliseconds by part of every run of a profile; `rest` is the time of the `call` outside of kernels.

    parts: of the graph's nodes. A kernel that optimization made is in the layer before the head, and in the tree after.
    """
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    for call in (event for event in events if event["name"] == "model_run"):
        spent, unknown = dict.fromkeys(PARTS, 0.0), "layer"
        ran = [kernel for kernel in kernels if call["ts"] <= kernel["ts"] < call["ts"] + call["dur"]]
        for kernel in sorted(ran, key=lambda kernel: kernel["ts"]):
            part = parts.get(kernel["name"].removesuffix("_kernel_time").split("/")[0], unknown)
            unknown = "tree" if part == "head" else unknown
            spent[part] += kernel["dur"] / 1e3
        total = call["dur"] / 1e3
        yield {**spent, "rest": total - sum(spent.values()), "call": total}


def from_parts(layer_ms: float, logits: Mapping[str, Any], steps: int, width: int) -> dict[str, float]:
    """Return drafts computed from medians: the layer's part, and head, softmax and top-k once or after every step.

    An EAGLE-like tree has `width` rows from the second step on; its layer counts as equally slow, which favours it.
    """

    def whole(rows: int, way: str = "one_pass") -> float:
        return float(logits[str(rows)][way][TOGETHER]["median"])

    return {
        "lyanna": layer_ms + whole(steps),
        "eagle_like_chain": layer_ms + whole(steps, "iterative"),
        "eagle_like_tree": layer_ms + whole(1) + (steps - 1) * whole(width),
    }


if __name__ == "__main__":
    main()
