"""A bundle's TensorRT graphs in a real parser and builder, without a GPU: one JSON object for each graph.

    pip install -e '.[tensorrt-rtx]'
    python -m tests.engines.tensorrt.real_parser [--build] [--table FILE] BUNDLE ...

TensorRT for RTX brings TensorRT's ONNX parser and builder in packages that need no driver. It has no plugins: a
TreeAttention node becomes the identity of its first input, and of the KV buffers that it updates. Of a bundle without
TensorRT graphs (--backend onnxruntime, fp16 or fp32) they are prepared for the plugin.

`parse_s` is the parser's time, `layers` the network's layers before TensorRT fuses them; --build adds `build_s` and the
engine's `mb` for compute capability 8.9. `refused` is what TensorRT says of a graph that it does not take: the status
is then 1. --table writes all as a table. A process of its own is needed, since a refusal may abort.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from redraft import names
from redraft.config import TensorRtBuild
from redraft.engines import Bundle, open_bundle
from redraft.engines.manifest import Manifest
from redraft.engines.tensorrt.builder import EngineBuild, build_engine, parse, product_logger
from redraft.engines.tensorrt.plugin import Plugin
from redraft.engines.tensorrt.stage import stage_engines
from redraft.engines.tensorrt.target import RTX, Target, Tools, find_target, import_tensorrt
from redraft.errors import BackendError

CAPABILITY = "8.9"
_TABLE = """\
# TensorRT's builder on every graph

`make check-tensorrt` writes this page: TensorRT for RTX {version} parses every graph of the embedded model and builds
it for compute capability 8.9, on two cores and without a GPU. So nothing here has run. Layers are those of the network,
before TensorRT fuses them; what it fused is only told by an engine that is loaded, which takes a GPU. With the plugin,
its node is an identity here, since TensorRT for RTX has no plugins.

| precision | attention | graph | parse s | build s | engine MB | layers |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Parse, and build, every graph of the bundles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--build", action="store_true", help="build engines too")
    parser.add_argument("--table", type=Path, help="write a page of Markdown")
    options = parser.parse_args()
    target = find_target(product=RTX, capability=CAPABILITY)
    found = []
    for path in options.bundles:
        for one in checked(open_bundle(path), target, options.build):
            print(json.dumps(one), flush=True)
            found.append(one)
    if options.table:
        options.table.write_text(_TABLE.format(version=target.version) + "".join(map(_row, found)))
    sys.exit(any("refused" in one for one in found))


def checked(bundle: Bundle, target: Target, build: bool) -> Iterator[dict[str, Any]]:
    """Yield what TensorRT says of every prepared graph of a bundle."""
    with tempfile.TemporaryDirectory(dir=bundle.path.parent) as scratch:
        folder = Path(scratch) / "bundle"
        shutil.copytree(bundle.path, folder, copy_function=os.link)
        manifest = bundle.manifest if bundle.manifest.tensorrt else _prepared(folder, bundle.manifest, target)
        record = manifest.tensorrt
        assert record is not None
        of = {"precision": manifest.precision, "attention": record.attention}
        for graph, engine in record.engines.items():
            file = folder / engine.graph
            model = without_plugin(ir.load(file))
            file.unlink()  # another name of the bundle's own file
            ir.save(model, file)
            spec = manifest.all_graphs[graph]
            outputs = {value.name for value in model.graph.outputs}
            given = [value for value in spec.outputs if value.name in outputs]
            one = EngineBuild(file, engine.profiles, folder / "times", target, spec.inputs, tuple(given))
            yield {**of, "graph": graph, **_measured(one, build)}


def _prepared(folder: Path, manifest: Manifest, target: Target) -> Manifest:
    """Prepare all graphs for the plugin, and build nothing."""
    (library := folder / "plugin.so").write_bytes(b"")
    manifest = replace(manifest, backend=RTX.backend)
    tools = Tools(target, Plugin(library, manifest.build_key))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    options = TensorRtBuild(ignore_memory=True, embed_plugin=True)
    return stage_engines(folder, manifest, options, tools, lambda line: None, lambda build: b"none")


def _measured(one: EngineBuild, build: bool) -> dict[str, Any]:
    tensorrt, start = import_tensorrt(product=RTX), time.monotonic()
    try:
        logger = product_logger(tensorrt)
        network, _parser = parse(tensorrt, tensorrt.Builder(logger), logger, one)
        found = {"parse_s": round(time.monotonic() - start, 3), "layers": network.num_layers}
        if build:
            start = time.monotonic()
            size = build_engine(one).nbytes
            found |= {"build_s": round(time.monotonic() - start, 2), "mb": round(size / 1e6, 1)}
        return found
    except BackendError as error:
        return {"refused": error.message}


def without_plugin(model: ir.Model) -> ir.Model:
    """Put identities in the place of the plugin's nodes, in place."""
    for node in [node for node in model.graph if node.op_type == names.TREE_ATTENTION]:
        for source, output in zip((node.inputs[0], *node.inputs[3:5]), list(node.outputs), strict=False):
            same = ir.node("Identity", [source], name=f"{node.name}.{output.name}")
            same.outputs[0].dtype, same.outputs[0].shape = output.dtype, output.shape
            model.graph.insert_before(node, same)
            ir.convenience.replace_all_uses_with(output, same.outputs[0], replace_graph_outputs=True)
            same.outputs[0].name, output.name = output.name, None
        model.graph.remove(node, safe=True)
    return model


def _row(one: dict[str, Any]) -> str:
    cells = [one["precision"], one["attention"], f"`{one['graph']}`"]
    cells += [str(one.get(key, one.get("refused", ""))) for key in ("parse_s", "build_s", "mb", "layers")]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
