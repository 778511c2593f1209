"""`compare_outputs` finds planted faults; on a GPU, it then compares CUDA and real engines.

Here it holds TensorRT's programs on fakes, and ONNX Runtime, against ONNX Runtime on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from redraft import names
from redraft.bench.gpu import missing
from redraft.config import Backend, Precision, TensorRtBuild
from redraft.engines import open_bundle, open_device
from redraft.engines.bundle import Bundle
from redraft.engines.device import Device, Program
from redraft.engines.gpu import find_gpu
from redraft.engines.host_device import HostDevice
from redraft.engines.manifest import GraphRecord
from redraft.engines.tensorrt.profiles import CallLimits, profiles_of
from redraft.engines.tensorrt.stage import GRAPHS as STAGED
from redraft.engines.tensorrt.target import check_precision
from redraft.errors import BackendError
from tests.engines.drafters import LYANNA_COPY_SLOT, LYANNA_DRAFT, LYANNA_RESAMPLE, symbols_of
from tests.runtime.devices import cpu_device, tensorrt_device

from . import outputs
from .bundles import build_tiny
from .calls import CHUNK, STALE, Array
from .outputs import GRAPHS, TOLERANCES, compare_outputs, compare_trees
from .references import exact

# --- on the CPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(lyanna_bundle: Path) -> Bundle:
    return open_bundle(lyanna_bundle, verify=False)


@pytest.fixture
def fakes(bundle: Bundle, tmp_path: Path) -> Device:
    """Engines with the profiles of a build for two sequences, which must contain every call."""
    built, max_model_len = TensorRtBuild(batch=2), bundle.manifest.max_model_len
    limits = CallLimits(
        built.batch, min(built.tree_nodes, max_model_len), min(built.prefill, max_model_len), max_model_len
    )
    profiles = {
        graph: [
            {name: (sizes.min, sizes.max) for name, sizes in profile.inputs.items()}
            for profile in profiles_of(symbols_of(graph, limits), bundle.graph(graph).inputs, limits, False)
        ]
        for graph in (*STAGED, LYANNA_DRAFT, LYANNA_RESAMPLE)
        if graph in bundle.manifest.all_graphs
    }
    return tensorrt_device(bundle, tmp_path, profiles).device


@pytest.mark.parametrize("kind", ["cpu", "tensorrt"])
def test_every_graph_equals_the_reference(bundle: Bundle, fakes: Device, kind: str) -> None:
    device = fakes if kind == "tensorrt" else cpu_device(bundle)
    errors = compare_outputs(device, cpu_device(bundle), bundle)
    assert {where.partition(",")[0] for where in errors} == set(GRAPHS)
    assert {"prefill, later chunk, B=1", "one token, B=2", "tree, B=1", "tree, B=2"} <= {
        where.partition(", ")[2] for where in errors if where.startswith(f"{names.VERIFIER},")
    }
    assert all(error <= TOLERANCES["float32"] for error in errors.values())


Values = dict[str, Array]
Fault = Callable[[Values], object]
KEY = names.key_cache(0)
KEPT = names.present(KEY)


def changed(name: str, place: tuple[int, ...], by: float = 1) -> Fault:
    """Adds to one value."""
    return lambda values: np.add.at(values[name], place, np.asarray(by, values[name].dtype))


def put(name: str, place: tuple[int, ...], value: float) -> Fault:
    """Sets one value."""
    return lambda values: values[name].__setitem__(place, value)


def unwritten(values: Values) -> None:
    """The last of the new rows of the first chunk does not change."""
    values[KEPT][0, :, CHUNK - 1] = STALE["float32"]


def swapped(values: Values) -> None:
    """The two best children of a tree change places, but their probabilities do not."""
    values[names.TREE_TOKENS][:, [1, 2]] = values[names.TREE_TOKENS][:, [2, 1]]


@pytest.mark.parametrize(
    ("graph", "before", "after", "message"),
    [
        (names.VERIFIER, None, changed(names.LOGITS, (0, 0, 3), 0.01), "prefill, first chunk, B=1: logits: off by"),
        (names.VERIFIER, None, put(names.hidden_states("last"), (-1, -1, 0), np.nan), "hidden_states.last: off by nan"),
        (names.VERIFIER, None, put(KEPT, (0, 0, -1, 0), 1.0), "row 95 of slot 0 changed"),
        (names.VERIFIER, None, unwritten, "other rows were written"),
        (names.VERIFIER, changed(names.TOKEN_IDS, (0, -1)), None, "verifier, .*, B=1: .*: off by"),
        (LYANNA_DRAFT, changed(names.NUM_PENDING, (0,)), None, "lyanna.draft, 16 rows, B=1"),
        (LYANNA_DRAFT, None, swapped, r"tree.log_probs\[0\]: "),
        (LYANNA_RESAMPLE, None, changed(names.TREE_PARENTS, (0, 4), -1), "lyanna.resample, 1 used, B=1"),
        (names.STEP_PREPARE_TREE, None, changed(names.POSITIONS, (0, -1)), "positions: expected the same bits"),
        (names.STEP_COMPACT_KV, None, changed(KEPT, (2, 0, 0, 0)), "kv.0.key.present: expected the same bits"),
        (names.STEP_STORE_TREES, changed(names.DRAFTED, (0,), -3), None, "stored.tokens.present: expected the same"),
        (LYANNA_COPY_SLOT, None, changed(names.present(names.CHAIN_LOGITS), (1, 0, 0)), "lyanna.copy_slot, 2 to 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_seen(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, graph: str, before: Fault | None, after: Fault | None, message: str
) -> None:
    """Of a call's inputs, or of its outputs."""
    faulty, run = cpu_device(bundle), outputs.run

    def spoiled(device: Device, program: Program, record: GraphRecord, values: Values, sizes: dict[str, int]) -> Values:
        ours = device is faulty
        given = {name: value.copy() for name, value in values.items()}
        if ours and before:
            before(given)
        found = run(device, program, record, given, sizes)
        if ours and after:
            after(found)
        return found

    monkeypatch.setattr(outputs, "run", spoiled)
    with pytest.raises(AssertionError, match=message):
        compare_outputs(faulty, cpu_device(bundle), bundle, [graph])


def spaced(changes: Mapping[int, int]) -> list[Array]:
    """A root and twelve children, with smaller differences than bf16's rounding. changes: other tokens by node."""
    tokens = np.array([changes.get(node, node) for node in range(13)])
    return [tokens, np.array([-1, *[0] * 12]), np.array([0.0, *(-1.2 - 0.2 * node for node in range(12))], np.float32)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({3: 4, 4: 3}, None),
        ({1: 99}, "should not be in the tree"),
        ({1: 12}, "a node is there twice"),
    ],
)
def test_only_nodes_at_the_cut_may_be_others(changes: Mapping[int, int], message: str | None) -> None:
    """In bf16, which rounds by half of the distance from the first to the last."""
    ours, theirs = spaced(changes), spaced({})
    if message is None:
        compare_trees("tree", ours, theirs, TOLERANCES["bfloat16"])
        return
    with pytest.raises(AssertionError, match=message):
        compare_trees("tree", ours, theirs, TOLERANCES["bfloat16"])


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def refused(precision: Precision) -> str | None:
    """The reason why this GPU has no kernels for a precision, or None."""
    try:
        check_precision(precision, find_gpu())
    except BackendError as error:
        return str(error)
    return None


@pytest.mark.gpu
@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_a_gpu_equals_the_cpu(root: Path, tmp_path: Path, backend: Backend, precision: Precision) -> None:
    """CUDA, and TensorRT's engines with the plugin, agree with the bundle's stored weights computed on the CPU."""
    if backend == "onnxruntime" and precision == "fp8":
        pytest.skip("fp8 weights are for TensorRT")
    if reason := missing(backend) or refused(precision):
        pytest.skip(reason)
    bundle = build_tiny(root, tmp_path / "tiny", backend, precision, None)
    print(compare_outputs(open_device(bundle, "cuda"), HostDevice(exact(bundle, tmp_path / "exact")), bundle))
