"""A server whose replicas run on Ray Serve: one process with replicas on this machine, or an application of a cluster.

On a cluster: `serve run redraft.runtime.server.ray_app:build bundle=/models/vicuna-7b replicas=4`, or the same in a
configuration file of Serve. Every node needs the bundle at that path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.engines import Bundle, open_bundle
from redraft.errors import BackendError, UsageError
from redraft.runtime.replicas.cores import core_sets
from redraft.runtime.replicas.gateway import MAX_RETRIES, Gateway, Replicas
from redraft.runtime.server.settings import ServerSettings
from redraft.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from redraft.runtime.replicas.calls import Description

_STORE_BYTES = 100 << 20
"""Of Ray's store of large objects, which replicas do not use; Ray takes a third of the memory otherwise."""


@contextmanager
def local_replicas(
    folder: Path, count: int, options: Mapping[str, Any], settings: ServerSettings, retries: int = MAX_RETRIES,
    report: Callable[[str], None] = lambda stage: None,
) -> Iterator[Gateway]:  # fmt: skip
    """Start replicas on this machine, each on cores of its own, and yield their gateway. They end with the block.

    options: of `Runtime.open`.   report: called with the name of each stage that takes seconds.
    Raises UsageError without Ray and for more replicas than cores, and BackendError if they do not start.
    """
    sets = core_sets(count)
    bundle = open_bundle(folder)
    ray = _ray()
    from ray import serve

    from redraft.runtime.replicas.ray_serve import ServeReplicas, engine_deployment

    report("starting Ray")
    ray.init(
        num_cpus=sum(map(len, sets)), include_dashboard=False, log_to_driver=False, object_store_memory=_STORE_BYTES,
        logging_level=logging.ERROR,
    )  # fmt: skip
    try:
        serve.start(proxy_location="Disabled")
        report(f"starting {count} replicas")
        deployment = engine_deployment(
            folder, options, replicas=count, cores=min(map(len, sets)), per_machine=count,
            progress_timeout=settings.progress_timeout, drain_seconds=settings.drain_timeout,
        )  # fmt: skip
        try:
            handle = serve.run(deployment, name="redraft", route_prefix=None)
        except RuntimeError as error:
            raise BackendError(f"the replicas do not start: {_last_line(error)}", "read Ray's log") from error
        with _gateway(bundle, ServeReplicas(handle), retries) as gateway:
            yield gateway
    finally:
        serve.shutdown()
        ray.shutdown()


def _ray() -> Any:
    """Return Ray. Raises UsageError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.serve
    except ImportError:
        raise UsageError("replicas need Ray", "run `pip install 'redraft[ray]'`") from None
    return ray


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


@contextmanager
def _gateway(bundle: Bundle, replicas: Any, retries: int) -> Iterator[Gateway]:
    gateway = gateway_of(bundle, replicas, replicas.describe(), retries)
    try:
        yield gateway
    finally:
        gateway.close()


def gateway_of(bundle: Bundle, replicas: Replicas, description: Description, retries: int = MAX_RETRIES) -> Gateway:
    """Return a gateway to replicas of a bundle. Raises BackendError if they have another build."""
    manifest = bundle.manifest
    tokenizer = Tokenizer.load(bundle.path, manifest.bos_token_id, next(iter(manifest.eos_token_ids), None))
    return Gateway(bundle, tokenizer, replicas, description, retries)
