"""Built engines by content: graph, weights, GPU, versions, plugin and settings. An engine is built once a machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from redraft.engines.digests import text_digest
from redraft.engines.tensorrt.builder import EngineBuild
from redraft.engines.tensorrt.target import Target
from redraft.files import link_or_copy
from redraft.user_cache import user_cache


def cache_folder() -> Path:
    """Return the folder of engines and timing caches: redraft/tensorrt in the user's cache folder."""
    return user_cache() / "tensorrt"


def timing_cache(target: Target, folder: Path | None = None) -> Path:
    """The file of measured kernel times of this TensorRT and GPU."""
    gpu = "".join(letter if letter.isalnum() else "-" for letter in target.gpu.name)
    return (folder or cache_folder()) / f"timing-{target.version}-{gpu}-{target.compute_capability}.cache"


def engine_key(graph: bytes, weights: Iterable[str], target: Target, plugin: str, build: EngineBuild) -> str:
    """Digest of all that an engine depends on.

    graph:    the prepared graph without its weights.     weights: digests of the files that it names.
    plugin:   digest of the plugin's library, empty for none.
    """
    told = repr((build.profiles, build.settings))
    return text_digest(
        graph.hex(), *sorted(weights), target.version, target.gpu.name, target.compute_capability, plugin, told,
        _polygraphy(),
    )  # fmt: skip


def _polygraphy() -> str:
    """Polygraphy's version, since its defaults change engines. Without Polygraphy nothing is built."""
    try:
        return metadata.version("polygraphy")
    except metadata.PackageNotFoundError:
        return "none"


def fetch(key: str, out: Path, folder: Path | None = None) -> bool:
    """Put the cached engine of this key at `out`. False if there is none."""
    cached = _path(key, folder)
    if not cached.is_file():
        return False
    link_or_copy(cached, out)
    return True


def keep(key: str, engine: Path, folder: Path | None = None) -> None:
    """Remember a built engine. A cache that cannot be written costs the next build time, nothing else."""
    cached = _path(key, folder)
    temporary = cached.with_name(f"{cached.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(engine, temporary)
        temporary.replace(cached)
    temporary.unlink(missing_ok=True)


def _path(key: str, folder: Path | None) -> Path:
    return (folder or cache_folder()) / f"{key}.engine"
