"""The TensorRT engines of a bundle that is being built: every graph prepared and checked, then built or fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir

from redraft import names
from redraft.config import TensorRtBuild
from redraft.engines.digests import DigestCache
from redraft.engines.drafters import drafter_of, read_drafters
from redraft.engines.gpu import Gpu
from redraft.engines.host_memory import available_bytes
from redraft.engines.manifest import Manifest
from redraft.engines.tensorrt import engine_cache
from redraft.engines.tensorrt.builder import EngineBuild, build_engine
from redraft.engines.tensorrt.memory import Needs, check_disk, check_host, check_memory, needs_of
from redraft.engines.tensorrt.plugin import Plugin
from redraft.engines.tensorrt.prepare import copied_bytes, graph_file, prepare
from redraft.engines.tensorrt.profiles import (
    CallLimits,
    SymbolSizes,
    drafter_symbols,
    fixed_capacity,
    profiles_of,
    verifier_symbols,
)
from redraft.engines.tensorrt.target import Tools
from redraft.engines.tensorrt_records import Attention, EngineRecord, TensorRtRecord
from redraft.files import same_disk

GRAPHS = (
    names.VERIFIER,
    names.STEP_PREPARE_TREE,
    names.STEP_ACCEPT,
    names.STEP_ACCEPT_SAMPLED,
    names.STEP_GATHER_FEATURES,
    names.STEP_STORE_TREES,
)
"""Graphs of the verifier and of a step that become engines with either attention.

TensorRT lets outputs share an input's memory for KV updates and plugins only. Outputs of the gathering and storing
engines are therefore copied to their places, and slots are copied without an engine.
"""
Build = Callable[[EngineBuild], bytes | memoryview]


def graphs_of(attention: Attention) -> tuple[str, ...]:
    """Return the graphs of the verifier and of a step that become engines.

    Without the plugin, an engine also compacts accepted rows, by TensorRT's KV update. With the plugin our kernel does
    it, which is built with the plugin and needs no newer TensorRT.
    """
    return (*GRAPHS, names.STEP_COMPACT_KV) if attention == "native" else GRAPHS


def stage_engines(
    folder: Path, manifest: Manifest, options: TensorRtBuild, tools: Tools, report: Callable[[str], None],
    build: Build = build_engine,
) -> Manifest:  # fmt: skip
    """Write `GRAPH.tensorrt.onnx` and `GRAPH.engine` for each graph of the staged bundle `folder`.

    Returns the manifest with its TensorRT record. Graphs, disk and memory are checked before the first engine is
    built, and the disk also before merged weights are copied. Raises BackendError and OSError.
    """
    target, plugin = tools.target, tools.plugin
    stage = _Stage(folder, manifest, options, tools, _limits(manifest, options))
    symbols = stage.symbols()
    report(f"preparing graphs for {target.product.title}")
    copies = {graph: copied_bytes(ir.load(folder / manifest.all_graphs[graph].file)) for graph in symbols}
    check_disk("copies of merged weights", {graph: size for graph, size in copies.items() if size}, folder)
    engines = {graph: stage.prepare(graph, symbols[graph]) for graph in symbols}
    _check_fits(folder, engines, options, target.gpu)
    for number, (graph, engine) in enumerate(engines.items()):
        report(f"building engines {number}/{len(engines)}")
        out = folder / f"{graph}.engine"
        if not engine_cache.fetch(engine.key, out):
            out.write_bytes(build(engine.build))
            engine_cache.keep(engine.key, out)
    record = TensorRtRecord(
        version=target.version,
        gpu=target.gpu.name,
        compute_capability=target.compute_capability,
        attention=options.attention,
        plugin=plugin.digest if plugin else "",
        plugin_file=_copy_plugin(folder, plugin) if plugin and not options.embed_plugin else "",
        engines={g: EngineRecord(f"{g}.engine", graph_file(g), one.build.profiles) for g, one in engines.items()},
    )
    return replace(manifest, backend_version=target.version, tensorrt=record)


def _limits(manifest: Manifest, options: TensorRtBuild) -> CallLimits:
    """Return the largest calls, and the usual tree: the largest of a drafter."""
    limits = CallLimits(options.batch, options.tree_nodes, options.prefill, manifest.max_model_len)
    nodes = [record.limits.nodes for record in manifest.drafters.values()]
    return replace(limits, usual=1 + max(nodes)) if nodes else limits


@dataclass(frozen=True)
class _Engine:
    """A prepared engine. key: its place in the cache.   needs: its memory."""

    build: EngineBuild
    key: str
    needs: Needs


@dataclass(frozen=True)
class _Stage:
    """The parts that the engines of one bundle share."""

    folder: Path
    manifest: Manifest
    options: TensorRtBuild
    tools: Tools
    limits: CallLimits

    def symbols(self) -> dict[str, SymbolSizes]:
        """Return sizes of the symbols by profile for each graph that becomes an engine."""
        staged = [graph for graph in graphs_of(self.options.attention) if graph in self.manifest.graphs]
        found = {graph: verifier_symbols(graph, self.limits) for graph in staged}
        for drafter in read_drafters(self.manifest):
            for graph, spec in drafter.engine_graphs.items():
                found[graph] = drafter_symbols(spec, drafter.method.spare_rows, self.limits)
        return found

    def prepare(self, graph: str, symbols: SymbolSizes) -> _Engine:
        """Write the prepared graph."""
        record, target, plugin = self.manifest.all_graphs[graph], self.tools.target, self.tools.plugin
        attention, native = self.options.attention, self.options.attention == "native"
        capacity = fixed_capacity(symbols) if native else None
        model = prepare(self.folder, record.file, graph, target.release, attention, capacity)
        build = EngineBuild(
            self.folder / graph_file(graph), profiles_of(symbols, record.inputs, self.limits, native),
            engine_cache.timing_cache(target), target, record.inputs, record.outputs,
            plugin.path if plugin else None, self.options.embed_plugin,
        )  # fmt: skip
        drafter = drafter_of(self.manifest, graph)
        owner = drafter.id if drafter else names.VERIFIER
        needs = needs_of(owner, model, record.inputs, record.outputs, build.profiles)
        return _Engine(build, self._key(build, model), needs)

    def _key(self, build: EngineBuild, model: onnx.ModelProto) -> str:
        """Return the engine's key in the cache."""
        files = {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}
        weights = DigestCache().digests(self.folder / file for file in files).values()
        plugin = self.tools.plugin.digest if self.tools.plugin else ""
        graph = model.SerializeToString(deterministic=True)
        return engine_cache.engine_key(graph, weights, self.tools.target, plugin, build)


def _check_fits(folder: Path, engines: Mapping[str, _Engine], options: TensorRtBuild, gpu: Gpu) -> None:
    """Raise BackendError if engines do not fit on the disk, or in the memory of the GPU or the host.

    An engine in the cache is not built. It takes disk only if it must be copied from another file system.
    """
    needs = {graph: engine.needs for graph, engine in engines.items()}
    built = {graph: engine.needs for graph, engine in engines.items() if not engine_cache.has(engine.key)}
    written = built if same_disk(folder, engine_cache.cache_folder()) else needs
    check_disk("the engines", {graph: need.weights for graph, need in written.items()}, folder)
    if not options.ignore_memory:
        check_host(built, available_bytes())
        if gpu.total_bytes:  # that of an engine that is built ahead is not known
            check_memory(needs, gpu.free_bytes, gpu.name)


def _copy_plugin(folder: Path, plugin: Plugin) -> str:
    """Copy the library into the bundle and return its name: an engine needs the same library that it was built with."""
    shutil.copyfile(plugin.path, folder / plugin.path.name)
    return plugin.path.name
