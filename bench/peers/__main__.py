"""The command. Worker processes import this module too, so it imports the rest only as the main program."""

from __future__ import annotations

if __name__ == "__main__":
    from redraft.bench.command import one_line_errors
    from redraft.bench.peers.command import main

    with one_line_errors():
        main()
