"""The parts of `redraft bench` that comparisons and load measurements share: default methods, and conditions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redraft.bench.compare import Settings
    from redraft.runtime import Runtime


def default_methods(runtime: Runtime, engines: Path) -> list[str]:
    """Return n-grams, the default method, and INEXACT if the bundle has a graph for it."""
    from redraft.bench.compare import INEXACT

    best = [] if runtime.default_method == "ngram" else [runtime.default_method]
    return [*([INEXACT] if has_inexact(runtime, engines) else []), "ngram", *best]


def has_inexact(runtime: Runtime, engines: Path) -> bool:
    """Return True if a second runtime of these engines could decode inexactly."""
    from redraft import names
    from redraft.engines.manifest import load_manifest

    device = runtime.verifier.device
    on_host = runtime.exact and not device.step_graphs and not device.own_attention
    return on_host and names.VERIFIER_FAST in load_manifest(engines).graphs


def conditions(runtime: Runtime, settings: Settings, engines: Path, threads: int | None) -> dict[str, Any]:
    """Return the part of a comparison's JSON object that is not figures: the environment, the model, the settings."""
    from redraft.bench.environment import environment, usable_threads
    from redraft.engines.manifest import load_manifest

    manifest = load_manifest(engines)
    model = {
        "name": manifest.name,
        "precision": manifest.precisions,
        "weights_sha256": dict(manifest.model.weights),
        "random_weights": manifest.model.random_weights,
        "caveats": list(runtime.caveats),
        "build_key": manifest.build_key,
    }
    device = runtime.verifier.device.name  # `host` if the runtime computes between engine calls
    return {
        "synthetic_acceptance": list(settings.acceptance) if settings.acceptance else None,
        "environment": {**environment(threads or usable_threads()), "device": device, "model": model},
        "max_new_tokens": settings.params.max_tokens,
        "sampling": settings.params.distribution,
        "chat": settings.chat,
        "system": settings.system,
    }
