"""Engines on ONNX Runtime: bound arrays, prepared calls, KV updated in place, refusals."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

from redraft import names
from redraft.cpus import Threads
from redraft.engines import onnxruntime_backend
from redraft.engines.bundle import Bundle, open_bundle
from redraft.engines.calls import Calls
from redraft.engines.onnxruntime_backend import (
    CPU,
    CUDA,
    load_session,
    preload_cuda,
    session_options,
    start_provider,
)
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram, load_program
from redraft.errors import BackendError, BundleError

from .bundles import write_bundle
from .graphs import Decoder

DECODER = Decoder()
CAPACITY = 24
CACHE_BYTES = DECODER.kv_heads * CAPACITY * DECODER.head_dim * 4
COPY_WARNING = f"copying past_cache to present_cache ({CACHE_BYTES} bytes)"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    out = tmp_path_factory.mktemp("engines") / "small"
    write_bundle(out, DECODER)
    return open_bundle(out)


def bound_engine(bundle: Bundle, slots: int = 1, log: str = "error") -> tuple[Calls, dict[str, np.ndarray]]:
    engine = Calls(load_program(bundle, names.VERIFIER, 1, log))
    shape = bundle.manifest.shape
    caches = {
        spec.name: np.full((slots, shape.kv_heads, CAPACITY, shape.head_dim), 7.0, np.float32)
        for spec in engine.inputs
        if spec.name.startswith("kv.")
    }
    for name, buffer in caches.items():
        engine.bind(name, buffer)
    return engine, caches


def run_chain(engine, tokens, past, batch=1):
    """Logits of every row of a chain after `past` committed rows."""
    count = len(tokens)
    call = engine.prepare(B=batch, T=count, R=count)
    call.inputs[names.TOKEN_IDS][:] = tokens
    call.inputs[names.POSITIONS][:] = np.arange(past, past + count)
    call.inputs[names.TREE_MASK][:] = np.tril(np.ones((count, count), bool))
    call.inputs[names.CACHE_LEN][:] = past
    call.inputs[names.KV_LEN][:] = past + count
    call.inputs[names.OUTPUT_ROWS][:] = np.arange(count)
    call.run()
    return call.outputs[names.LOGITS].copy()


def test_steps_over_the_bound_cache_equal_one_prefill(bundle):
    tokens = [5, 9, 3, 40, 2, 17]
    whole = run_chain(bound_engine(bundle)[0], tokens, 0)
    engine, _ = bound_engine(bundle)
    steps = [run_chain(engine, tokens[:3], 0)] + [run_chain(engine, [t], 3 + i) for i, t in enumerate(tokens[3:])]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), whole, atol=1e-5)


def test_cache_is_written_in_place_and_nowhere_else(bundle, capfd):
    engine, caches = bound_engine(bundle, log="warning")
    run_chain(engine, [5, 9, 3], 4)
    for name, buffer in caches.items():
        changed = np.unique(np.nonzero(buffer != 7.0)[2])
        assert changed.tolist() == [4, 5, 6], name
    assert COPY_WARNING not in capfd.readouterr().err


def test_runtime_warns_of_a_cache_that_is_not_updated_in_place(bundle, capfd):
    """The check above can fail: without the aliasing, ONNX Runtime reports it."""
    record = bundle.graph(names.VERIFIER)
    outputs = tuple(replace(spec, in_place_of=None) for spec in record.outputs)
    session = load_session(bundle, names.VERIFIER, 1, log="warning")
    copying = Calls(OnnxRuntimeProgram(session, replace(record, outputs=outputs)))
    call = copying.prepare(B=1, T=1, R=1, C=CAPACITY)
    call.inputs[names.KV_LEN][:] = 1
    call.inputs[names.TREE_MASK][:] = True
    call.run()
    assert COPY_WARNING in capfd.readouterr().err


def test_a_call_may_be_over_any_slot_and_share_another_ones_arrays(bundle):
    engine, caches = bound_engine(bundle, slots=3)
    sizes = {"B": 1, "T": 2, "R": 2}
    assert engine.prepare(R=1, T=2, B=1) is engine.prepare(B=1, T=2, R=1)
    first = engine.make(sizes)
    assert engine.make(sizes) is not first
    assert all(array.ctypes.data % 64 == 0 for array in (*first.inputs.values(), *first.outputs.values()))
    last = engine.make(sizes, 2, first)
    assert last.inputs == first.inputs
    assert last.outputs == first.outputs
    first.inputs[names.TREE_MASK][:] = np.tri(2, dtype=bool)
    first.inputs[names.POSITIONS][:] = np.arange(2)
    first.inputs[names.KV_LEN][:] = 2
    first.inputs[names.OUTPUT_ROWS][:] = np.arange(2)
    first.run()
    logits = first.outputs[names.LOGITS].copy()
    key = caches[names.key_cache(0)]
    assert (key[1:] == 7.0).all()
    first.outputs[names.LOGITS][:] = 0
    last.run()
    assert first.outputs[names.LOGITS].tobytes() == logits.tobytes()
    assert key[2].tobytes() == key[0].tobytes()
    assert (key[1] == 7.0).all()
    with pytest.raises(ValueError, match=r"expected B of at most 3, .* found 4"):
        engine.make(sizes, 3)
    both = run_chain(engine, [5, 9], 0, batch=2)  # a smaller batch uses the first slots
    np.testing.assert_allclose(both[1], run_chain(bound_engine(bundle)[0], [5, 9], 0)[0], atol=1e-5)


def test_wrong_buffers_and_sizes_are_refused_by_name(bundle):
    engine = Calls(load_program(bundle, names.VERIFIER, 1))
    with pytest.raises(ValueError, match=r"bind kv\.0\.key"):
        engine.prepare(B=1, T=1, R=1)
    good = np.zeros((1, DECODER.kv_heads, CAPACITY, DECODER.head_dim), np.float32)
    for name, buffer, message in (
        ("kv.9.key", good, "no input"),
        ("kv.0.key", good.astype(np.float64), "float32"),
        ("kv.0.key", good[..., ::2], "C-contiguous"),
        ("kv.0.key", good[..., :8].copy(), "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.bind(name, buffer)
    engine, _ = bound_engine(bundle)
    with pytest.raises(ValueError, match="B, R, T"):
        engine.prepare(B=1, T=1)
    with pytest.raises(ValueError, match="expected B of at most 1"):
        engine.prepare(B=2, T=1, R=1)


def test_a_graph_that_differs_from_the_manifest_is_refused(bundle):
    record = bundle.manifest.graphs[names.VERIFIER]

    def with_graph(**changes):
        return replace(bundle, manifest=replace(bundle.manifest, graphs={names.VERIFIER: replace(record, **changes)}))

    renamed = (replace(record.inputs[0], name="input_ids"), *record.inputs[1:])
    with pytest.raises(BundleError, match="expected tensor input_ids, found none"):
        load_program(with_graph(inputs=renamed), names.VERIFIER)
    retyped = (replace(record.outputs[0], dtype="float16"), *record.outputs[1:])
    with pytest.raises(BundleError, match="expected logits float16"):
        load_program(with_graph(outputs=retyped), names.VERIFIER)
    with pytest.raises(BundleError, match="does not load"):
        load_program(with_graph(file="tokenizer.json"), names.VERIFIER)
    with pytest.raises(BundleError, match=r"expected a graph 'verifier\.single', found verifier"):
        load_program(bundle, names.VERIFIER_SINGLE)


def test_an_older_onnxruntime_is_refused(bundle):
    newer = replace(bundle, manifest=replace(bundle.manifest, backend_version="99.0.0"))
    with pytest.raises(BundleError, match=r"expected ONNX Runtime 99\.0\.0 or newer"):
        load_program(newer, names.VERIFIER)


def test_threads_stay_on_the_node_unless_their_number_is_given(monkeypatch):
    """The calling thread is not the session's. Each thread of the session moves itself when it starts."""
    if not (tasks := Path("/proc/self/task")).is_dir() or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("no /proc, or only one processor here")
    cpu, deadline = min(os.sched_getaffinity(0)), time.monotonic() + 10
    monkeypatch.setattr(onnxruntime_backend, "default_threads", lambda: Threads(3, (cpu,), ""))
    before = set(tasks.iterdir())
    session = ort.InferenceSession(onnxruntime_backend._PROBE, session_options(None, "error"), providers=[CPU])
    new = [int(task.name) for task in set(tasks.iterdir()) - before]
    while any(os.sched_getaffinity(task) != {cpu} for task in new):
        assert time.monotonic() < deadline, "a thread may leave the node"
    assert (len(new), len(session.get_inputs())) == (2, 1)
    with pytest.raises(RuntimeError, match="does not have configuration"):
        session_options(3, "error").get_session_config_entry("session.intra_op_thread_affinities")


@pytest.fixture
def gpu_build(monkeypatch):
    """Simulate ONNX Runtime's build for CUDA 13 until a session is made. Returns lines that preloading will print."""
    prints = []
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(ort, "cuda_version", "13.0")
    monkeypatch.setattr(ort, "preload_dlls", lambda: print("\n".join(prints)))
    start_provider.cache_clear()
    preload_cuda.cache_clear()
    yield prints
    start_provider.cache_clear()
    preload_cuda.cache_clear()


def sessions(monkeypatch, make):
    """Let `make` make sessions. Returns the arguments of each, by model."""
    made = []

    def session(model, options, **arguments):
        made.append((model, arguments))
        return make(model)

    monkeypatch.setattr(ort, "InferenceSession", session)
    return made


def test_a_session_that_fell_to_the_cpu_is_refused_before_weights_are_read(bundle, monkeypatch, gpu_build, capsys):
    """If a library of the provider is missing, ONNX Runtime logs that and uses the CPU without an error."""
    gpu_build += ["Failed to load libcublas.so.13: not found", "Please follow https://onnxruntime.ai"]
    made = sessions(monkeypatch, lambda model: SimpleNamespace(get_providers=lambda: [CPU]))
    with pytest.raises(BackendError) as caught:
        load_session(bundle, names.VERIFIER, provider=(CUDA, {}))
    assert str(caught.value) == (
        "ONNX Runtime cannot start CUDAExecutionProvider: Failed to load libcublas.so.13: not found; it needs CUDA 13, "
        f"cuDNN 9 and a driver for them: install onnxruntime-gpu[cuda,cudnn]=={ort.__version__}"
    )
    assert [model for model, _ in made] == [onnxruntime_backend._PROBE]
    assert capsys.readouterr().out == ""
    start_provider.cache_clear()  # the provider starts on the probe, but not on the graph
    here = {onnxruntime_backend._PROBE: [CUDA, CPU]}
    made = sessions(monkeypatch, lambda model: SimpleNamespace(get_providers=lambda: here.get(model, [CPU])))
    with pytest.raises(BackendError, match=r"CUDAExecutionProvider: .*; it needs CUDA 13"):
        load_session(bundle, names.VERIFIER, provider=(CUDA, {}))
    assert [arguments["enable_fallback"] for _, arguments in made] == [0, 0]


@pytest.mark.parametrize("starts", [False, True])
def test_a_provider_that_fails_is_named_with_its_reason(starts, bundle, monkeypatch, gpu_build):
    """Also if it started once: errors of a graph have types that are not RuntimeError."""

    def fail(model):
        if starts and model == onnxruntime_backend._PROBE:
            return SimpleNamespace(get_providers=lambda: [CUDA, CPU])
        raise RuntimeError("CUDA failure 35:\n driver too old")

    sessions(monkeypatch, fail)
    with pytest.raises(BackendError, match="CUDAExecutionProvider: CUDA failure 35: driver too old; it needs CUDA 13"):
        load_session(bundle, names.VERIFIER, provider=(CUDA, {}))


def test_libraries_are_loaded_once_before_the_first_session(bundle, monkeypatch, gpu_build):
    order = []
    monkeypatch.setattr(ort, "preload_dlls", lambda: order.append("preload"))
    real = ort.InferenceSession

    def make(model):
        order.append("session")
        session = real(model, providers=[CPU])
        monkeypatch.setattr(session, "get_providers", lambda: [CUDA, CPU])
        return session

    sessions(monkeypatch, make)
    for _ in range(2):
        load_session(bundle, names.VERIFIER, provider=(CUDA, {}))
    assert order == ["preload", "session", "session", "session"]


def test_a_session_that_fails_is_not_made_again_on_the_cpu(bundle, monkeypatch, capfd):
    """ONNX Runtime's own second attempt prints `EP Error` to the standard output."""
    inner = ort.InferenceSession._create_inference_session
    tries = []

    def fail(self, *arguments, **named):
        tries.append(arguments)
        inner(self, *arguments, **named)
        raise RuntimeError("no device")

    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", fail)
    with pytest.raises(BundleError, match="does not load: no device"):
        load_session(bundle, names.VERIFIER)
    assert len(tries) == 1
    assert capfd.readouterr().out == ""
