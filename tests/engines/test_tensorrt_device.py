"""TensorRT's programs on fakes: profiles, captured graphs, sizes on the host, memory, and errors in one line."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from redraft import names, signatures
from redraft.engines import cuda as cuda_module
from redraft.engines import open_device, tensorrt_device
from redraft.engines.bundle import Bundle, open_bundle
from redraft.engines.cuda import Cuda
from redraft.engines.device import Buffer, HostInputs, byte_size
from redraft.engines.gpu import Gpu
from redraft.engines.manifest import GraphRecord
from redraft.engines.tensorrt.builder import TYPES
from redraft.engines.tensorrt.plugin import LOG_PREFIX
from redraft.engines.tensorrt.target import Target
from redraft.engines.tensorrt_device import TensorRtDevice
from redraft.engines.tensorrt_records import EngineRecord, TensorRtRecord
from redraft.errors import BackendError, BundleError, UsageError
from tests.runtime.devices import tensorrt_device as over_fakes
from tests.standins.cuda import FakeCuda, Status
from tests.standins.tensorrt import (
    Context,
    Engine,
    FakeTensorRt,
    Profile,
    RuntimeCache,
    RuntimeConfig,
    write_engine,
)
from tests.standins.tensorrt_build import ILogger

from .bundles import buffers_of, manifest_of, write_bundle
from .graphs import Decoder

DECODER = Decoder(layers=1, vocabulary=11)
CAPACITY = 32
Make = Callable[..., TensorRtDevice]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("bundle") / "small"
    write_bundle(out, DECODER)
    return open_bundle(out)


@pytest.fixture
def make(bundle: Bundle, tmp_path: Path) -> Make:
    """A device with an engine of the verifier."""

    def made(profiles: Sequence[Profile] = ({},), host: Sequence[str] = (), total: int = 1 << 30) -> TensorRtDevice:
        cuda = FakeCuda(total)
        file = write_engine(tmp_path / "v.engine", (bundle.path / "verifier.onnx").resolve(), profiles, host, True)
        return TensorRtDevice(bundle, {names.VERIFIER: file}, Cuda(cuda, 1 << 12), FakeTensorRt(cuda))

    return made


def fakes(device: TensorRtDevice) -> tuple[FakeCuda, FakeTensorRt]:
    return device.tensorrt.cuda, device.tensorrt


def verifier_buffers(device: TensorRtDevice, nodes: int = 3, rows: int = 3, sequences: int = 1) -> dict[str, Buffer]:
    buffers = buffers_of(device, device.program(names.VERIFIER), B=sequences, T=nodes, R=rows, C=CAPACITY)
    buffers[names.TREE_MASK].write(np.tri(nodes, dtype=np.bool_)[None].repeat(sequences, 0))
    buffers[names.KV_LEN].write(np.array([nodes]))
    return buffers


def lengths(device: TensorRtDevice, buffers: dict[str, Buffer]) -> HostInputs:
    """An inbox of the lengths in place of their buffers."""
    host_inputs = device.host_inputs(**{names.KV_LEN: (1,), names.CACHE_LEN: buffers[names.CACHE_LEN].shape})
    buffers.update(host_inputs.buffers)
    return host_inputs


PREFILL: Profile = {names.TOKEN_IDS: ([1, 1], [1, 16]), names.OUTPUT_ROWS: ([1, 1], [1, 1])}
TOKEN: Profile = {names.TOKEN_IDS: ([1, 1], [1, 1], [64, 1]), names.OUTPUT_ROWS: ([1, 1], [1, 1], [64, 1])}
"""Far wider than the prompt's, and still the one for a token."""
TREE: Profile = {names.TOKEN_IDS: ([1, 2], [2, 8]), names.OUTPUT_ROWS: ([1, 2], [2, 8])}


@pytest.mark.parametrize(
    ("sequences", "nodes", "rows", "profile"), [(1, 16, 1, 0), (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 2), (2, 8, 8, 2)]
)
def test_of_profiles_that_hold_the_shapes_the_one_tuned_for_the_nearest_is_taken(
    make: Make, sequences: int, nodes: int, rows: int, profile: int
) -> None:
    device = make([PREFILL, TOKEN, TREE])
    device.program(names.VERIFIER).bind(verifier_buffers(device, nodes, rows, sequences))
    assert fakes(device)[1].contexts[-1].profile == profile


def test_what_a_chains_nodes_pass_on_of_a_buffer_is_where_the_buffer_is(
    bundle: Bundle, make: Make, tmp_path: Path
) -> None:
    cache = names.value_cache(0)
    device = with_output(bundle, make, tmp_path, names.link(cache, 3))
    buffers = verifier_buffers(device)
    device.program(names.VERIFIER).bind(buffers)()
    assert fakes(device)[1].contexts[-1].addresses[names.link(cache, 3)] == buffers[cache].address


@pytest.mark.parametrize("name", ["kv.0.value.link.x", "tree_mask.link.1", "kv.0.value.extra"])
def test_any_other_output_is_refused(bundle: Bundle, make: Make, tmp_path: Path, name: str) -> None:
    device = with_output(bundle, make, tmp_path, name)
    with pytest.raises(BundleError, match=f"engine of verifier: unexpected tensor {re.escape(name)}"):
        device.program(names.VERIFIER)


def with_output(bundle: Bundle, make: Make, folder: Path, name: str) -> TensorRtDevice:
    """An engine of the verifier that gives one of its KV buffers twice."""
    model = onnx.load(bundle.path / "verifier.onnx")
    cache = names.present(names.value_cache(0))
    model.graph.node.append(onnx.helper.make_node("Identity", [cache], [name]))
    given = next(output for output in model.graph.output if output.name == cache)
    model.graph.output.add().CopyFrom(given)
    model.graph.output[-1].name = name
    onnx.save(model, folder / "more.onnx")
    device = make()
    write_engine(folder / "v.engine", folder / "more.onnx", updates=True)
    return device


@pytest.mark.parametrize(("sequences", "nodes"), [(1, 9), (65, 8)])
def test_a_tree_larger_than_every_profile_is_refused_in_one_line(make: Make, sequences: int, nodes: int) -> None:
    device = make([PREFILL, TOKEN, TREE])
    buffers = verifier_buffers(device, nodes, nodes, sequences)
    with pytest.raises(
        BackendError, match=f"no optimization profile of verifier takes B={sequences}, T={nodes}"
    ) as error:
        device.program(names.VERIFIER).bind(buffers)
    assert "\n" not in str(error.value)


def test_an_engine_is_loaded_once_and_each_set_of_shapes_has_a_context(make: Make) -> None:
    device = make()
    assert device.program(names.VERIFIER) is device.program(names.VERIFIER)
    first, second = verifier_buffers(device, 3), verifier_buffers(device, 5, 5)
    for buffers in (first, second):
        device.program(names.VERIFIER).bind(buffers)()
    shapes = [context.shapes[names.TOKEN_IDS] for context in fakes(device)[1].contexts]
    assert shapes == [(1, 3), (1, 5)]


def test_a_chain_is_captured_after_its_first_run_and_replayed(make: Make) -> None:
    """What the device reads may change between replays."""
    device = make()
    cuda, tensorrt = fakes(device)
    buffers = verifier_buffers(device)
    run = device.program(names.VERIFIER).bind(buffers)
    chain = device.chain([device.chain([run])])
    said = []
    for token in (3, 4, 5, 3):
        buffers[names.TOKEN_IDS].write(np.full((1, 3), token))
        chain()
        said.append(buffers[names.LOGITS].read())
    assert (cuda.launches, tensorrt.contexts[0].enqueued) == (3, 2)
    np.testing.assert_array_equal(said[0], said[3])
    assert not np.array_equal(said[0], said[1])


def test_sizes_that_an_engine_reads_on_the_host_are_never_stale(make: Make) -> None:
    """Such a step is not captured: the graph would keep the size of the first."""
    device = make(host=[names.KV_LEN])
    device.program(names.VERIFIER)  # before its file is written over
    plain = make()
    cuda, tensorrt = fakes(device)
    found, expected = [], []
    for where, outputs in ((device, found), (plain, expected)):
        buffers = verifier_buffers(where)
        host_inputs = lengths(where, buffers)
        chain = where.chain([host_inputs.send, where.program(names.VERIFIER).bind(buffers)])
        for past in (0, 3, 6):
            values = host_inputs.open()
            values[names.CACHE_LEN][:], values[names.KV_LEN][:] = past, past + 3
            chain()
            outputs.append(buffers[names.LOGITS].read())
    assert (cuda.launches, tensorrt.contexts[0].enqueued) == (0, 3)
    np.testing.assert_array_equal(found, expected)


def test_what_cannot_be_captured_runs_in_order_and_says_so_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    device = make()
    cuda, _ = fakes(device)
    buffers = verifier_buffers(device)
    run = device.program(names.VERIFIER).bind(buffers)

    def synchronizes() -> None:
        run()
        device.cuda.synchronize()

    synchronizes.capturable = True  # type: ignore[attr-defined]
    chains = [device.chain([synchronizes]), device.chain([synchronizes])]
    said = []
    for _ in range(3):
        for chain in chains:
            chain()
            said.append(buffers[names.LOGITS].read())
    assert cuda.launches == 0
    assert cuda.captured is None
    assert all(np.array_equal(said[0], other) for other in said)
    lines = [record.getMessage() for record in caplog.records if "captured" in record.getMessage()]
    assert len(lines) == 1
    assert "cudaErrorStreamCaptureUnsupported" in lines[0]


def test_memory_is_given_back(make: Make) -> None:
    """That of buffers with their last part, and that of programs once they are done."""
    device = make()
    cuda, _ = fakes(device)
    held = cuda.held()
    buffer = device.empty("float32", 100, 10)
    part = buffer.part(10, 10)
    del buffer
    assert cuda.held() == held + 4000
    del part
    assert cuda.held() == held
    done: list[bool] = []
    gone: list[list[bool]] = []
    weakref.finalize(device.program(names.VERIFIER), lambda: gone.append([*done]))
    cuda.put(lambda: done.append(True))
    device.close()
    assert gone == [[True]]


def test_at_the_end_of_the_process_the_driver_gives_all_back(root: Path) -> None:
    """A call of ours could come when the driver has gone already."""
    script = (
        "from redraft.engines.cuda import Cuda, Memory; from tests.standins.cuda import FakeCuda\n"
        "FakeCuda.cudaFree = FakeCuda.cudaFreeHost = FakeCuda.cudaStreamDestroy = lambda *_: print('called')\n"
        "cuda = Cuda(FakeCuda()); memory = Memory(cuda, 8)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout + done.stderr == ""


def test_buffers_that_do_not_fit_are_refused_part_by_part(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    device = make(total=8 << 20)
    with caplog.at_level(logging.INFO, "redraft.cuda"):
        device.expect({"KV": 4 << 20, "tables": 3 << 20})
    assert "KV 4.0 MiB, tables 3.0 MiB; 8.0 MiB free" in caplog.text
    with pytest.raises(
        BackendError, match=r"9\.0 MiB of GPU memory needed \(KV 6\.0 MiB, tables 3\.0 MiB\), 8\.0 free"
    ):
        device.expect({"KV": 6 << 20, "tables": 3 << 20})
    with pytest.raises(BackendError, match=r"cudaErrorMemoryAllocation: 16\.0 MiB asked for, 8\.0 MiB free"):
        device.empty("uint8", 16 << 20)
    assert fakes(device)[0].kept is Status.cudaSuccess, "CUDA would report the error again for another call"


def test_what_is_written_beside_a_buffer_is_written_where_others_are(lyanna_bundle: Path, tmp_path: Path) -> None:
    """Runs never are at once, and each shape of a step would have a copy of all rows that wait."""
    made = over_fakes(open_bundle(lyanna_bundle), tmp_path)
    program = made.device.program(names.STEP_GATHER_FEATURES)
    buffers = buffers_of(made.device, program, B=1, F=2, T=2, W=512)
    held, runs = [made.cuda.held()], []
    for _ in range(2):
        runs.append(program.bind(buffers))
        held.append(made.cuda.held())
    waiting = buffers[names.PENDING_FEATURES]
    assert np.diff(held).tolist() == [byte_size(waiting.dtype, waiting.shape), 0]
    assert all(run.copies for run in runs)


def test_what_tensorrt_logged_last_is_the_reason(make: Make) -> None:
    device = make()
    run = device.program(names.VERIFIER).bind(verifier_buffers(device))
    fakes(device)[1].contexts[0].addresses.popitem()
    with pytest.raises(BackendError, match="TensorRT refuses verifier: this cannot be enqueued"):
        run()


def test_only_the_plugins_warnings_are_warnings(root: Path, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """TensorRT warns of many things; the plugin warns of caches that every call copies."""
    assert f'"{LOG_PREFIX}"' in (root / "plugins" / "tensorrt" / "log.cpp").read_text()
    device = make()
    logger = fakes(device)[1].logger
    with caplog.at_level(logging.INFO, "redraft.tensorrt"):
        logger.log(FakeTensorRt.ILogger.WARNING, "another default stream")
        logger.log(FakeTensorRt.ILogger.WARNING, f"{LOG_PREFIX}every call copies each cache whole")
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    assert device.reason == "no reason given"


def test_what_the_bindings_raise_is_one_line(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most calls return False on failure; the choice of a profile raises a RuntimeError."""
    device = make([PREFILL, TOKEN, TREE])
    program = device.program(names.VERIFIER)
    monkeypatch.setattr(program, "_profile", lambda inputs, buffers: 3)
    with pytest.raises(BackendError, match=r"^TensorRT refuses verifier: profile 3 is out of range$"):
        program.bind(verifier_buffers(device))


def test_a_runtime_that_tensorrt_cannot_make_is_one_line(bundle: Bundle) -> None:
    """As with a driver that is too old for TensorRT's CUDA: pybind11 raises a TypeError for the null object."""
    tensorrt = FakeTensorRt(cuda := FakeCuda())
    tensorrt.null = "CUDA initialization failure\n with error: 35"
    with pytest.raises(BackendError, match=r"^TensorRT does not start: CUDA initialization failure with error: 35$"):
        TensorRtDevice(bundle, {}, Cuda(cuda), tensorrt)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(b"no engine"), "does not load the engine of verifier: magic tag does not match"),
        (lambda file: file.unlink(), "the engine of verifier cannot be read"),
    ],
)
def test_an_engine_that_does_not_load_is_refused(
    make: Make, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    device = make()
    damage(tmp_path / "v.engine")
    with pytest.raises(BundleError, match=message) as error:
        device.program(names.VERIFIER)
    assert "\n" not in str(error.value)


def test_a_graph_without_an_engine_is_named_with_what_mends_it(bundle: Bundle, make: Make) -> None:
    record = bundle.graph(names.VERIFIER)
    of_graphs = signatures.step_signatures(DECODER.shape, gathers=False)
    graphs = {names.VERIFIER: record, **{name: GraphRecord("x.onnx", *of_graphs[name]) for name in of_graphs}}
    device = make()
    device._bundle = Bundle(bundle.path, manifest_of(DECODER, graphs=graphs))
    with pytest.raises(
        BundleError, match=r"expected an engine of step\.prepare_tree, found verifier; run `redraft build"
    ):
        device.program(names.STEP_PREPARE_TREE)
    with pytest.raises(BundleError, match="our kernels do that as well: run `make plugins`"):
        device.program(names.STEP_COMPACT_KV)


# --- opening ---------------------------------------------------------------------------------------------------------


def with_engines(bundle: Bundle, tmp_path: Path, **changes: object) -> Bundle:
    """The bundle with the record of an engine, which lies elsewhere."""
    values = {
        "version": "10.13.3", "gpu": "GPU", "compute_capability": "9.0", "attention": "plugin",
        "plugin": "0" * 64, "plugin_file": "plugin.so",
        "engines": {names.VERIFIER: EngineRecord(str(tmp_path / "v.engine"), "v.onnx", ())},
    }  # fmt: skip
    record = TensorRtRecord(**{**values, **changes})  # type: ignore[arg-type]
    manifest = manifest_of(DECODER, backend="tensorrt", backend_version="10.13.3", tensorrt=record)
    return Bundle(bundle.path, manifest)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, bundle: Bundle, tmp_path: Path) -> dict[str, Any]:
    """Fakes in place of GPU, CUDA and TensorRT; what was asked of them."""
    cuda, asked = FakeCuda(), {}
    tensorrt = FakeTensorRt(cuda)
    write_engine(tmp_path / "v.engine", (bundle.path / "verifier.onnx").resolve(), updates=True)
    for name, fake in {
        "find_target": lambda gpu, product: Target("10.13.3", Gpu("GPU", (9, 0), 1, 1)), "find_gpu": lambda: None,
        "import_tensorrt": lambda product: tensorrt, "open_cuda": lambda: Cuda(cuda),
        "load_plugin": lambda path, module: asked.update(plugin=path),
    }.items():  # fmt: skip
        monkeypatch.setattr(tensorrt_device, name, fake)
    return asked


def test_a_bundle_of_tensorrts_is_opened_with_its_plugin(
    bundle: Bundle, tmp_path: Path, installed: dict[str, Any]
) -> None:
    """Not on another GPU than it was built for."""
    device = open_device(with_engines(bundle, tmp_path), "cuda")
    assert isinstance(device, TensorRtDevice)
    assert installed == {"plugin": bundle.path / "plugin.so"}
    device.program(names.VERIFIER).bind(verifier_buffers(device))()
    assert not hasattr(device.tensorrt, "engine_host_code_allowed")
    installed.clear()
    device = open_device(with_engines(bundle, tmp_path, plugin_file=""), "cuda")  # the plugin is part of the engines
    assert isinstance(device, TensorRtDevice)
    assert device.tensorrt.engine_host_code_allowed
    assert not installed
    with pytest.raises(BackendError, match=r"the engines are for TensorRT .* on Another"):
        open_device(with_engines(bundle, tmp_path, gpu="Another"), "cuda")
    with pytest.raises(UsageError, match="unknown device 'tpu'; choose one of cpu, cuda"):
        open_device(bundle, "tpu")


def test_without_a_driver_nothing_of_cuda_is_touched(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> Gpu:
        raise BackendError("no CUDA driver")

    monkeypatch.setattr(cuda_module, "find_gpu", absent)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(BackendError, match="no CUDA driver"):
        cuda_module.open_cuda()


def test_what_was_compiled_for_the_gpu_is_kept(bundle: Bundle, make: Make, tmp_path: Path) -> None:
    """Of an engine that was built ahead. A cache that the library refuses is written anew."""
    digest = bundle.manifest.files["verifier.onnx"].sha256
    engine, caches = tmp_path / "verifier.onnx", tmp_path / "caches"
    make()
    (tmp_path / "v.engine").rename(engine)  # named as a file of the manifest
    found = []
    for _ in range(2):
        cuda = FakeCuda()
        device = TensorRtDevice(
            bundle, {names.VERIFIER: engine}, Cuda(cuda), tensorrt := FakeTensorRt(cuda), caches=caches
        )
        device.program(names.VERIFIER).bind(verifier_buffers(device))()
        found += [cache.loaded for cache in tensorrt.runtime_caches]
        device.close()
        assert [file.name for file in caches.iterdir()] == [f"{digest}.cache"]
    assert found == [b"", b"compiled"]


# --- the real packages -----------------------------------------------------------------------------------------------

RTX_ONLY = ("IRuntimeConfig", "IRuntimeCache", "create_runtime_config")


def called() -> list[tuple[str, str]]:
    """Classes of TensorRT's package and their members that the device uses: those of the stand-ins, and values."""
    fakes = {
        "ICudaEngine": Engine, "IExecutionContext": Context, "IRuntimeConfig": RuntimeConfig,
        "IRuntimeCache": RuntimeCache, "ILogger": ILogger,
    }  # fmt: skip
    found = [(kind, name) for kind, fake in fakes.items() for name in vars(fake) if not name.startswith("_")]
    return [
        *found, *(("DataType", name) for name in TYPES.values()), ("TensorLocation", "HOST"),
        ("ExecutionContextAllocationStrategy", "USER_MANAGED"), ("Runtime", "deserialize_cuda_engine"),
        ("Runtime", "engine_host_code_allowed"),
    ]  # fmt: skip


def test_cuda_python_has_all_that_the_stand_in_has() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert [name for name in vars(FakeCuda) if name.startswith("cuda") and not hasattr(runtime, name)] == []
    for group in ("cudaMemcpyKind", "cudaStreamCaptureMode"):
        assert set(vars(getattr(FakeCuda, group))) <= set(dir(getattr(runtime, group)))


def test_tensorrt_for_rtx_has_all_that_is_called() -> None:
    rtx = pytest.importorskip("tensorrt_rtx_bindings")
    assert [name for group, name in called() if not hasattr(getattr(rtx, group), name)] == []


@pytest.mark.skipif("REDRAFT_TENSORRT_PYTHON" not in os.environ, reason="REDRAFT_TENSORRT_PYTHON names no interpreter")
def test_tensorrt_has_all_that_is_called() -> None:
    """In the interpreter named, where TensorRT or its lean runtime is installed; no driver is needed."""
    program = (
        "import importlib.util, json, sys\n"
        "name = 'tensorrt' if importlib.util.find_spec('tensorrt') else 'tensorrt_lean'\n"
        "found = __import__(name)\n"
        "wanted = json.loads(sys.argv[1])\n"
        "print(json.dumps([name for group, name in wanted if not hasattr(getattr(found, group), name)]))\n"
    )
    wanted = json.dumps([each for each in called() if not {*each} & {*RTX_ONLY}])
    python = os.environ["REDRAFT_TENSORRT_PYTHON"]
    result = subprocess.run([python, "-c", program, wanted], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []
