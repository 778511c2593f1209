"""A server whose replicas run on Ray Serve: one process with replicas on this machine, or an application of a cluster.

On a cluster: `serve run redraft.runtime.server.ray_app:build bundle=/models/vicuna-7b replicas=4`, or the same in a
configuration file of Serve (`deploy/serve.yaml`). Every node needs the bundle at that path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)  # fmt: skip

from redraft import __version__
from redraft.cpus import cores_of
from redraft.engines import Bundle, open_bundle
from redraft.engines.manifest import load_manifest
from redraft.errors import BackendError, UsageError
from redraft.runtime.replicas.calls import check_identity, identity_of
from redraft.runtime.replicas.gateway import MAX_RETRIES, Gateway, Replicas
from redraft.runtime.server.settings import ServerSettings, read_api_keys
from redraft.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from redraft.runtime.replicas.calls import Description

_Found = TypeVar("_Found")
_FRONT_SECONDS = 600.0
"""Time that a front which has to leave has for its answers; its replicas end them earlier."""
_STORE_BYTES = 100 << 20
"""Of Ray's store of large objects, which replicas do not use; Ray takes a third of the memory otherwise."""


class ModelSettings(BaseModel):
    """One model of an application.

    bundle:   its folder, at the same path on every node.
    replicas: number of processes; with `max_replicas`, the least number, and Serve starts as many as the load needs.
    cores, gpus: of each replica.   cores_apart: True to keep replicas of one machine to cores of their own.
    max_num_seqs, max_queued_requests: requests of one replica that run at once, and that wait.
    prefix_slots: as `Runtime.open`.
    max_queued_tokens_each: tokens of waiting prompts for which one more replica starts.
    exact: as `Runtime.open`.   max_retries: deaths of its replica that a request survives.
    """

    model_config = ConfigDict(extra="forbid")

    bundle: Path
    replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None
    cores: PositiveInt = 1
    gpus: NonNegativeFloat = 0.0
    cores_apart: bool = True
    max_num_seqs: PositiveInt = 8
    prefix_slots: NonNegativeInt | None = None
    max_queued_requests: NonNegativeInt = 256
    max_queued_tokens_each: PositiveInt = 4096
    exact: bool = True
    max_retries: NonNegativeInt = MAX_RETRIES

    @field_validator("bundle")
    @classmethod
    def _whole_path(cls, given: Path) -> Path:
        """Return the path from the root: other processes have other working folders."""
        return given.absolute()


class AppSettings(BaseModel):
    """The arguments of an application: those of one model, or `models`, each by its name.

    name:  of the one model; that of its bundle's folder by default.
    fronts: processes that take HTTP requests, each of which knows its own requests only.
    api_key_file: as `redraft serve --api-key-file`, on every node. The others are fields of `ServerSettings`.
    """

    model_config = ConfigDict(extra="forbid")

    models: dict[str, ModelSettings] = Field(default_factory=dict)
    name: str | None = None
    fronts: PositiveInt = 1
    api_key_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    allow_unknown_fields: bool = False
    max_body_bytes: PositiveInt = 8 << 20
    max_prompt_tokens: PositiveInt | None = None
    request_timeout: PositiveFloat | None = None
    first_token_timeout: PositiveFloat | None = None
    progress_timeout: PositiveFloat = 30.0
    drain_timeout: PositiveFloat = 30.0

    @field_validator("allow_hosts", "allow_origins", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        """Take a text as `serve run` gives it, with commas."""
        return tuple(given.split(",")) if isinstance(given, str) else given

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, given: Any) -> Any:
        """Take the fields of one model out, and make them `models`."""
        if not isinstance(given, dict) or "models" in given or "bundle" not in given:
            return given
        own = {key: value for key, value in given.items() if key in ModelSettings.model_fields}
        rest = {key: value for key, value in given.items() if key not in own}
        return {**rest, "models": {given.get("name") or Path(given["bundle"]).name: own}}

    def server(self, model: str) -> ServerSettings:
        """Return the settings of a model's server. The application listens on all of a node's addresses."""
        keys = read_api_keys(self.api_key_file) if self.api_key_file else ()
        own = self.model_dump(exclude={"models", "name", "fronts", "api_key_file"})
        return ServerSettings(model_name=model, host="0.0.0.0", api_keys=keys, **own)


def build(given: AppSettings | dict[str, Any]) -> Any:
    """Return the application for Ray Serve: replicas of each model, and fronts that answer HTTP requests.

    Raises UsageError without a model, and pydantic's ValidationError for settings that are wrong.
    """
    args = AppSettings.model_validate(given)
    if not args.models:
        raise UsageError("the application has no model", "give bundle=DIR, or models in a configuration file")
    required_ray()
    from ray import serve
    from ray.serve.config import AutoscalingConfig

    from redraft.runtime.replicas.ray_serve import engine_deployment, load_policy

    engines = {}
    for number, (name, model) in enumerate(args.models.items()):
        count: int | AutoscalingConfig = model.replicas
        if model.max_replicas is not None:
            count = AutoscalingConfig(
                min_replicas=model.replicas, max_replicas=model.max_replicas,
                policy=load_policy(model.max_num_seqs, model.max_queued_tokens_each),
            )  # fmt: skip
        engines[name] = engine_deployment(
            model.bundle,
            {"max_num_seqs": model.max_num_seqs, "max_waiting": model.max_queued_requests, "exact": model.exact,
             "prefix_slots": model.prefix_slots},
            replicas=count, cores=model.cores, gpus=model.gpus, cores_apart=model.cores_apart,
            progress_timeout=args.progress_timeout, drain_seconds=args.drain_timeout, name=f"engine-{number}",
        )  # fmt: skip
    front: Any = serve.deployment(
        serve.ingress()(Front), name="front", num_replicas=args.fronts, max_ongoing_requests=1 << 20,
        ray_actor_options={"num_cpus": 1}, graceful_shutdown_timeout_s=_FRONT_SECONDS,
    )  # fmt: skip
    builds = {name: load_manifest(model.bundle).build_key for name, model in args.models.items()}
    return front.bind(args, engines, builds)


class Front:
    """Takes HTTP requests on a node, and asks the replicas of their model."""

    def __init__(self, args: AppSettings, engines: Mapping[str, Any], builds: Mapping[str, str]) -> None:
        """engines: handles of the replicas of each model.   builds: its bundle's; another one makes other fronts."""
        from redraft.runtime.replicas.ray_serve import ServeReplicas

        self._args = args
        self._gateways = {}
        for name, handle in engines.items():
            model, replicas = args.models[name], ServeReplicas(handle)
            self._gateways[name] = gateway_of(
                open_bundle(model.bundle, False),
                replicas,
                in_a_thread(replicas.describe),
                model.max_retries,
                model.max_queued_requests,
            )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from redraft.runtime.server.app import create_app
        from redraft.runtime.server.models_app import models_app

        apps: dict[str, FastAPI] = {
            name: create_app(gateway, self._args.server(name)) for name, gateway in self._gateways.items()
        }
        return models_app(apps)

    def __del__(self) -> None:
        for gateway in self._gateways.values():
            gateway.close()


def in_a_thread(call: Callable[[], _Found]) -> _Found:
    """Return what `call` returns, which may not run in an event loop's thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@contextmanager
def local_replicas(
    folder: Path, count: int, options: Mapping[str, Any], settings: ServerSettings, retries: int = MAX_RETRIES,
    report: Callable[[str], None] = lambda stage: None,
) -> Iterator[Gateway]:  # fmt: skip
    """Start replicas on this machine, each on cores of its own, and yield their gateway. They end with the block.

    options: of `Runtime.open`.   report: called with the name of each stage that takes seconds.
    Raises UsageError without Ray and for more replicas than cores, and BackendError if they do not start.
    """
    cores = len(cores_of(os.sched_getaffinity(0)))
    if count > cores:
        raise UsageError(f"{count} replicas need {count} cores, and there are {cores}", "start fewer replicas")
    bundle = open_bundle(folder)
    gpus = 1 if options.get("device") == "cuda" or bundle.manifest.tensorrt is not None else 0
    ray = required_ray()
    from ray import serve

    from redraft.runtime.replicas.ray_serve import ServeReplicas, engine_deployment

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    report("starting Ray")
    ray.init(
        "local", num_cpus=len(os.sched_getaffinity(0)), include_dashboard=False, log_to_driver=False,
        object_store_memory=_STORE_BYTES, logging_level=logging.ERROR, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        serve.start(proxy_location="Disabled")
        report(f"starting {count} replicas")
        deployment = engine_deployment(
            folder, options, replicas=count, cores=cores // count, cores_apart=True, gpus=gpus,
            progress_timeout=settings.progress_timeout, drain_seconds=settings.drain_timeout,
        )  # fmt: skip
        try:
            handle = serve.run(deployment, name="redraft", route_prefix=None)
        except RuntimeError as error:
            raise BackendError(f"the replicas do not start: {_why(serve, error)}", "read Ray's log") from error
        replicas = ServeReplicas(handle)
        gateway = gateway_of(bundle, replicas, replicas.describe(), retries, options.get("max_waiting"))
        try:
            yield gateway
        finally:
            gateway.close()
    finally:
        ray.shutdown()


def required_ray() -> Any:
    """Return Ray. Raises UsageError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # its ports listen on all addresses
    try:
        import ray
        import ray.serve
    except ImportError:
        raise UsageError("replicas need Ray", "run `pip install 'redraft[ray]'`") from None
    return ray


def _why(serve: Any, error: Exception) -> str:
    """Return the reason in what Serve says of the deployment: the last line of a traceback that names an error."""
    deployments = serve.status().applications["redraft"].deployments.values()
    lines = [line for deployment in deployments for line in deployment.message.splitlines()]
    named = [line.partition(": ")[2] for line in lines if line.startswith("redraft.errors.")]
    return named[-1] if named else str(error).strip()


def gateway_of(
    bundle: Bundle, replicas: Replicas, description: Description, retries: int = MAX_RETRIES,
    max_waiting: int | None = None,
) -> Gateway:  # fmt: skip
    """Return a gateway to replicas of a bundle. Raises BackendError if they cannot understand it."""
    manifest = bundle.manifest
    check_identity("there", description.identity, __version__, identity_of(manifest, "").tokens)
    tokenizer = Tokenizer.load(bundle.path, manifest.bos_token_id, next(iter(manifest.eos_token_ids), None))
    return Gateway(bundle, tokenizer, replicas, description, retries, max_waiting)
