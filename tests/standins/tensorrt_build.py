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

Severity = IntEnum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"], start=0)
DataType = IntEnum("DataType", ["FLOAT", "HALF", "BF16", "INT64", "INT32", "BOOL", "INT8", "UINT8"])
_TYPES = {
    onnx.TensorProto.FLOAT: DataType.FLOAT, onnx.TensorProto.FLOAT16: DataType.HALF,
    onnx.TensorProto.BOOL: DataType.BOOL, onnx.TensorProto.INT64: DataType.INT64, onnx.TensorProto.INT8: DataType.INT8,
}  # fmt: skip


class IProgressMonitor:
    """Base class of a monitor; one that does not call its __init__ cannot be used."""

    def __init__(self) -> None:
        self.ready = True


class ILogger(IProgressMonitor):
    """Base class of a logger; one that does not call its __init__ cannot be used."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity
    Severity = Severity


class OptimizationProfile:
    """Refuses ranges that are out of order by a RuntimeError, like the bindings."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}
        self.values: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._put(self.shapes, input, min, opt, max)

    def set_shape_input(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._put(self.values, input, min, opt, max)

    def get_shape(self, input: str) -> list[tuple[int, ...]]:
        return self.shapes[input]

    def get_shape_input(self, input: str) -> list[tuple[int, ...]]:
        return self.values[input]

    def _put(self, known: dict[str, list[tuple[int, ...]]], name: str, *ranges: Any) -> None:
        if any(list(sizes) != sorted(sizes) for sizes in zip(*ranges, strict=True)):
            raise RuntimeError("Shape provided for opt is inconsistent with other shapes.")
        known[name] = [tuple(sizes) for sizes in ranges]


class BuilderConfig(SimpleNamespace):
    """Its settings are attributes; it makes timing caches of `b"times"`."""

    def __init__(self) -> None:
        self.flags = {FakeBuilding.BuilderFlag.TF32}
        self.profiles: list[OptimizationProfile] = []
        self.limits: dict[int, int] = {}
        self.plugins_to_serialize: list[str] = []
        self.loaded_times: list[bytes] = []
        self.set_flag, self.clear_flag = self.flags.add, self.flags.discard
        self.add_optimization_profile, self.set_memory_pool_limit = self.profiles.append, self.limits.__setitem__
        self.create_timing_cache = lambda blob: self.loaded_times.append(bytes(blob))
        self.set_timing_cache = lambda cache, ignore_mismatch: True
        self.get_timing_cache = lambda: SimpleNamespace(serialize=lambda: b"times")


class Network:
    """Inputs and outputs, and no layers. inputs: True for shape tensors."""

    def __init__(self, inputs: Mapping[str, bool]) -> None:
        self.inputs = [
            SimpleNamespace(name=n, is_shape_tensor=s, shape=(1,) if s else (-1, -1), dtype=DataType.INT64)
            for n, s in inputs.items()
        ]
        self.outputs: list[SimpleNamespace] = []
        self.get_input, self.get_output = self.inputs.__getitem__, self.outputs.__getitem__

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def parse(self, model: str) -> None:
        """Take the inputs and outputs of a graph's file; none is a shape tensor."""
        graph = onnx.load(model, load_external_data=False).graph
        for tensors, values in ((self.inputs, graph.input), (self.outputs, graph.output)):
            for value in values:
                kind = value.type.tensor_type
                shape, dtype = tuple(dim.dim_value or -1 for dim in kind.shape.dim), _TYPES[kind.elem_type]
                tensors.append(SimpleNamespace(name=value.name, is_shape_tensor=False, shape=shape, dtype=dtype))


class FakeBuilding:
    """Builders, networks and parsers. Their arguments are in `calls`, `configs` and `flags`.

    inputs:  the network's inputs, True for shape tensors. None takes those of the graph that is parsed.
    error:   the parser's message, if it fails.   failure: the builder's log line, if it builds nothing.
    null:    the log line if no builder can be made.
    during:  called before each step of the builder but the first.
    """

    BuilderFlag = IntEnum("BuilderFlag", {"TF32": 7, "VERSION_COMPATIBLE": 13})
    MemoryPoolType = IntEnum("MemoryPoolType", {"WORKSPACE": 0})
    ProfilingVerbosity = IntEnum("ProfilingVerbosity", {"DETAILED": 2})
    NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 1})
    DataType = DataType
    ILogger = Logger = ILogger
    IProgressMonitor = IProgressMonitor
    __spec__ = ModuleSpec("tensorrt", None)  # libraries that look whether TensorRT is there refuse none
    __path__ = ()

    def __init__(
        self, version: str = "10.9.0.34", inputs: Mapping[str, bool] | None = {}, error: str = "",
        failure: str = "", during: Callable[[], None] = lambda: None, null: str = "",
    ) -> None:  # fmt: skip
        self.__version__ = version
        self.inputs = inputs
        self.error = error
        self.failure = failure
        self.during = during
        self.null = null
        self.steps = 0
        self.loggers: list[Any] = []
        self.registered = False
        self.calls: list[tuple[str, Any]] = []
        self.configs: list[BuilderConfig] = []
        self.flags: list[int] = []
        self.engine = (c_char * 6)(*b"engine")  # memory of TensorRT's, which has none of Python's types

    def get_plugin_registry(self) -> Any:
        return SimpleNamespace(load_library=self._load_library, get_creator=self._get_creator)

    def _get_creator(self, type: str, version: str, plugin_namespace: str) -> Any:
        return object() if (type, version, plugin_namespace) == ("TreeAttention", "1", "") and self.registered else None

    def _load_library(self, plugin_path: str) -> Any:
        """Return nothing for a library with plugins that are registered already, like TensorRT."""
        self.calls.append(("load_library", plugin_path))
        known, self.registered = self.registered, True
        return None if known else object()

    def Builder(self, logger: ILogger) -> Any:
        self.loggers.append(logger)
        if self.null:
            self._log(self.null)
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return SimpleNamespace(
            create_network=self._network, create_builder_config=self._config,
            create_optimization_profile=OptimizationProfile, build_serialized_network=self._build,
        )  # fmt: skip

    def OnnxParser(self, network: Network, logger: ILogger) -> Any:
        node = SimpleNamespace(
            node_name=lambda: "l0.attended", node_operator=lambda: "Attention", desc=lambda: self.error
        )

        def parse(model: str) -> bool:
            self.calls.append(("parse_from_file", model))
            if self.error:
                self._log(f"Failed to parse ONNX model from file: {model}!", f"ERROR: importer.cpp:1\n{self.error}")
            elif self.inputs is None:
                network.parse(model)
            return not self.error

        return SimpleNamespace(parse_from_file=parse, num_errors=bool(self.error), get_error=lambda index: node)

    def _network(self, flags: int = 0) -> Network:
        self.flags.append(flags)
        return Network(self.inputs or {})

    def _config(self) -> BuilderConfig:
        self.configs.append(BuilderConfig())
        return self.configs[-1]

    def _build(self, network: Network, config: BuilderConfig) -> Any:
        if self.failure:
            self._log("Error Code 10: cost table is empty", self.failure)
            self.loggers[-1].log(ILogger.WARNING, "a warning after it")
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
            self.loggers[-1].log(ILogger.ERROR, error)
