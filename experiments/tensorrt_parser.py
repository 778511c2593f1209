"""A bundle's TensorRT graphs in a real parser, without a GPU: one JSON object for each graph.

    pip install -e '.[tensorrt-rtx]'
    python -m experiments.tensorrt_parser BUNDLE

TensorRT for RTX brings the ONNX parser of TensorRT in a package of its own, which needs no driver. It has no plugins: a
TreeAttention node becomes the identity of its first input, and of the KV buffers that it updates. `seconds` is the
parser's time, `layers` the network's layers, `refused` what the parser says of the first node that it does not take.
Ends with status 1 if a graph is refused. A process of its own is needed, since a refusal may abort.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import onnx_ir as ir

from redraft import names
from redraft.engines.tensorrt.prepare import graph_file


def main() -> None:
    """Parse every prepared graph of the bundle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    bundle = parser.parse_args().bundle
    files = sorted(bundle.glob(graph_file("*")))
    if not files:
        sys.exit(f"{bundle} has no graphs for TensorRT: build it with --backend tensorrt")
    refused = 0
    for file in files:
        found = parsed(file)
        refused += "refused" in found
        print(json.dumps(found), flush=True)
    sys.exit(refused > 0)


def parsed(file: Path) -> dict[str, Any]:
    """Return what the parser says of a prepared graph. Its weights must be beside it."""
    import tensorrt_rtx_bindings as tensorrt

    errors: list[str] = []
    logger = _logger(tensorrt, errors)
    builder = tensorrt.Builder(logger)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    model = without_plugin(ir.load(file))
    start = time.monotonic()
    taken = parser.parse(ir.serde.serialize_model(model).SerializeToString(), str(file))
    found = {"graph": file.name.removesuffix(graph_file("")), "seconds": round(time.monotonic() - start, 3)}
    if taken:
        return {**found, "layers": network.num_layers}
    first = parser.get_error(0) if parser.num_errors else None
    said = f"{first.node_name()}: {first.desc()}" if first else "".join(errors[-1:])
    return {**found, "refused": " ".join(said.split())}


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


def _logger(tensorrt: Any, errors: list[str]) -> Any:
    def begin(logger: object) -> None:
        tensorrt.ILogger.__init__(logger)

    def log(logger: object, severity: Any, message: str) -> None:
        if severity in (tensorrt.ILogger.ERROR, tensorrt.ILogger.INTERNAL_ERROR):
            errors.append(message)

    return type("Logger", (tensorrt.ILogger,), {"__init__": begin, "log": log})()


if __name__ == "__main__":
    main()
