"""`redraft serve`: an OpenAI-compatible server for a bundle."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from redraft.cli import options as common
from redraft.cli.console import print_caveats, progress

if TYPE_CHECKING:
    from redraft.runtime.server.served import Served


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A bundle's folder, or a model as `redraft build` takes it. If build/engines has no bundle of the "
            "model, it is built first."
        ),
    ] = None,
    engines: Annotated[Path | None, typer.Option(help="An engine bundle, as `redraft build` writes.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of the machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests; that of the bundle's folder by default.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once; others wait.")] = 8,
    prefix_slots: Annotated[
        int | None,
        typer.Option(min=0, help="Prompts whose rows are kept for others that begin so; --max-num-seqs by default."),
    ] = None,
    max_queued_requests: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get status 429.")] = 256,
    max_queued_tokens: Annotated[
        int | None, typer.Option(min=0, help="Prompt tokens that may wait; more get status 429. No limit by default.")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt; the model's context by default.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 8 << 20,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a request may take, its wait included. No limit by default.")
    ] = None,
    first_token_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that a request's first token may take, its wait included. No limit by default."),
    ] = None,
    progress_timeout: Annotated[
        float, typer.Option(help="/ready and all requests fail if no step ends for so many seconds.")
    ] = 30.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to end after SIGTERM or Ctrl-C.")
    ] = 30.0,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file of API keys, one a line; requests then need one of them.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name of the server that requests may give as Host, as those of a proxy; may be given again."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="An origin whose web pages may use the server, `*` for all; may be given again."),
    ] = None,
    allow_unknown_fields: Annotated[
        bool, typer.Option("--allow-unknown-fields", help="Ignore unknown fields of requests instead of refusing them.")
    ] = False,
    reload_drafter: Annotated[
        bool,
        typer.Option(
            "--reload-drafter",
            help="Let SIGHUP and POST /v1/drafters/reload read the bundle's drafters again while requests run.",
        ),
    ] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="The log's lines, on the standard error: text, or JSON objects.")
    ] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Least level of messages. `info` has a line for each request."),
    ] = "info",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log prompts and answers too.")] = False,
    log_clients: Annotated[bool, typer.Option("--log-clients", help="Log clients' addresses too.")] = False,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, help="Processes that serve the model, each on cores of its own; more than one needs redraft[ray]."
        ),
    ] = 1,
    max_retries: Annotated[int, typer.Option(min=0, help="Deaths of its replica that a request survives.")] = 1,
    threads: common.Threads = None,
    device: common.Device = None,
    inexact: common.Inexact = False,
    drafter_option: common.DrafterOptions = None,
    verify: common.Verify = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does. SIGTERM and Ctrl-C let running requests end."""
    from redraft.cli import serving
    from redraft.cli.opening import open_runtime
    from redraft.runtime.server.app import create_app
    from redraft.runtime.server.logs import configure_logging
    from redraft.runtime.server.process import DrainingServer, bound_socket
    from redraft.runtime.server.settings import ServerSettings, read_api_keys

    bundle = serving.bundle_of(model, engines)
    settings = ServerSettings(
        model_name=name or bundle.resolve().name, host=host, port=port,
        api_keys=read_api_keys(api_key_file) if api_key_file else (), allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()),
        allow_unknown_fields=allow_unknown_fields, max_body_bytes=max_body_bytes, max_prompt_tokens=max_prompt_tokens,
        max_queued_tokens=max_queued_tokens, request_timeout=request_timeout, first_token_timeout=first_token_timeout,
        progress_timeout=progress_timeout, drain_timeout=drain_timeout, reload_drafter=reload_drafter,
        log_prompts=log_prompts, log_clients=log_clients,
    )  # fmt: skip
    configure_logging(log_format, log_level)
    if reload_drafter:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server listens
    options = common.parse_drafter_options(drafter_option)
    with bound_socket(settings) as sock, ExitStack() as stack:
        if model is not None:
            if bundle.is_dir():
                serving.check_source(bundle, model)
            else:
                serving.build(model)
        with progress() as report:
            opening: dict[str, Any] = {
                "threads": threads, "device": device, "verify": verify, "exact": not inexact,
                "drafter_options": options, "max_num_seqs": max_num_seqs, "max_waiting": max_queued_requests,
                "prefix_slots": prefix_slots,
            }  # fmt: skip
            runtime: Served
            if replicas > 1:
                from redraft.runtime.server.ray_app import local_replicas

                runtime = stack.enter_context(local_replicas(bundle, replicas, opening, settings, max_retries, report))
                slots = max_num_seqs + (max_num_seqs if prefix_slots is None else prefix_slots)
                memory = serving.memory_of_replicas(bundle, replicas, slots)
            else:
                runtime = opened = stack.enter_context(
                    open_runtime(bundle, **opening, report=lambda stage: report(f"opening {bundle}: {stage}"))
                )
                report(f"warming {opened.default_method}")
                opened.warm()
                memory = serving.memory_of(bundle, opened.verifier.slots)
        print_caveats(runtime.caveats)

        def started(address: str) -> None:
            for line in serving.description(address, runtime, settings, max_queued_requests, memory):
                typer.echo(line)

        DrainingServer(create_app(runtime, settings), settings, started).run(sockets=[sock])
