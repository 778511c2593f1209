"""Polygraphy's loaders over TensorRT's builder: a prepared graph to the bytes of an engine.

Names used here are in the Python bindings of 10.9 and of 11.x alike. Networks are strongly typed: the graph sets the
types. Precision flags are not needed, and 11 has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.engines.tensorrt.plugin import load_plugin
from redraft.engines.tensorrt.records import Profile
from redraft.engines.tensorrt.target import import_tensorrt
from redraft.errors import BackendError
from redraft.interrupts import interrupts_deferred

WORKSPACE_BYTES = 1 << 30
"""Scratch memory that the builder may let one engine use."""
_PACKAGE = "run `pip install 'redraft[tensorrt]'`"
_REFUSALS = (RuntimeError, TypeError)
"""TensorRT's bindings raise a RuntimeError for refused values, and pybind11 a TypeError for an object that is null."""
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class EngineBuild:
    """Input of one engine's build.

    graph:         file of the prepared graph.
    plugin:        library of the plugin; None if the graph has no node for it.
    embed_plugin:  make the library part of the engine, which then must be version-compatible.
    timing_cache:  file of measured kernel times, read and added to.
    """

    graph: Path
    profiles: tuple[Profile, ...]
    timing_cache: Path
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

    The caller must have found the driver (`driver`) before. Raises BackendError with TensorRT's own line.
    """
    tensorrt = import_tensorrt()
    try:
        from polygraphy.backend.trt import CreateConfig, EngineBytesFromNetwork, NetworkFromOnnxPath, PostprocessConfig
        from polygraphy.exception import PolygraphyException
    except ModuleNotFoundError as error:
        raise BackendError(
            f"building engines needs the package {error.name}, which is not installed", _PACKAGE
        ) from None
    _log_by_python()
    if build.plugin is not None:
        load_plugin(build.plugin, tensorrt)
    build.timing_cache.parent.mkdir(parents=True, exist_ok=True)
    settings, errors = build.settings, _heard(tensorrt)
    network = NetworkFromOnnxPath(str(build.graph), strongly_typed=settings.strongly_typed)
    config = CreateConfig(
        profiles=polygraphy_profiles(build.profiles),
        load_timing_cache=str(build.timing_cache) if build.timing_cache.exists() else None,
        memory_pool_limits={tensorrt.MemoryPoolType.WORKSPACE: settings.workspace_bytes},
        version_compatible=settings.version_compatible,
        max_aux_streams=settings.max_aux_streams,
    )
    with interrupts_deferred() as came:
        monitor = _monitor(tensorrt, came)
        config = PostprocessConfig(config, lambda builder, network, config: _complete(config, build, monitor))
        try:
            engine = EngineBytesFromNetwork(network, config, save_timing_cache=str(build.timing_cache))()
        except (PolygraphyException, *_REFUSALS) as error:
            line = " ".join((errors[-1] if errors else str(error)).split())[:_MESSAGE_CHARACTERS]
            raise BackendError(f"TensorRT cannot build {build.graph.name}: {line}", "see its log above") from error
    return memoryview(engine)


def _log_by_python() -> None:
    """Send Polygraphy's log to Python's logging. Polygraphy itself prints to the standard output, the place of JSON.

    Without handlers, Python writes warnings and errors to the standard error and drops the rest.
    """
    from polygraphy.logger import G_LOGGER

    G_LOGGER.use_python_logging_system = True
    G_LOGGER.colors = False


def _monitor(tensorrt: Any, came: Sequence[int]) -> Any:
    """Stops the build at the next step after an interrupt. TensorRT drops exceptions of Python callbacks."""

    def begin(monitor: object) -> None:
        tensorrt.IProgressMonitor.__init__(monitor)

    def go_on(monitor: object, phase: str, step: int) -> bool:
        return not came

    def nothing(monitor: object, *phase: object) -> None: ...

    methods = {"__init__": begin, "phase_start": nothing, "step_complete": go_on, "phase_finish": nothing}
    return type("Monitor", (tensorrt.IProgressMonitor,), methods)()


def _heard(tensorrt: Any) -> list[str]:
    """Collects the errors that TensorRT logs from now on. Polygraphy logs them too, but raises its own sentence.

    One logger serves the process, since TensorRT keeps the first one for all later builds.
    """
    from polygraphy.backend.trt import util

    logger = util.get_trt_logger()
    if not hasattr(logger, "errors"):
        serious = (tensorrt.ILogger.INTERNAL_ERROR, tensorrt.ILogger.ERROR)
        usual = type(logger)

        def log(self: Any, severity: Any, message: str) -> None:
            if severity in serious:
                self.errors.append(message)
            usual.log(self, severity, message)

        logger = util.TRT_LOGGER = type("Logger", (usual,), {"log": log, "errors": []})()
    logger.errors.clear()
    errors: list[str] = logger.errors
    return errors


def _complete(config: Any, build: EngineBuild, monitor: Any) -> None:
    """Set the parts that Polygraphy leaves out: the monitor that may cancel, and the plugin's library in the engine."""
    config.progress_monitor = monitor
    if build.embed_plugin and build.plugin is not None:
        config.plugins_to_serialize = [str(build.plugin)]


def polygraphy_profiles(profiles: Sequence[Profile]) -> list[Any]:
    """Return the profiles as Polygraphy's."""
    from polygraphy.backend.trt import Profile as PolygraphyProfile

    made = []
    for profile in profiles:
        ranges = PolygraphyProfile()
        for name, sizes in profile.inputs.items():
            ranges.add(name, min=sizes.min, opt=sizes.opt, max=sizes.max)
        made.append(ranges)
    return made
