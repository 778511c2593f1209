"""What `redraft serve` does around its server: the bundle of a model, and the lines that it prints."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from redraft.engines.manifest import MANIFEST, load_manifest
from redraft.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redraft.runtime.server.served import Served
    from redraft.runtime.server.settings import ServerSettings

_BUILD = "from redraft.cli.main import main; main()"
_ISOLATED = "-P"
"""Python then looks for no module in the working folder."""


def bundle_of(model: str | None, engines: Path | None) -> Path:
    """Return the bundle's folder: `engines`, MODEL itself if it is a bundle, or the place where a build puts it.

    Raises UsageError unless one of the two is given, and for an invalid recipe.
    """
    if (model is None) == (engines is None):
        raise UsageError("give a model or a bundle", "such as `redraft serve smollm2-135m`, or --engines BUNDLE")
    if engines is not None:
        return engines
    assert model is not None
    if (Path(model) / MANIFEST).is_file():
        return Path(model)
    from redraft.assembly.models import bundle_name, find_recipe
    from redraft.assembly.resolve import ENGINES

    return ENGINES / bundle_name(model, find_recipe(model))


def build(model: str) -> None:
    """Build a model's bundle as `redraft build MODEL` does, which prints to the standard error.

    A process of its own builds, so that the server's memory has nothing of it. Ends this command with the status of a
    build that fails.
    """
    done = subprocess.run([sys.executable, _ISOLATED, "-c", _BUILD, "build", model], stdout=2, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode if done.returncode > 0 else 1)


def check_source(bundle: Path, model: str) -> None:
    """Raise UsageError if a bundle in the place of MODEL's is another model's: places have short names."""
    source = load_manifest(bundle).model.source
    same = source == model or (Path(model).exists() and Path(source).resolve() == Path(model).resolve())
    if not same and bundle.resolve() != Path(model).resolve():
        raise UsageError(
            f"{bundle} is the bundle of {source}, not of {model}",
            f"serve it by its folder, or run `redraft build {model} -o DIR` and serve DIR",
        )


def description(
    address: str, runtime: Served, settings: ServerSettings, queued: int, memory: str
) -> Iterator[str]:  # fmt: skip
    """Yield the lines about a server that listens. queued: requests that may wait.   memory: the line about that."""
    prompt = min(runtime.max_model_len - 1, settings.max_prompt_tokens or runtime.max_model_len)
    yield f"listening on {address}"
    yield f"  model {settings.model_name}, context {runtime.max_model_len}, {runtime.fingerprint}"
    yield f"  methods {', '.join(runtime.methods)}; {runtime.default_method} by default"
    yield memory
    yield (
        f"  limits {runtime.slots} requests at once, {queued} waiting, {prompt} tokens of a prompt, "
        f"{settings.max_body_bytes} bytes of a body"
    )


def memory_of(engines: Path, slots: int) -> str:
    """Return the line about this process's memory, with so many slots."""
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return f"  memory {process:.0f} MB at most so far, {_parts(engines, slots)}"


def memory_of_replicas(engines: Path, replicas: int, slots: int) -> str:
    """Return the line about the memory of replicas, each with so many slots."""
    return f"  {replicas} replicas, each with the limits below, {_parts(engines, slots)}"


def _parts(engines: Path, slots: int) -> str:
    from redraft.engines.sizes import kv_bytes, weight_bytes

    manifest = load_manifest(engines)
    weights, rows = weight_bytes(manifest) / 1e6, kv_bytes(manifest, slots) / 1e6
    return f"weights {weights:.1f} MB, KV of {slots} full slots {rows:.1f} MB"
