"""Registers `optimum-cli export redraft`.

optimum-cli imports all files of the namespace folder optimum/commands/register when it starts: imports must be light.
"""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class RedraftExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum has no types
    """Passes all arguments to `redraft build`."""

    COMMAND = CommandInfo(name="redraft", help="Export a decoder to a redraft bundle for speculative decoding.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Take every argument unchanged: `redraft build` defines the options, also `--help`."""
        parser.prefix_chars = ""  # without it argparse refuses unknown options
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        """Build, and exit with the status of `redraft build`."""
        from redraft.cli.optimum_export import run

        sys.exit(run(self.args.arguments))


REGISTER_COMMANDS = [(RedraftExportCommand, ExportCommand)]
