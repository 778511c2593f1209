"""The half of the stand-in for TensorRT that builds engines: it records its calls.

Names and signatures are those of the real bindings, as python/src of NVIDIA/TensorRT has them in 10.9 and 11.1. Their
behaviour is not: `tests.standins.tensorrt.FakeTensorRt` is the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_char
from enum import IntEnum
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import onnx


class BuilderFlag(IntEnum):
    TF32 = 7
    VERSION_COMPATIBLE = 13


class MemoryPoolType(IntEnum):
    WORKSPACE = 0


class ProfilingVerbosity(IntEnum):
    DETAILED = 2


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1


class Severity(IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class IProgressMonitor:
    """Base class of a monitor; one that does not call its __init__ cannot be used."""

    def __init__(self) -> None:
        self.ready = True


class ILogger:
    """Base class of a logger; one that does not call its __init__ cannot be used."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity
    Severity = Severity

    def __init__(self) -> None:
        self.ready = True


class OptimizationProfile:
    """Refuses ranges that are out of order by a RuntimeError, like the bindings."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Any, Any, Any]] = {}
        self.values: dict[str, tuple[Any, Any, Any]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        if not _ordered(min, opt, max):
            raise RuntimeError("Shape provided for opt is inconsistent with other shapes.")
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))

    def set_shape_input(self, input: str, min: Any, opt: Any, max: Any) -> None:
        if not _ordered(min, opt, max):
            raise RuntimeError("opt input provided for shape tensor is inconsistent with other inputs.")
        self.values[input] = (tuple(min), tuple(opt), tuple(max))

    def get_shape(self, input: str) -> list[tuple[int, ...]]:
        return list(self.shapes[input])

    def get_shape_input(self, input: str) -> list[tuple[int, ...]]:
        return list(self.values[input])


def _ordered(*ranges: Any) -> bool:
    return all(list(sizes) == sorted(sizes) for sizes in zip(*ranges, strict=True))


class TimingCache:
    def serialize(self) -> Any:
        return b"times"


HostMemory = c_char * 6
"""A buffer of TensorRT's, which has none of Python's types."""


class BuilderConfig:
    def __init__(self) -> None:
        self.flags: set[int] = {BuilderFlag.TF32}
        self.profiles: list[OptimizationProfile] = []
        self.limits: dict[int, int] = {}
        self.plugins_to_serialize: list[str] = []
        self.loaded_times: list[bytes] = []
        self.profiling_verbosity = ProfilingVerbosity.DETAILED
        self.max_aux_streams = -1
        self.progress_monitor: Any = None

    def set_flag(self, flag: int) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: int) -> None:
        self.flags.discard(flag)

    def add_optimization_profile(self, profile: OptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def set_memory_pool_limit(self, pool: int, pool_size: int) -> None:
        self.limits[pool] = pool_size

    def create_timing_cache(self, serialized_timing_cache: bytes) -> TimingCache:
        self.loaded_times.append(bytes(serialized_timing_cache))
        return TimingCache()

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        return True

    def get_timing_cache(self) -> TimingCache:
        return TimingCache()


class DataType(IntEnum):
    FLOAT, HALF, BF16, INT64, INT32, BOOL, INT8, UINT8 = range(8)


_TYPES = {
    onnx.TensorProto.FLOAT: DataType.FLOAT, onnx.TensorProto.FLOAT16: DataType.HALF,
    onnx.TensorProto.BOOL: DataType.BOOL, onnx.TensorProto.INT64: DataType.INT64, onnx.TensorProto.INT8: DataType.INT8,
}  # fmt: skip


class Network:
    """Inputs and outputs, and no layers."""

    def __init__(self, inputs: Mapping[str, bool]) -> None:
        self._inputs = [
            SimpleNamespace(name=n, is_shape_tensor=s, shape=(1,) if s else (-1, -1), dtype=DataType.INT64)
            for n, s in inputs.items()
        ]
        self._outputs: list[SimpleNamespace] = []

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def parse(self, model: str) -> None:
        """Take the inputs and outputs of a graph's file; none is a shape tensor."""
        graph = onnx.load(model, load_external_data=False).graph
        for tensors, values in ((self._inputs, graph.input), (self._outputs, graph.output)):
            for value in values:
                kind = value.type.tensor_type
                shape, dtype = tuple(dim.dim_value or -1 for dim in kind.shape.dim), _TYPES[kind.elem_type]
                tensors.append(SimpleNamespace(name=value.name, is_shape_tensor=False, shape=shape, dtype=dtype))

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def get_output(self, index: int) -> Any:
        return self._outputs[index]

    def get_input(self, index: int) -> Any:
        return self._inputs[index]


class FakeBuilding:
    """Builders, networks and parsers. Their arguments are in `calls`, `configs` and `flags`.

    inputs:  the network's inputs, True for shape tensors. None takes those of the graph that is parsed.
    error:   the parser's message, if it fails.   failure: the builder's log line, if it builds nothing.
    null:    the log line if no builder can be made.
    during:  called before each step of the builder but the first.
    """

    BuilderFlag = BuilderFlag
    MemoryPoolType = MemoryPoolType
    ProfilingVerbosity = ProfilingVerbosity
    NetworkDefinitionCreationFlag = NetworkDefinitionCreationFlag
    DataType = DataType
    ILogger = ILogger
    IProgressMonitor = IProgressMonitor
    Logger = ILogger
    __spec__ = ModuleSpec("tensorrt", None)  # libraries that look whether TensorRT is there refuse none
    __path__ = ()

    def __init__(
        self, version: str = "10.9.0.34", inputs: Mapping[str, bool] | None = {}, error: str = "", loads: bool = True,
        failure: str = "", during: Callable[[], None] = lambda: None, null: str = "",
    ) -> None:  # fmt: skip
        self.__version__ = version
        self.inputs = inputs
        self.error = error
        self.failure = failure
        self.during = during
        self.null = null
        self.steps = 0
        self.loggers: list[ILogger] = []
        self.loads = loads
        self.networks: list[Network] = []
        self.registered = False
        self.calls: list[tuple[str, Any]] = []
        self.configs: list[BuilderConfig] = []
        self.flags: list[int] = []
        self.engine = HostMemory(*b"engine")

    def get_plugin_registry(self) -> Any:
        return SimpleNamespace(load_library=self._load_library, get_creator=self._get_creator)

    def _get_creator(self, type: str, version: str, plugin_namespace: str) -> Any:
        return object() if (type, version, plugin_namespace) == ("TreeAttention", "1", "") and self.registered else None

    def _load_library(self, plugin_path: str) -> Any:
        """Return nothing for a library with plugins that are registered already, like TensorRT."""
        self.calls.append(("load_library", plugin_path))
        if self.registered or not self.loads:
            return None
        self.registered = True
        return object()

    def Builder(self, logger: ILogger) -> Any:
        self.loggers.append(logger)
        if self.null:
            self._log(self.null)
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return SimpleNamespace(
            create_network=self._network, create_builder_config=self._config,
            create_optimization_profile=OptimizationProfile, build_serialized_network=self._build,
        )  # fmt: skip

    def OnnxParser(self, network: Any, logger: ILogger) -> Any:
        return SimpleNamespace(
            parse_from_file=self._parse,
            num_errors=1 if self.error else 0,
            get_error=lambda index: SimpleNamespace(
                node_name=lambda: "l0.attended", node_operator=lambda: "Attention", desc=lambda: self.error
            ),
        )

    def _network(self, flags: int = 0) -> Network:
        self.flags.append(flags)
        self.networks.append(Network(self.inputs or {}))
        return self.networks[-1]

    def _config(self) -> BuilderConfig:
        self.configs.append(BuilderConfig())
        return self.configs[-1]

    def _parse(self, model: str) -> bool:
        self.calls.append(("parse_from_file", model))
        if self.error:
            self._log(f"Failed to parse ONNX model from file: {model}!", f"ERROR: importer.cpp:1\n{self.error}")
        elif self.inputs is None:
            self.networks[-1].parse(model)
        return not self.error

    def _build(self, network: Any, config: BuilderConfig) -> Any:
        self.calls.append(("build_serialized_network", None))
        if self.failure:
            self._log("Error Code 10: cost table is empty", self.failure)
            self.loggers[-1].log(ILogger.WARNING, "a warning after it")  # type: ignore[attr-defined]
            return None
        monitor = config.progress_monitor
        assert monitor.ready
        monitor.phase_start("Tactics", None, 3)
        for step in range(3):
            self.steps += 1
            if step:
                self.during()
            if not monitor.step_complete("Tactics", step):
                self._log("Error Code 10: the build was cancelled")
                return None
        monitor.phase_finish("Tactics")
        return self.engine

    def _log(self, *errors: str) -> None:
        for error in errors:
            self.loggers[-1].log(ILogger.ERROR, error)  # type: ignore[attr-defined]
