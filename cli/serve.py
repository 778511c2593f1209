"""`redraft serve`: an OpenAI-compatible server for a bundle."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Annotated

import typer

from redraft.cli import options as common
from redraft.cli.console import print_caveats, progress


def serve(
    engines: common.Engines,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of the machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests; the name of the bundle's folder by default.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once; others wait.")] = 8,
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
    progress_timeout: Annotated[
        float, typer.Option(help="/ready fails if requests wait and no step ends for so many seconds.")
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
    threads: common.Threads = None,
    device: common.Device = None,
    inexact: common.Inexact = False,
    drafter_option: common.DrafterOptions = None,
    verify: common.Verify = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does. SIGTERM and Ctrl-C let running requests end."""
    from redraft.cli.opening import open_runtime
    from redraft.runtime.server.app import create_app
    from redraft.runtime.server.process import DrainingServer, bound_socket
    from redraft.runtime.server.settings import ServerSettings, read_api_keys

    settings = ServerSettings(
        model_name=name or engines.resolve().name, host=host, port=port,
        api_keys=read_api_keys(api_key_file) if api_key_file else (), allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()),
        allow_unknown_fields=allow_unknown_fields, max_body_bytes=max_body_bytes, max_prompt_tokens=max_prompt_tokens,
        max_queued_tokens=max_queued_tokens, request_timeout=request_timeout, progress_timeout=progress_timeout,
        drain_timeout=drain_timeout,
    )  # fmt: skip
    options = common.parse_drafter_options(drafter_option)
    with bound_socket(settings) as sock:
        with progress() as report:
            report(f"opening {engines}")
            runtime = open_runtime(
                engines, threads=threads, device=device, verify=verify, exact=not inexact, drafter_options=options,
                max_num_seqs=max_num_seqs, max_waiting=max_queued_requests,
            )  # fmt: skip
        with runtime:
            runtime.warm()
            print_caveats(runtime.caveats)

            def started(address: str) -> None:
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                typer.echo(f"listening on {address}")
                typer.echo(f"  model {settings.model_name}, context {runtime.max_model_len}, {runtime.fingerprint}")
                typer.echo(f"  methods {', '.join(runtime.methods)}; {runtime.default_method} by default")
                typer.echo(f"  memory {memory / 1e6:.0f} MB, {max_num_seqs} requests at once")

            DrainingServer(create_app(runtime, settings), settings, started).run(sockets=[sock])
