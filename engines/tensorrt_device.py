"""Programs on TensorRT over CUDA memory: every tensor bound by its address.

An engine is loaded once. Each set of shapes has its own execution context, since a captured CUDA graph holds the
addresses and shapes of its context. Contexts of one engine share their scratch memory: they never run at once.

Attributes of TensorRT used here are in the Python bindings of 10.9 and of 11.x alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact
from redraft.engines.cuda import Cuda, Memory, open_cuda
from redraft.engines.cuda_device import CudaDevice
from redraft.engines.device import Buffer, Program, byte_size
from redraft.engines.gpu import find_gpu
from redraft.engines.manifest import GraphRecord, rebuild_command
from redraft.engines.tensorrt.builder import differences
from redraft.engines.tensorrt.plugin import load_plugin
from redraft.engines.tensorrt.target import (
    PRODUCTS,
    UNKNOWN_REASON,
    check_same,
    find_target,
    import_tensorrt,
    product_logger,
)
from redraft.errors import BackendError
from redraft.names import TensorSpec
from redraft.plugins.library import find_kernels
from redraft.user_cache import user_cache, write_bytes


def open_tensorrt_device(bundle: Bundle) -> TensorRtDevice:
    """Return the GPU with the bundle's engines.

    Raises BackendError for a missing part, or another TensorRT or GPU.
    """
    manifest = bundle.manifest
    built = manifest.tensorrt
    if built is None:
        raise bundle.error("expected TensorRT engines, found none")
    product = PRODUCTS[manifest.backend]
    gpu = find_gpu()
    check_same(built, find_target(lambda: gpu, product=product), rebuild_command(bundle.path, manifest.model.source))
    tensorrt, cuda = import_tensorrt(product=product), open_cuda()
    if built.plugin_file:
        load_plugin(bundle.path / built.plugin_file, tensorrt)
    engines = {graph: bundle.path / engine.file for graph, engine in built.engines.items()}
    embedded = bool(built.plugin) and not built.plugin_file
    caches = runtime_caches() if product.ahead else None
    return TensorRtDevice(bundle, engines, cuda, tensorrt, find_kernels(), embedded, caches)


def runtime_caches() -> Path:
    """Return the folder of what TensorRT for RTX compiled for the GPU here, a file for each engine."""
    return user_cache() / "tensorrt-rtx"


class TensorRtDevice(CudaDevice):
    """A GPU with TensorRT's engines.

    engines: files by graph.   tensorrt: the Python package.   kernels: our kernels for the GPU, if they are built.
    embedded: the engines contain the plugin's library. TensorRT runs such engines only if that is allowed explicitly.
    caches: folder of runtime caches of engines that were built ahead (`Product.ahead`), which are saved by `close`.
    """

    def __init__(  # noqa: PLR0913 - the parts of one engine
        self, bundle: Bundle, engines: Mapping[str, Path], cuda: Cuda, tensorrt: Any, kernels: Compact | None = None,
        embedded: bool = False, caches: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(bundle, cuda, kernels)
        self.tensorrt = tensorrt
        self._logger = product_logger(tensorrt)
        self._files = engines
        self._caches = caches
        self._compiled: dict[Path, Any] = {}
        try:
            self._runtime = tensorrt.Runtime(self._logger)
        except TypeError:  # pybind11's for an object that is null
            raise BackendError(f"TensorRT does not start: {self.reason}") from None
        if embedded:
            self._runtime.engine_host_code_allowed = True

    @property
    def reason(self) -> str:
        """Return TensorRT's latest error, since its calls report only that they failed."""
        return str(self._logger.last_error) or UNKNOWN_REASON

    def _loaded_bytes(self, graph: str) -> int:
        with contextlib.suppress(KeyError, OSError):
            return self._files[graph].stat().st_size
        return 0

    def _load(self, graph: str, record: GraphRecord) -> Program:
        if graph not in self._files:
            found = ", ".join(sorted(self._files)) or "none"
            kernels = "; our kernels do that as well: run `make plugins`" if graph == names.STEP_COMPACT_KV else ""
            raise self._bundle.error(f"expected an engine of {graph}, found {found}{kernels}")
        engine = self._deserialized(graph)
        if engine is None:
            raise self._bundle.error(f"TensorRT does not load the engine of {graph}: {self.reason}")
        tensors = (engine.get_tensor_name(number) for number in range(engine.num_io_tensors))
        types = {name: engine.get_tensor_dtype(name) for name in tensors}
        if problem := next(differences(self.tensorrt, types, record.inputs, record.outputs), None):
            raise self._bundle.error(f"engine of {graph}: {problem}")
        return EngineProgram(self, graph, record, engine, self._contexts(graph, engine))

    def _contexts(self, graph: str, engine: Any) -> Callable[[], Any]:
        """Return a function that makes a context of an engine, with memory of ours for its scratch."""
        strategy = self.tensorrt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._caches is None:
            return partial(engine.create_execution_context, strategy)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        file = self._caches / f"{self._bundle.manifest.files[self._files[graph].name].sha256}.cache"
        cache = self._compiled[file] = config.create_runtime_cache()
        with contextlib.suppress(OSError):  # one of another GPU, driver or version is refused, and written anew
            cache.deserialize(file.read_bytes())
        config.set_runtime_cache(cache)
        return partial(engine.create_execution_context, config)

    def close(self) -> None:
        """Close the device. Saves runtime caches; if that fails, the next opening compiles again."""
        for file, cache in self._compiled.items():
            with contextlib.suppress(OSError):
                write_bytes(file, memoryview(cache.serialize()))
        self._compiled.clear()
        super().close()

    def _deserialized(self, graph: str) -> Any:
        """Read the engine through the file's pages: an engine of many GB need not be in the host's memory too."""
        try:
            with self._files[graph].open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                return self._runtime.deserialize_cuda_engine(data)
        except (OSError, ValueError) as error:
            raise self._bundle.error(f"the engine of {graph} cannot be read: {error}") from None


class EngineProgram(Program):
    """An engine of a device."""

    def __init__(
        self, device: TensorRtDevice, graph: str, record: GraphRecord, engine: Any, context: Callable[[], Any]
    ) -> None:
        super().__init__(record)
        self._device = device
        self._graph = graph
        self._engine = engine
        self._context = context
        self._has = frozenset(engine.get_tensor_name(number) for number in range(engine.num_io_tensors))
        self._links = {name: cache for name in self._has if (cache := names.linked(name))}
        host = device.tensorrt.TensorLocation.HOST
        self._on_host = frozenset(name for name in self._has if engine.get_tensor_location(name) == host)
        self._scratch = Memory(device.cuda, engine.device_memory_size_v2)
        self._written: dict[str, Memory] = {}

    def _bind(self, buffers: Mapping[str, Buffer]) -> EngineRun:
        """Raises BackendError if no optimization profile takes the shapes."""
        device, inputs = self._device, [spec for spec in self.inputs if spec.name in self._has]
        context = self._context()
        if context is None:
            raise BackendError(f"TensorRT creates no context of {self._graph}: {device.reason}")
        run = EngineRun(device, self._graph, context, not self._on_host, (self._scratch, dict(buffers)))
        run.must(context.set_optimization_profile_async, self._profile(inputs, buffers), device.cuda.stream)
        device.cuda.synchronize()
        context.set_device_memory(self._scratch.address, self._scratch.size)
        for spec in inputs:
            run.must(context.set_input_shape, spec.name, buffers[spec.name].shape)
            run.must(context.set_tensor_address, spec.name, self._input_address(spec, buffers[spec.name]))
        for spec in self.outputs:
            run.must(context.set_tensor_address, spec.name, self._output_address(spec, buffers[spec.name], run))
        for name, cache in self._links.items():
            run.must(context.set_tensor_address, name, buffers[cache].address)
        return run

    def _input_address(self, spec: TensorSpec, buffer: Buffer) -> int:
        """Return the address of an input. TensorRT reads sizes on the host, when work is put on the stream."""
        if spec.name not in self._on_host:
            return buffer.address
        if buffer.host is None:
            raise BackendError(f"the engine of {self._graph} wants {spec.name} on the host, which does not write it")
        return int(buffer.host.ctypes.data)

    def _output_address(self, spec: TensorSpec, buffer: Buffer, run: EngineRun) -> int:
        """Return the address of an output: KV buffers in place, memory of their own for other outputs in place."""
        if spec.in_place_of is None or names.is_cache(spec.in_place_of):
            return buffer.address
        size = byte_size(buffer.dtype, buffer.shape)
        scratch = self._written.get(spec.name)
        if scratch is None or scratch.size < size:  # runs of one engine never overlap, and share the largest one's
            scratch = self._written[spec.name] = Memory(self._device.cuda, size)
        run.copies.append((buffer.address, scratch, size))
        return scratch.address

    def _profile(self, inputs: Sequence[TensorSpec], buffers: Mapping[str, Buffer]) -> int:
        """Return the profile that holds all shapes and is tuned for the nearest ones."""
        sizes = {
            spec.name: buffers[spec.name].shape for spec in inputs if not all(isinstance(d, int) for d in spec.shape)
        }
        distances: dict[int, int] = {}
        for profile in range(self._engine.num_optimization_profiles):
            ranges = {name: self._engine.get_tensor_profile_shape(name, profile) for name in sizes}
            if all(_holds(ranges[name], shape) for name, shape in sizes.items()):
                distances[profile] = sum(_distance(ranges[name], shape) for name, shape in sizes.items())
        if not distances:
            raise BackendError(
                f"no optimization profile of {self._graph} takes {self._asked(inputs, buffers)}",
                "lower the budget's nodes or the slots, or build with larger --tree-nodes and --batch",
            )
        return min(distances, key=distances.__getitem__)

    def _asked(self, inputs: Sequence[TensorSpec], buffers: Mapping[str, Buffer]) -> str:
        sizes = {
            dim: size
            for spec in inputs
            for dim, size in zip(spec.shape, buffers[spec.name].shape, strict=True)
            if isinstance(dim, str)
        }
        return ", ".join(f"{dim}={size}" for dim, size in sizes.items())


class EngineRun:
    """An engine over fixed buffers. capturable: nothing that it reads on the host would be stale in a CUDA graph."""

    def __init__(self, device: TensorRtDevice, graph: str, context: Any, capturable: bool, keep: object) -> None:
        self.capturable = capturable
        self.copies: list[tuple[int, Memory, int]] = []
        self._device = device
        self._graph = graph
        self._context = context
        self._keep = keep

    def __call__(self) -> None:
        self.must(self._context.execute_async_v3, self._device.cuda.stream)
        for target, scratch, size in self.copies:
            self._device.cuda.copy(target, scratch.address, size, "cudaMemcpyDeviceToDevice")

    def must(self, call: Callable[..., bool], *arguments: object) -> None:
        """Call TensorRT. Raise BackendError if it fails: some bindings return False, others raise a RuntimeError."""
        try:
            worked = call(*arguments)
        except RuntimeError:
            worked = False
        if not worked:
            raise BackendError(f"TensorRT refuses {self._graph}: {self._device.reason}")


def _distance(profile: Sequence[Any], shape: tuple[int, ...]) -> int:
    """Return the distance of `shape` from the shape that a profile's range of a tensor is tuned for."""
    return sum(abs(tuned - size) for tuned, size in zip(tuple(profile[1]), shape, strict=True))


def _holds(profile: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Return True if a profile's range (smallest, tuned for, largest) of a tensor holds `shape`."""
    least, _, most = (tuple(sizes) for sizes in profile)
    return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))
