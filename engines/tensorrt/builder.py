"""TensorRT's builder: a prepared graph to the bytes of an engine.

Names used here are in the Python bindings of 10.9, of 11.x and of TensorRT for RTX alike. Networks are strongly typed:
the graph sets the types. Precision flags are not needed, and 11 has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft import names
from redraft.engines.tensorrt.plugin import load_plugin
from redraft.engines.tensorrt.target import UNKNOWN_REASON, Target, import_tensorrt, product_logger
from redraft.engines.tensorrt_records import Profile
from redraft.errors import BackendError
from redraft.interrupts import interrupts_deferred
from redraft.names import Dtype, TensorSpec
from redraft.user_cache import write_bytes

TYPES: Mapping[Dtype, str] = {
    "int64": "INT64", "int32": "INT32", "bool": "BOOL", "int8": "INT8", "uint8": "UINT8", "float32": "FLOAT",
    "float16": "HALF", "bfloat16": "BF16",
}  # fmt: skip
"""Names of TensorRT's DataType by ours."""


def differences(
    tensorrt: Any, found: Mapping[str, Any], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Iterator[str]:
    """Yield lines on tensors that differ in name or type. Inputs that nothing reads may be missing.

    found: TensorRT's types by name.
    """
    unknown = dict(found)
    for spec in (*inputs, *outputs):
        if spec.name not in unknown:
            if spec in outputs:
                yield f"expected tensor {spec.name}, found none"
            continue
        dtype = unknown.pop(spec.name)
        if dtype != getattr(tensorrt.DataType, TYPES[spec.dtype]):
            yield f"expected {spec.name} {spec.dtype}, found {dtype}"
    updated = {spec.in_place_of for spec in outputs}
    for name in sorted(unknown):
        if names.linked(name) not in updated:
            yield f"unexpected tensor {name}"


WORKSPACE_BYTES = 1 << 30
"""Scratch memory that the builder may let one engine use."""
_REFUSALS = (RuntimeError, TypeError)
"""TensorRT's bindings raise a RuntimeError for refused values, and pybind11 a TypeError for an object that is null."""
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class EngineBuild:
    """Input of one engine's build.

    graph:         file of the prepared graph.
    plugin:        library of the plugin; None if the graph has no node for it.
    embed_plugin:  make the library part of the engine, which then must be version-compatible.
    timing_cache:  file of measured kernel times, read and added to; none of an engine that is built ahead.
    target:        the product, and the GPU of an engine that is built ahead.
    inputs, outputs: the graph's, which the network must have.
    """

    graph: Path
    profiles: tuple[Profile, ...]
    timing_cache: Path
    target: Target
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    plugin: Path | None = None
    embed_plugin: bool = False
    workspace_bytes: int = WORKSPACE_BYTES

    @property
    def settings(self) -> Settings:
        """The builder's settings, apart from graph and profiles."""
        return Settings(
            workspace_bytes=self.workspace_bytes,
            version_compatible=self.embed_plugin,
        )


@dataclass(frozen=True)
class Settings:
    """Settings of the builder that change an engine.

    workspace_bytes:     limit of its scratch memory.   strongly_typed: types are the graph's.
    version_compatible:  the engine contains its runtime, and so the plugin's library.
    max_aux_streams:     streams in addition to ours. Every set of shapes has a context with its own streams, and a
                         decoder's layers run one after the other.
    """

    workspace_bytes: int
    version_compatible: bool
    strongly_typed: bool = True
    max_aux_streams: int = 0


def build_engine(build: EngineBuild) -> memoryview:
    """Return the serialized engine in TensorRT's own memory. It is as large as the weights, and is not copied.

    For TensorRT the caller must have found the driver (`driver`) before. Raises BackendError with TensorRT's own line.
    """
    product = build.target.product
    tensorrt = import_tensorrt(product=product)
    if build.plugin is not None:
        load_plugin(build.plugin, tensorrt)
    logger = product_logger(tensorrt)
    logger.last_error = ""
    with interrupts_deferred() as interrupts:
        try:
            engine = _built(tensorrt, build, logger, interrupts)
        except _REFUSALS as error:
            raise _refusal(build, logger.last_error or str(error)) from error
    return memoryview(engine)


def _built(tensorrt: Any, build: EngineBuild, logger: Any, interrupts: Sequence[int]) -> Any:
    builder = tensorrt.Builder(logger)
    network, _parser = parse(tensorrt, builder, logger, build)
    config, settings = builder.create_builder_config(), build.settings
    config.clear_flag(tensorrt.BuilderFlag.TF32)  # which TensorRT sets, and which rounds float32
    config.profiling_verbosity = tensorrt.ProfilingVerbosity.DETAILED
    profiles = [_set_ranges(builder.create_optimization_profile(), profile, network) for profile in build.profiles]
    for profile in profiles:
        config.add_optimization_profile(profile)
    if problem := next(_network_differences(tensorrt, network, build, profiles), None):
        raise _refusal(build, problem)
    config.set_memory_pool_limit(tensorrt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
    config.max_aux_streams = settings.max_aux_streams
    if settings.version_compatible:
        config.set_flag(tensorrt.BuilderFlag.VERSION_COMPATIBLE)
    if build.embed_plugin and build.plugin is not None:
        config.plugins_to_serialize = [str(build.plugin)]
    config.progress_monitor = _monitor(tensorrt, interrupts)
    if build.target.product.ahead:
        config.num_compute_capabilities = 1
        name = f"SM{build.target.compute_capability.replace('.', '')}"
        config.set_compute_capability(tensorrt.ComputeCapability.__members__[name], 0)
    else:
        times = build.timing_cache.read_bytes() if build.timing_cache.exists() else b""
        config.set_timing_cache(config.create_timing_cache(times), False)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise _refusal(build, logger.last_error or UNKNOWN_REASON)
    if not build.target.product.ahead:
        write_bytes(build.timing_cache, memoryview(config.get_timing_cache().serialize()))
    return engine


def parse(tensorrt: Any, builder: Any, logger: Any, build: EngineBuild) -> tuple[Any, Any]:
    """Return the graph as TensorRT's network, strongly typed, and the parser, which owns the network's weights.

    Raises BackendError naming the node that is refused.
    """
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(build.graph)):
        first = parser.get_error(0) if parser.num_errors else None
        line = logger.last_error or UNKNOWN_REASON
        if first:
            line = f"node {first.node_name()!r} ({first.node_operator()}): {first.desc()}"
        raise _refusal(build, line)
    return network, parser


def _network_differences(tensorrt: Any, network: Any, build: EngineBuild, profiles: Sequence[Any]) -> Iterator[str]:
    """Yield lines on a network that differs from the manifest: tensors, types, fixed sizes, and profiles read back."""
    given = [network.get_input(number) for number in range(network.num_inputs)]
    outputs = [network.get_output(number) for number in range(network.num_outputs)]
    types = {tensor.name: tensor.dtype for tensor in (*given, *outputs)}
    yield from differences(tensorrt, types, build.inputs, build.outputs)
    specs = {spec.name: spec for spec in build.inputs}
    for tensor in given:
        if (spec := specs.get(tensor.name)) is None:
            continue
        shape = tuple(tensor.shape)
        pairs = zip(spec.shape, shape, strict=False)
        if len(spec.shape) != len(shape) or any(isinstance(dim, int) and dim != size for dim, size in pairs):
            yield f"expected {spec.name} {list(spec.shape)}, found {list(shape)}"
    values = {tensor.name for tensor in given if tensor.is_shape_tensor}
    for wanted, profile in zip(build.profiles, profiles, strict=True):
        for name, ranges in wanted.inputs.items():
            read = profile.get_shape_input(name) if name in values else profile.get_shape(name)
            if [tuple(each) for each in read] != [ranges.min, ranges.opt, ranges.max]:
                yield f"expected {name} {ranges} in profile {wanted.name}, found {read}"


def _refusal(build: EngineBuild, reason: str) -> BackendError:
    line = " ".join(reason.split())[:_MESSAGE_CHARACTERS]
    return BackendError(f"{build.target.product.title} cannot build {build.graph.name}: {line}", "see its log above")


def _set_ranges(target: Any, profile: Profile, network: Any) -> Any:
    """Set a profile's ranges: of shapes, and of the values of inputs that are sizes."""
    values = {
        value.name
        for value in (network.get_input(number) for number in range(network.num_inputs))
        if value.is_shape_tensor
    }
    for name, sizes in profile.inputs.items():
        put = target.set_shape_input if name in values else target.set_shape
        put(name, sizes.min, sizes.opt, sizes.max)
    return target


def _monitor(tensorrt: Any, interrupts: Sequence[int]) -> Any:
    """Stops the build at the next step after an interrupt. TensorRT drops exceptions of Python callbacks."""

    def begin(monitor: object) -> None:
        tensorrt.IProgressMonitor.__init__(monitor)

    def go_on(monitor: object, phase: str, step: int) -> bool:
        return not interrupts

    def nothing(monitor: object, *phase: object) -> None: ...

    methods = {"__init__": begin, "phase_start": nothing, "step_complete": go_on, "phase_finish": nothing}
    return type("Monitor", (tensorrt.IProgressMonitor,), methods)()
