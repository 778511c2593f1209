"""Calls of TensorRT's builder, by a stand-in that records. tests/cli/test_tensorrt.py has a real one."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redraft.engines.gpu import Gpu
from redraft.engines.tensorrt.builder import EngineBuild, build_engine
from redraft.engines.tensorrt.target import Target
from redraft.engines.tensorrt_records import Profile, Range
from redraft.errors import BackendError
from redraft.names import TensorSpec
from tests.standins.tensorrt import FakeTensorRt
from tests.standins.tensorrt_build import OptimizationProfile

TREE = Profile("tree", {"tokens": Range((1, 2), (1, 8), (2, 8)), "kv_len": Range((2,), (9,), (64,))})
TOKEN = Profile("token", {"tokens": Range((1, 1), (1, 1), (2, 1)), "kv_len": Range((1,), (9,), (64,))})
KV_LEN = TensorSpec("kv_len", "int64", (1,))
Install = Callable[..., FakeTensorRt]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a stand-in in the place that `import tensorrt` finds."""

    def put(**options: object) -> FakeTensorRt:
        fake = FakeTensorRt(version="10.13.3.9", inputs={"tokens": False, "kv_len": True}, **options)
        monkeypatch.setitem(sys.modules, "tensorrt", fake)
        return fake

    return put


@pytest.fixture
def build(tmp_path: Path) -> EngineBuild:
    target = Target("10.13.3.9", Gpu("NVIDIA H200", (9, 0), 1, 1))
    inputs = (TensorSpec("tokens", "int64", ("B", "T")), KV_LEN)
    times = tmp_path / "cache" / "times.cache"
    return EngineBuild(tmp_path / "verifier.tensorrt.onnx", (TOKEN, TREE), times, target, inputs, ())


def test_a_strongly_typed_network_is_built_with_all_profiles(install: Install, build: EngineBuild) -> None:
    fake = install()
    engine = build_engine(build)
    assert bytes(engine) == b"engine"
    assert engine.obj is fake.engine  # an engine is as large as the weights, so it is not copied
    assert fake.flags == [1 << fake.NetworkDefinitionCreationFlag.STRONGLY_TYPED]
    assert ("parse_from_file", str(build.graph)) in fake.calls
    token, tree = fake.configs[0].profiles
    assert tree.shapes == {"tokens": [(1, 2), (1, 8), (2, 8)]}
    assert tree.values == {"kv_len": [(2,), (9,), (64,)]}  # an input with sizes as values
    assert token.shapes["tokens"] == [(1, 1), (1, 1), (2, 1)]
    assert fake.configs[0].limits == {fake.MemoryPoolType.WORKSPACE: build.workspace_bytes}
    assert fake.configs[0].max_aux_streams == 0  # each of many contexts would make its own
    assert not fake.configs[0].flags  # without TF32 too, which TensorRT sets
    assert "load_library" not in dict(fake.calls)


def test_tensorrts_log_goes_to_pythons_logging(
    install: Install, build: EngineBuild, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is on the standard output, where `--json` has one object."""
    install(failure="Error Code 9: out of memory")
    with caplog.at_level(logging.INFO, "redraft.tensorrt"), pytest.raises(BackendError):
        build_engine(build)
    assert capfd.readouterr().out == ""
    logged = {record.levelno: record.getMessage() for record in caplog.records}
    assert logged == {logging.WARNING: "Error Code 9: out of memory", logging.INFO: "a warning after it"}, logged


WRONG = {name: Profile("tree", {**TREE.inputs, name: Range((9,), (1,), (2,))}) for name in TREE.inputs}


@pytest.mark.parametrize(
    ("options", "change", "line"),
    [
        ({}, {"inputs": (TensorSpec("tokens", "int32", ("B", "T")),)}, "expected tokens int32, found"),
        ({}, {"inputs": (TensorSpec("tokens", "int64", ("B", "T")),)}, "unexpected tensor kv_len"),
        ({}, {"inputs": (TensorSpec("tokens", "int64", ("B",)), KV_LEN)}, r"expected tokens \['B'\], found \[-1, -1\]"),
        ({}, {"outputs": (TensorSpec("logits", "float32", ("B", "T")),)}, "expected tensor logits, found none"),
        ({}, {"profiles": (WRONG["tokens"],)}, ".* is inconsistent with other"),
        ({}, {"profiles": (WRONG["kv_len"],)}, ".* is inconsistent with other"),
        ({"error": "node 3:\n unknown"}, {}, r"node 'l0\.attended' \(Attention\): node 3: unknown; see its log"),
        ({"null": "CUDA initialization failure with error: 35."}, {}, r"CUDA initialization .* error: 35\.; see"),
    ],
)
def test_a_network_that_is_refused_or_not_the_manifests_is_one_line(
    options: dict[str, str], change: dict[str, Any], line: str, install: Install, build: EngineBuild
) -> None:
    """The bindings raise a RuntimeError for a range out of order, and pybind11 a TypeError for a null object."""
    install(**options)
    with pytest.raises(BackendError, match=rf"cannot build verifier\.tensorrt\.onnx: {line}"):
        build_engine(replace(build, **change))


def test_profiles_are_read_back(install: Install, build: EngineBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setattr(OptimizationProfile, "get_shape", lambda self, name: [(1, 1), (1, 1), (1, 1)])
    with pytest.raises(BackendError, match=r"expected tokens Range.* in profile tree, found"):
        build_engine(replace(build, profiles=(TREE,)))


def test_an_interrupt_ends_the_build_at_its_next_step(install: Install, build: EngineBuild) -> None:
    """TensorRT drops exceptions of Python callbacks."""

    def interrupted() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            pytest.fail("raised, though TensorRT would have dropped it")

    fake = install(during=interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(build)
    finally:
        signal.signal(signal.SIGINT, before)
    assert fake.steps == 2


def test_the_plugin_is_registered_once_before_the_first_graph_is_parsed(install: Install, build: EngineBuild) -> None:
    """TensorRT returns nothing for a library with plugins that it already knows."""
    fake = install()
    for _ in range(2):
        build_engine(replace(build, plugin=Path("/p/lib.so")))
    assert [name for name, _ in fake.calls] == ["load_library", "parse_from_file", "parse_from_file"]
    assert [config.plugins_to_serialize for config in fake.configs] == [[], []]


def test_an_embedded_plugin_makes_the_engine_version_compatible(install: Install, build: EngineBuild) -> None:
    fake = install()
    build_engine(replace(build, plugin=Path("/p/lib.so"), embed_plugin=True))
    assert fake.configs[0].plugins_to_serialize == ["/p/lib.so"]
    assert fake.configs[0].flags == {fake.BuilderFlag.VERSION_COMPATIBLE}


def test_measured_times_are_saved_and_read_by_the_next_build(install: Install, build: EngineBuild) -> None:
    install()
    build_engine(build)
    assert build.timing_cache.read_bytes() == b"times"
    fake = install()
    build_engine(build)
    assert fake.configs[0].loaded_times[0] == b"times"  # the second build starts from these


def test_why_an_engine_is_not_built_is_tensorrts_own_line(install: Install, build: EngineBuild) -> None:
    """The build's last error, not one from an earlier engine."""
    fake = install(failure="Error Code 2: no implementation\nfor node l0.attended")
    with pytest.raises(BackendError, match=r"onnx: Error Code 2: no implementation for node l0\.attended; see its log"):
        build_engine(build)
    fake.failure = ""
    assert bytes(build_engine(build)) == b"engine"
    fake.failure = "Error Code 9: out of memory"
    with pytest.raises(BackendError, match=r"onnx: Error Code 9: out of memory; see its log"):
        build_engine(build)
    assert len({id(logger) for logger in fake.loggers}) == 1  # TensorRT keeps the first
    fake._log = lambda *errors: None  # type: ignore[method-assign]
    with pytest.raises(BackendError, match=r"cannot build verifier\.tensorrt\.onnx: no reason given"):
        build_engine(build)
