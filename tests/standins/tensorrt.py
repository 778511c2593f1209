"""A TensorRT whose engines are a bundle's ONNX graphs, run by ONNX Runtime on the fake CUDA's stream.

`FakeTensorRt` stands for the module tensorrt. An engine's bytes are JSON. They hold the graph's file, its profiles by
input, the inputs that it reads on the host, and a flag for updates in place. A profile has the smallest and largest
shape, and between them the tuned one if it is not the largest. An engine without updates in place overwrites its
outputs before it reads. An input on the host is read when work is put on the stream, as TensorRT does. Shapes outside
the profile, unset addresses and a capture without an earlier run are refused: by False, or by RuntimeError and
TypeError like the bindings.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.engines.sessions import session_of
from tests.standins.cuda import ALIGNMENT, POISON, FakeCuda
from tests.standins.tensorrt_build import FakeBuilding, ILogger

_TYPES = {
    "tensor(int64)": "INT64", "tensor(bool)": "BOOL", "tensor(float)": "FLOAT", "tensor(float16)": "HALF",
    "tensor(int8)": "INT8", "tensor(uint8)": "UINT8",
}  # fmt: skip
_NUMPY = {"INT64": np.int64, "BOOL": np.bool_, "FLOAT": np.float32, "HALF": np.float16, "INT8": np.int8,
          "UINT8": np.uint8}  # fmt: skip
_SCRATCH = 1000
Profile = Mapping[str, tuple[Sequence[int], ...]]


def write_engine(
    path: Path, graph: Path, profiles: Sequence[Profile] = ({},), host: Sequence[str] = (), updates: bool = False
) -> Path:
    """Write the file of an engine. An empty profile takes every shape."""
    path.write_text(json.dumps({"graph": str(graph), "profiles": profiles, "host": list(host), "updates": updates}))
    return path


class FakeTensorRt(FakeBuilding):
    """See the module.

    cuda:   the stand-in that its engines run on; building needs none.
    building: options of `FakeBuilding`.
    """

    TensorLocation = Enum("TensorLocation", ["DEVICE", "HOST"])
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")

    def __init__(self, cuda: FakeCuda | None = None, **building: Any) -> None:
        super().__init__(**building)
        self.cuda: Any = cuda
        self.contexts: list[Context] = []
        self.runtime_caches: list[RuntimeCache] = []
        self.logger: Any = None

    def Runtime(self, logger: ILogger) -> FakeTensorRt:
        """Return the runtime; if it is `null`, raise pybind11's error for that after this line of the log."""
        assert logger.ready
        self.logger = logger
        if self.null:
            logger.log(ILogger.ERROR, self.null)  # type: ignore[attr-defined]
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return self

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        try:
            values = json.loads(memoryview(data).tobytes())
        except ValueError:
            self.logger.log(ILogger.ERROR, "magic tag\n does not match")
            return None
        return Engine(self, values)


class Engine:
    """An ICudaEngine. inputs, outputs: TensorRT's type and the rank, by name."""

    device_memory_size_v2 = _SCRATCH

    def __init__(self, tensorrt: FakeTensorRt, values: dict[str, Any]) -> None:
        self.tensorrt = tensorrt
        self.session = session_of(Path(values["graph"]))
        self.inputs, self.outputs = (
            {value.name: (_TYPES[value.type], len(value.shape)) for value in values}
            for values in (self.session.get_inputs(), self.session.get_outputs())
        )
        self.profiles: list[Profile] = values["profiles"]
        self.host = values["host"]
        self.updates = values["updates"]

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, number: int) -> str:
        return [*self.inputs, *self.outputs][number]

    def get_tensor_dtype(self, name: str) -> Any:
        return self.tensorrt.DataType[{**self.inputs, **self.outputs}[name][0]]

    def get_tensor_location(self, name: str) -> Any:
        return self.tensorrt.TensorLocation["HOST" if name in self.host else "DEVICE"]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[Sequence[int]]:
        _, rank = self.inputs[name]
        least, *tuned, most = self.profiles[profile].get(name, ([1] * rank, [1 << 20] * rank))
        return [least, *(tuned or [most]), most]

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig(self.tensorrt)

    def create_execution_context(self, strategy: str | RuntimeConfig) -> Context:
        if isinstance(strategy, RuntimeConfig):
            assert strategy.cache is not None
            strategy = strategy.strategy
        assert strategy == "user managed"
        context = Context(self)
        self.tensorrt.contexts.append(context)
        return context


class RuntimeConfig:
    """An IRuntimeConfig of TensorRT for RTX."""

    def __init__(self, tensorrt: FakeTensorRt) -> None:
        self.strategy = ""
        self.cache: RuntimeCache | None = None
        self._caches = tensorrt.runtime_caches

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> RuntimeCache:
        self._caches.append(RuntimeCache())
        return self._caches[-1]

    def set_runtime_cache(self, cache: RuntimeCache) -> None:
        self.cache = cache


class RuntimeCache:
    """An IRuntimeCache, which takes what it wrote."""

    def __init__(self) -> None:
        self.loaded = b""

    def deserialize(self, blob: bytes) -> bool:
        self.loaded = bytes(blob)
        return self.loaded == b"compiled"

    def serialize(self) -> bytes:
        return b"compiled"


class Context:
    """An IExecutionContext."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch = 0
        self.enqueued = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == self.engine.tensorrt.cuda.STREAM
        if not 0 <= profile < self.engine.num_optimization_profiles:
            self.engine.tensorrt.logger.log(ILogger.ERROR, f"profile {profile} is out of range")
            raise RuntimeError("Error in set optimization profile async.")
        self.profile = profile
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self.engine.tensorrt.cuda.check("device", address, size)
        self.scratch = size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self.engine.host or address % ALIGNMENT == 0, f"{name} at {address:#x}"
        self.addresses[name] = address
        return name in self.engine.inputs or name in self.engine.outputs

    def execute_async_v3(self, stream: int) -> bool:
        cuda, engine = self.engine.tensorrt.cuda, self.engine
        complete = set(self.shapes) == set(engine.inputs) and set(self.addresses) == {*engine.inputs, *engine.outputs}
        first = not self.enqueued
        self.enqueued += 1
        if stream != cuda.STREAM or not complete or self.scratch < _SCRATCH or (first and cuda.captured is not None):
            engine.tensorrt.logger.log(ILogger.ERROR, "this cannot be enqueued")
            return False
        sizes = {
            name: np.array(array(self.addresses[name], shape, engine.get_tensor_dtype(name).name))
            for name, shape in self.shapes.items()
            if name in engine.host
        }
        addresses = dict(self.addresses)
        cuda.put(lambda: self._run(addresses, sizes))
        return True

    def _run(self, addresses: Mapping[str, int], sizes: Mapping[str, np.ndarray]) -> None:
        """Read at the addresses, compute, write."""
        cuda, engine = self.engine.tensorrt.cuda, self.engine
        for name in () if engine.updates else engine.outputs:
            ctypes.memset(addresses[name], POISON, 8)
        feeds = dict(sizes)
        for name, shape in self.shapes.items():
            if name not in feeds:
                feeds[name] = array(addresses[name], shape, engine.get_tensor_dtype(name).name)
                cuda.check("device", addresses[name], feeds[name].nbytes)
        found = engine.session.run(list(engine.outputs), feeds)
        for name, values in zip(engine.outputs, found, strict=True):
            cuda.check("device", addresses[name], values.nbytes)
            ctypes.memmove(addresses[name], np.ascontiguousarray(values).ctypes.data, values.nbytes)


def array(address: int, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Return the memory at an address as an array."""
    kind = np.dtype(_NUMPY[dtype])
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind).reshape(shape)
