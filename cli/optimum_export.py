"""`optimum-cli export redraft`: `redraft build` with model and bundle as arguments like optimum's other exports."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from redraft.cli.build import build
from redraft.cli.main import SETTINGS, run_app

PROGRAM = "optimum-cli export redraft"

_DIFFERENT: dict[str, Any] = {
    "model": Annotated[str, typer.Option("-m", "--model", help="A recipe, a checkpoint folder, or a Hub id.")],
    "out": Annotated[Path | None, typer.Argument(help="The bundle; build/engines/NAME by default.")],
}
"""Parameters of `build` that have other names in optimum. All others are the same."""


@functools.wraps(build)
def export(**options: Any) -> None:
    """Call `build`. Typer reads the options from `__signature__`."""
    build(**options)


def _signature() -> inspect.Signature:
    """Return the signature of `build` with the parameters of `_DIFFERENT` replaced."""
    signature = inspect.signature(build, eval_str=True)
    parameters = [
        parameter.replace(annotation=_DIFFERENT.get(name, parameter.annotation))
        for name, parameter in signature.parameters.items()
    ]
    return signature.replace(parameters=parameters)


export.__signature__ = _signature()  # type: ignore[attr-defined]
app = typer.Typer(**SETTINGS)
app.command()(export)


def run(arguments: list[str]) -> int:
    """Return the exit status of one export: 0, 1 (it failed), 2 (bad usage) or 130 (interrupted)."""
    return run_app(app, arguments, PROGRAM)
