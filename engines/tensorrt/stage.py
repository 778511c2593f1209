"""The TensorRT engines of a bundle that is being built: every graph prepared and checked, then built or fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir

from redraft import names
from redraft.config import TensorRtBuild
from redraft.engines.digests import DigestCache
from redraft.engines.drafters import drafter_of, read_drafters
from redraft.engines.gpu import Gpu
from redraft.engines.host_memory import available_bytes
from redraft.engines.manifest import GraphRecord, Manifest
from redraft.engines.tensorrt import engine_cache
from redraft.engines.tensorrt.builder import EngineBuild, build_engine
from redraft.engines.tensorrt.memory import Needs, check_disk, check_host, check_memory, needs_of
from redraft.engines.tensorrt.plugin import Plugin
from redraft.engines.tensorrt.prepare import copied_bytes, graph_file, prepare
from redraft.engines.tensorrt.profiles import CallLimits, drafter_symbols, fixed_capacity, profiles_of, verifier_symbols
from redraft.engines.tensorrt.records import Attention, EngineRecord, TensorRtRecord
from redraft.engines.tensorrt.target import Tools
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
    folder: Path,
    manifest: Manifest,
    options: TensorRtBuild,
    tools: Tools,
    report: Callable[[str], None],
    build: Build = build_engine,
) -> Manifest:
    """Write `GRAPH.tensorrt.onnx` and `GRAPH.engine` for each graph of the staged bundle `folder`.

    Returns the manifest with its TensorRT record. Graphs, disk and memory are checked before the first engine is
    built, and the disk also before merged weights are copied. Raises BackendError and OSError.
    """
    target, plugin = tools.target, tools.plugin
    limits = CallLimits(options.batch, options.tree_nodes, options.prefill, manifest.max_model_len)
    drafters = read_drafters(manifest)
    if drafters:
        limits = replace(limits, usual=1 + max(drafter.record.limits.nodes for drafter in drafters))
    symbols = {
        graph: verifier_symbols(graph, limits) for graph in graphs_of(options.attention) if graph in manifest.graphs
    }
    for drafter in drafters:
        for graph, spec in drafter.engine_graphs.items():
            symbols[graph] = drafter_symbols(spec, drafter.method.spare_rows, limits)
    graphs = {graph: manifest.all_graphs[graph] for graph in symbols}
    report(f"preparing graphs for {target.product.title}")
    copies = {graph: copied_bytes(ir.load(folder / record.file)) for graph, record in graphs.items()}
    check_disk("copies of merged weights", {graph: size for graph, size in copies.items() if size}, folder)
    prepared = {
        graph: prepare(
            folder,
            record.file,
            graph,
            target.release,
            options.attention,
            fixed_capacity(symbols[graph]) if options.attention == "native" else None,
        )
        for graph, record in graphs.items()
    }
    timing = engine_cache.timing_cache(target)
    builds = {
        graph: EngineBuild(
            folder / graph_file(graph),
            profiles_of(symbols[graph], record.inputs, limits, options.attention == "native"),
            timing,
            target,
            record.inputs,
            record.outputs,
            plugin.path if plugin else None,
            options.embed_plugin,
        )
        for graph, record in graphs.items()
    }
    keys = {graph: _key(folder, one, prepared[graph], tools) for graph, one in builds.items()}
    needs = _needs(manifest, graphs, prepared, builds)
    _check_fits(folder, needs, keys, options, target.gpu)
    for number, (graph, one) in enumerate(builds.items()):
        report(f"building engines {number}/{len(builds)}")
        _write(folder / f"{graph}.engine", one, keys[graph], build)
    record = TensorRtRecord(
        version=target.version,
        gpu=target.gpu.name,
        compute_capability=target.compute_capability,
        attention=options.attention,
        plugin=plugin.digest if plugin else "",
        plugin_file=_copy_plugin(folder, plugin) if plugin and not options.embed_plugin else "",
        engines={g: EngineRecord(f"{g}.engine", graph_file(g), one.profiles) for g, one in builds.items()},
    )
    return replace(manifest, backend_version=target.version, tensorrt=record)


def _needs(
    manifest: Manifest, graphs: Mapping[str, GraphRecord], prepared: Mapping[str, onnx.ModelProto],
    builds: Mapping[str, EngineBuild],
) -> dict[str, Needs]:  # fmt: skip
    owners = {graph: drafter.id for graph in graphs if (drafter := drafter_of(manifest, graph))}
    return {
        graph: needs_of(
            owners.get(graph, names.VERIFIER), prepared[graph], record.inputs, record.outputs, builds[graph].profiles
        )
        for graph, record in graphs.items()
    }


def _check_fits(
    folder: Path, needs: Mapping[str, Needs], keys: Mapping[str, str], options: TensorRtBuild, gpu: Gpu
) -> None:
    """Raise BackendError if engines do not fit on the disk, or in the memory of the GPU or the host.

    An engine in the cache is not built. It takes disk only if it must be copied from another file system.
    """
    built = {graph: need for graph, need in needs.items() if not engine_cache.has(keys[graph])}
    written = built if same_disk(folder, engine_cache.cache_folder()) else needs
    check_disk("the engines", {graph: need.weights for graph, need in written.items()}, folder)
    if not options.ignore_memory:
        check_host(built, available_bytes())
        if gpu.total_bytes:  # that of an engine that is built ahead is not known
            check_memory(needs, gpu.free_bytes, gpu.name)


def _key(folder: Path, one: EngineBuild, prepared: onnx.ModelProto, tools: Tools) -> str:
    """Return the engine's key in the cache."""
    files = {entry.value for t in prepared.graph.initializer for entry in t.external_data if entry.key == "location"}
    weights = DigestCache().digests(folder / file for file in files).values()
    digest = tools.plugin.digest if tools.plugin else ""
    return engine_cache.engine_key(prepared.SerializeToString(deterministic=True), weights, tools.target, digest, one)


def _write(out: Path, one: EngineBuild, key: str, build: Build) -> None:
    """Write one engine into the bundle, from the cache if it is there."""
    if engine_cache.fetch(key, out):
        return
    out.write_bytes(build(one))
    engine_cache.keep(key, out)


def _copy_plugin(folder: Path, plugin: Plugin) -> str:
    """Copy the library into the bundle and return its name: an engine needs the same library that it was built with."""
    shutil.copyfile(plugin.path, folder / plugin.path.name)
    return plugin.path.name
