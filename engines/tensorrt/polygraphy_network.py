"""A prepared graph as a network for `polygraphy run THIS_FILE --trt`.

Polygraphy's own --plugins loads a library but does not register its creators. REDRAFT_GRAPH names the graph,
REDRAFT_TENSORRT_PLUGIN the plugin's library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from redraft.engines.tensorrt.plugin import VARIABLE, load_plugin
from redraft.engines.tensorrt.target import import_tensorrt

GRAPH_VARIABLE = "REDRAFT_GRAPH"


def load_network() -> Any:
    """Return builder, network and parser; Polygraphy calls this name."""
    from polygraphy.backend.trt import network_from_onnx_path

    load_plugin(Path(os.environ[VARIABLE]), import_tensorrt())
    return network_from_onnx_path(os.environ[GRAPH_VARIABLE], strongly_typed=True)
