"""The `redraft` command: its sub-commands, and how errors reach the user as one line and an exit status."""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated, Any

import typer
from typer._click.exceptions import ClickException, NoArgsIsHelpError  # typer exports only its leaves

from redraft import __version__
from redraft.cli import (
    advise,
    bench,
    build,
    chat,
    check,
    demo,
    doctor,
    generate,
    inspect,
    profile,
    replay,
    serve,
    top,
    train,
)
from redraft.errors import RedraftError
from redraft.interrupts import interrupts_repeated
from redraft.packages import extra_of

INTERRUPTED = 130
DEBUG = "REDRAFT_DEBUG"

SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(help="Speculative decoding as deployable engines.", **SETTINGS)
app.command("build")(build.build)
app.command("inspect")(inspect.inspect)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("advise")(advise.advise)
app.command("profile")(profile.profile)
app.command("replay")(replay.replay)
app.command("demo")(demo.demo)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.add_typer(check.app, name="check")
app.add_typer(train.app, name="train")


def print_version(wanted: bool) -> None:
    """Print the version and exit, before any sub-command is looked up."""
    if wanted:
        typer.echo(f"redraft {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks, as {DEBUG}=1 does.")] = False,
) -> None:
    """Speculative decoding as deployable engines."""
    if debug:
        os.environ[DEBUG] = "1"


def main() -> None:
    """Run the command line and leave with 0, 1 (it failed), 2 (bad usage) or 130 (interrupted)."""
    status = run(sys.argv[1:])
    gc.freeze()  # the process ends: a last look at all objects of PyTorch would take more than a second
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Return the exit status of one `redraft` command."""
    return run_app(app, arguments, "redraft")


def run_app(commands: typer.Typer, arguments: list[str], program: str) -> int:
    """Return the exit status of one command of `commands`; its error, if any, is one line on the standard error.

    `program` is the name of the command line in usage and help.
    """
    try:
        with interrupts_repeated():
            status = int(commands(arguments, prog_name=program, standalone_mode=False) or 0)
        return _fail("interrupted", INTERRUPTED) if status == INTERRUPTED else status
    except NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except ClickException as error:
        return _fail(_one_line(error.format_message()) + _help_hint(error), error.exit_code)
    except RedraftError as error:
        return _fail(_one_line(str(error)), error.exit_status, error)
    except OSError as error:
        return _fail(_one_line(str(error)), 1, error)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "") or "dev"
        return _fail(f"{error.name} is not installed; run `pip install 'redraft[{extra}]'`", 1, error)
    except Exception as error:  # noqa: BLE001  (the last resort: the user gets one line for a defect too)
        text = _one_line(f"{type(error).__name__}: {error}")
        return _fail(f"unexpected {text}; run again with {DEBUG}=1 and report the traceback", 1, error)


def _fail(message: str, status: int, error: BaseException | None = None) -> int:
    if error is not None and os.environ.get(DEBUG):
        raise error
    print(f"redraft: error: {message}", file=sys.stderr)
    return status


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _help_hint(error: ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see `{context.command_path} --help`)" if context else ""
