"""The library of the TensorRT plugin: its path, and the TensorRT that it was built for.

`polygraphy run THIS_FILE --trt` loads a prepared graph with it. Polygraphy's own --plugins loads a library but does not
register its creators. REDRAFT_GRAPH names the graph, REDRAFT_TENSORRT_PLUGIN the plugin's library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.engines.digests import file_digest
from redraft.errors import BackendError

FOLDER = Path(__file__).resolve().parents[2] / "build" / "plugins"
VARIABLE = "REDRAFT_TENSORRT_PLUGIN"
GRAPH_VARIABLE = "REDRAFT_GRAPH"
NAME, VERSION, NAMESPACE = "TreeAttention", "1", ""
"""Name, version and namespace of the plugin's registered creator."""
LOG_PREFIX = "redraft TreeAttention: "
"""Beginning of the plugin's lines in TensorRT's log (plugins/tensorrt/log.cpp)."""
_FILE = re.compile(r"libredraft_tensorrt_(\d+)\.so")


@dataclass(frozen=True)
class Plugin:
    """A plugin library and its SHA-256."""

    path: Path
    digest: str


def library_name(major: int | str) -> str:
    """File name of the plugin for a major version of TensorRT; `make plugins` writes it."""
    return f"libredraft_tensorrt_{major}.so"


def find_plugin(major: int, folder: Path = FOLDER, environment: Mapping[str, str] = os.environ) -> Plugin:
    """The library for this major version, from `folder` or as REDRAFT_TENSORRT_PLUGIN names it.

    Raises BackendError if it is missing or was built for another major version, which would crash.
    """
    named = environment.get(VARIABLE)
    path = Path(named) if named else folder / library_name(major)
    build = "build it with `make plugins TENSORRT_ROOT=dir`"
    if not path.is_file():
        others = sorted(p.name for p in folder.glob("libredraft_tensorrt_*.so"))
        found = f"found {', '.join(others)}" if others and not named else "found none"
        raise BackendError(
            f"expected the plugin for TensorRT {major} at {path}, {found}",
            f"{build}, name it in {VARIABLE}, or build with --attention native",
        )
    match = _FILE.fullmatch(path.name)
    if match and int(match[1]) != major:
        raise BackendError(f"{path} was built for TensorRT {match[1]}, expected {major}", build)
    return Plugin(path, file_digest(path))


def load_plugin(library: Path, tensorrt: Any) -> None:
    """Register the plugin's creator with TensorRT, which takes it once a process. An earlier registration stays.

    Raises BackendError if it is refused.
    """
    registry = tensorrt.get_plugin_registry()
    if registry is not None and registry.get_creator(NAME, VERSION, NAMESPACE) is not None:
        return
    if registry is None or registry.load_library(str(library)) is None:
        raise BackendError(f"TensorRT does not load {library}", "build it with `make plugins TENSORRT_ROOT=dir`")


def load_network() -> Any:
    """Return builder, network and parser; Polygraphy calls this name."""
    import tensorrt
    from polygraphy.backend.trt import network_from_onnx_path

    load_plugin(Path(os.environ[VARIABLE]), tensorrt)
    return network_from_onnx_path(os.environ[GRAPH_VARIABLE], strongly_typed=True)
