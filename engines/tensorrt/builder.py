"""Polygraphy's loaders over TensorRT's builder: a prepared graph to the bytes of an engine.

Names used here are in the Python bindings of 10.9 and of 11.x alike. Networks are strongly typed: types are the
graph's, so there are no precision flags, which 11 does not have.
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

WORKSPACE_BYTES = 1 << 30
"""Scratch memory that the builder may let one engine use."""
_PACKAGE = "run `pip install 'redraft[tensorrt]'`"
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class EngineBuild:
    """How one engine is built.

    graph:         file of the prepared graph.
    plugin:        library of the plugin; None where the graph has no node for it.
    embed_plugin:  make the library part of the engine, which then must be version-compatible.
    timing_cache:  file of measured kernel times, read and added to.
    """

    graph: Path
    profiles: tuple[Profile, ...]
    timing_cache: Path
    plugin: Path | None = None
    embed_plugin: bool = False
    workspace_bytes: int = WORKSPACE_BYTES


def build_engine(build: EngineBuild) -> bytes:
    """The serialized engine. The driver must have been asked before. Raises BackendError with TensorRT's own line."""
    tensorrt = import_tensorrt()
    try:
        from polygraphy.backend.trt import CreateConfig, EngineBytesFromNetwork, NetworkFromOnnxPath, PostprocessConfig
        from polygraphy.exception import PolygraphyException
    except ModuleNotFoundError as error:
        raise BackendError(
            f"building engines needs the package {error.name}, which is not installed", _PACKAGE
        ) from None
    if build.plugin is not None:
        load_plugin(build.plugin, tensorrt)
    build.timing_cache.parent.mkdir(parents=True, exist_ok=True)
    network = NetworkFromOnnxPath(str(build.graph), strongly_typed=True)
    config = CreateConfig(
        profiles=polygraphy_profiles(build.profiles),
        load_timing_cache=str(build.timing_cache) if build.timing_cache.exists() else None,
        memory_pool_limits={tensorrt.MemoryPoolType.WORKSPACE: build.workspace_bytes},
        version_compatible=build.embed_plugin,
    )
    config = PostprocessConfig(config, lambda builder, network, config: _use_plugin(tensorrt, config, build))
    try:
        engine = EngineBytesFromNetwork(network, config, save_timing_cache=str(build.timing_cache))()
    except PolygraphyException as error:
        line = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
        raise BackendError(f"TensorRT cannot build {build.graph.name}: {line}", "see its log above") from error
    return bytes(engine)


def _use_plugin(tensorrt: Any, config: Any, build: EngineBuild) -> None:
    """Let the plugin update KV buffers where they are, and put its library into the engine where asked to."""
    if build.plugin is None:
        return
    config.set_preview_feature(tensorrt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if build.embed_plugin:
        config.plugins_to_serialize = [str(build.plugin)]


def polygraphy_profiles(profiles: Sequence[Profile]) -> list[Any]:
    """The profiles as Polygraphy's."""
    from polygraphy.backend.trt import Profile as PolygraphyProfile

    made = []
    for profile in profiles:
        ranges = PolygraphyProfile()
        for name, sizes in profile.inputs.items():
            ranges.add(name, min=sizes.min, opt=sizes.opt, max=sizes.max)
        made.append(ranges)
    return made
