"""Replicas as a deployment of Ray Serve, which starts, checks, replaces and counts them. It needs the extra `ray`."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from redraft.cpus import cores_of, default_threads
from redraft.engines.manifest import load_manifest
from redraft.errors import BackendError, BundleError, RedraftError
from redraft.runtime.api import Runtime
from redraft.runtime.replicas.calls import Answer, Call, Description, identity_of
from redraft.runtime.replicas.cores import core_sets, take_cores
from redraft.runtime.replicas.gateway import ReplicaDied
from redraft.runtime.replicas.replica import Replica
from redraft.runtime.replicas.routing import OVERLOAD, PrefixTable

_CHECK_SECONDS, _UNANSWERED_SECONDS = 2.0, 30.0
_LOG = logging.getLogger("redraft.replicas")
_BROKEN_STATUS = 70
_BUSY = 0.75
"""Share of the slots that should have a request: above it, one more replica starts."""
_FOREVER = 1 << 20
"""More requests than a replica ever takes: it has a queue of its own, which refuses what does not fit."""


def _processors(cores: int) -> int:
    """Return how many processors so many cores of this machine have: Ray counts these."""
    cpus = os.sched_getaffinity(0)
    return cores * len(cpus) // len(cores_of(cpus))


class Engine:
    """A replica in an actor of Ray.

    bundle:  its folder, on this machine.   build: its digest, which is the same on all machines.
    options: of `Runtime.open`.
    cores:   physical cores to which it keeps; 0 to leave that to the system.
    """

    def __init__(
        self, bundle: str, build: str, options: Mapping[str, Any], cores: int, progress_timeout: float
    ) -> None:
        manifest = load_manifest(Path(bundle))
        if manifest.build_key != build:
            raise BundleError(
                f"{bundle} on this node is another bundle than on the node that deploys it: build "
                f"{manifest.build_key[:12]}, not {build[:12]}", "copy the same bundle to all nodes",
            )  # fmt: skip
        if cores:
            _, self._held = take_cores(core_sets(cores))
            default_threads.cache_clear()
        runtime = Runtime.open(Path(bundle), **options)
        runtime.warm()
        gc.collect()
        gc.freeze()
        name, identity = serve.get_replica_context().replica_tag, identity_of(manifest, runtime.kernels)
        self._replica = Replica(runtime, name, identity, progress_timeout)

    async def describe(self) -> Description:
        """As `Replica.describe`."""
        return self._replica.describe()

    async def run(self, call: Call) -> AsyncGenerator[Answer]:
        """As `Replica.run`."""
        async with aclosing(self._replica.run(call)) as answers:
            async for answer in answers:
                yield answer

    def check_health(self) -> None:
        """End the process if it cannot go on. Serve would let it drain first, and its requests would wait for that."""
        try:
            self._replica.check()
        except RedraftError:
            _LOG.exception("replica %s ends", self._replica.name)
            os._exit(_BROKEN_STATUS)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what Serve scales by: requests that run, and tokens of prompts and answers that wait."""
        return self._replica.load()


class PrefixRouter(FIFOMixin, RequestRouter):
    """Sends a call to the replica that has most of its prompt's rows (`PrefixTable`). It counts its own calls only."""

    def initialize_state(self, overload: int = OVERLOAD, **_: Any) -> None:
        """Begin without any knowledge."""
        self._table = PrefixTable(overload)
        self._calls: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, one a rank."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._calls[name] for name in by_name}
        call = _call_of(pending_request)
        if call is None:
            return [[by_name[name]] for name in sorted(loads, key=loads.__getitem__)]
        tokens = (*call.prompt, *call.written)
        return [[by_name[name]] for name in self._table.order(tokens, loads, call.cache_salt, call.session)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note which replica computes the prompt."""
        if (call := _call_of(pending_request)) is not None:
            self._table.note((*call.prompt, *call.written), replica_id.unique_id, call.cache_salt, call.session)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Note that a call is on its way."""
        super().on_send_request(replica_id)
        self._calls[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a call has ended."""
        self._calls[replica_id.unique_id] = max(self._calls[replica_id.unique_id] - 1, 0)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica's calls, too."""
        super().on_replica_actor_died(replica_id)
        self._calls.pop(replica_id.unique_id, None)


class LoadPolicy:
    """Serve's choice of the number of replicas: by requests that run and tokens that wait, in all of them.

    slots: requests that a replica runs at once.   queued_tokens: of waiting prompts, for which one more is worth it.
    """

    def __init__(self, slots: int, queued_tokens: int) -> None:
        self._slots = slots
        self._queued_tokens = queued_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number, and no state."""
        found = context.aggregated_metrics or {}
        running, waiting = (sum(found.get(name, {}).values()) for name in ("running_requests", "waiting_tokens"))
        return max(1, math.ceil(running / (_BUSY * self._slots) + waiting / self._queued_tokens)), {}


def load_policy(slots: int, queued_tokens: int) -> AutoscalingPolicy:
    """Return `LoadPolicy` as Serve takes it."""
    return AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=LoadPolicy, policy_kwargs={"slots": slots, "queued_tokens": queued_tokens}
    )  # fmt: skip


def _call_of(pending: PendingRequest | None) -> Call | None:
    return next((one for one in pending.args if isinstance(one, Call)), None) if pending is not None else None


class ServeReplicas:
    """The replicas behind a handle of an `Engine` deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._run: Any = handle.options(method_name="run", stream=True)

    def describe(self) -> Description:
        """Return the description of one of them. Waits until there is one. Not for an event loop's thread."""
        found: Description = self._handle.describe.remote().result()
        return found

    async def ping(self) -> None:
        """As `Replicas.ping`."""
        try:
            await self._handle.describe.remote()
        except asyncio.CancelledError:
            raise _not_ours(False) from None

    async def run(self, call: Call) -> AsyncGenerator[Answer]:
        """As `Replicas.run`. Waits for a replica while there is none."""
        answers = self._run.remote(call)
        try:
            async for answer in answers:
                yield answer
        except RayTaskError:  # raised in the replica, which lives
            raise
        except DeploymentUnavailableError as error:
            raise BackendError("no replica can be started", "read Ray's log") from error
        except (RayError, RayServeException) as error:
            raise ReplicaDied(isinstance(error, ActorDiedError)) from error  # Serve repeats what was not taken yet
        except asyncio.CancelledError:
            raise _not_ours(True) from None
        finally:
            with suppress(Exception):
                answers.cancel()


def _not_ours(worked: bool) -> BaseException:
    """Return what to raise for a cancelled call: ReplicaDied if Ray has cancelled it, and not the caller."""
    task = asyncio.current_task()
    return asyncio.CancelledError() if task is not None and task.cancelling() else ReplicaDied(worked)


def engine_deployment(  # noqa: PLR0913 - the settings of a deployment
    bundle: Path, options: Mapping[str, Any], *, replicas: int | AutoscalingConfig, cores: int, gpus: float = 0,
    cores_apart: bool = False, progress_timeout: float = 30.0, drain_seconds: float = 30.0, overload: int = OVERLOAD,
    name: str = "engine",
) -> Any:  # fmt: skip
    """Return the bound deployment of a bundle's replicas.

    replicas: their number, or how Serve chooses it.   cores, gpus: of each one.
    cores_apart: True to keep replicas of one machine to cores of their own, unless they have a GPU.
    drain_seconds: that a replica which has to leave may take to end its requests; others go on with the rest.
    """
    count: dict[str, Any] = (
        {"autoscaling_config": replicas} if isinstance(replicas, AutoscalingConfig) else {"num_replicas": replicas}
    )
    apart = cores if cores_apart and not gpus else 0
    opening = {**options, "threads": options.get("threads") or (None if apart else cores)}
    engine: Any = serve.deployment(
        Engine, name=name, max_ongoing_requests=_FOREVER,
        ray_actor_options={"num_cpus": _processors(cores), "num_gpus": gpus},
        health_check_period_s=_CHECK_SECONDS, health_check_timeout_s=_UNANSWERED_SECONDS,
        graceful_shutdown_timeout_s=drain_seconds, graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,  # type: ignore[arg-type]
            request_router_kwargs={"overload": overload}
        ),
        **count,
    )  # fmt: skip
    return engine.bind(
        str(bundle.resolve()), load_manifest(bundle).build_key, opening, apart, progress_timeout
    )  # fmt: skip
