"""`redraft chat`: a conversation on the terminal, with answers as they are written."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redraft.cli.console import print_caveats, progress
from redraft.cli.options import Device, NewTokens, Threads, Verify
from redraft.cli.sampling_options import Sampling, Seed, Temperature, TopK, TopP, check_sampling, sampling_params
from redraft.errors import RedraftError, UsageError

if TYPE_CHECKING:
    from redraft.runtime import Generation, Runtime, SamplingParams
    from redraft.runtime.submission import Submission

PROMPT = "> "
COMMANDS = {
    "/method": "list the methods, or draft with the one that follows: /method ngram; /method none decodes plainly",
    "/stats": "figures of the last answer and of the conversation",
    "/new": "start over",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does; Ctrl-C ends an answer",
}


def chat(
    engines: Annotated[Path, typer.Argument(metavar="BUNDLE", help="An engine bundle, as `redraft build` writes.")],
    system: Annotated[str | None, typer.Option(help="The system message that begins the conversation.")] = None,
    method: Annotated[str | None, typer.Option(help="Drafting method; the bundle's best by default.")] = None,
    max_new_tokens: NewTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    sampling: Sampling = None,
    threads: Threads = None,
    device: Device = None,
    verify: Verify = None,
) -> None:
    """Talk to a model. Type /help for commands. Reads a message a line from the standard input."""
    given = {"max_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    check_sampling(sampling, **given)  # before the engines are opened

    from redraft.cli.opening import open_runtime

    typed = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that a message that is not UTF-8 is refused alone
    with progress(not typed) as report:
        report(f"opening {engines}")
        runtime = open_runtime(engines, threads=threads, device=device, verify=verify)
    with runtime:
        talk = Chat(runtime, system, sampling_params(runtime, sampling, **given), method)
        print_caveats(runtime.caveats)
        if typed:
            typer.echo(f"{engines} drafts with {talk.method}. /help lists commands, Ctrl-D ends.")
        for line in _lines(typed):
            try:
                if not talk.take(line):
                    return
            except RedraftError as error:  # of this message alone
                print(f"redraft: {error}", file=sys.stderr)


def _lines(typed: bool) -> Iterator[str]:
    """Yield the user's lines that are not blank, until they end or Ctrl-C is pressed at the prompt."""
    if typed:
        import readline  # noqa: F401  (`input` then edits lines and remembers them)
    while True:
        try:
            line = input(PROMPT if typed else "")
        except (EOFError, KeyboardInterrupt):
            if typed:
                typer.echo()
            return
        if line.strip():
            yield line


class Chat:
    """A conversation, and the figures of its answers.

    Raises UsageError for a model without a chat template, or for an unknown method.
    """

    def __init__(self, runtime: Runtime, system: str | None, params: SamplingParams, method: str | None) -> None:
        self._runtime = runtime
        self._system = system
        self._params = params
        self.method = method or runtime.default_method
        self._choose(self.method)
        self._start()

    def _start(self) -> None:
        from redraft.runtime.conversation import Conversation

        self._conversation = Conversation(self._runtime, self._system)
        self._generations: list[Generation] = []
        self._origins: list[Counter[str]] = []

    def take(self, line: str) -> bool:
        """Obey a command or answer a message. Returns False at the end. Raises RedraftError of this line alone."""
        word, _, rest = line.strip().partition(" ")
        if not word.startswith("/"):
            self._answer(line)
        elif word == "/quit":
            return False
        elif word == "/help":
            typer.echo("\n".join(f"  {name:8} {does}" for name, does in COMMANDS.items()))
        elif word == "/new":
            self._start()
        elif word == "/stats":
            self._print_stats()
        elif word == "/method":
            if rest:
                self._choose(rest.strip())
            typer.echo(f"  drafts with {self.method}; of {', '.join(self._runtime.methods)}")
        else:
            raise UsageError(f"there is no command {word}", f"the commands are {', '.join(COMMANDS)}")
        return True

    def _choose(self, method: str) -> None:
        if method not in self._runtime.methods:
            raise UsageError(f"there is no method {method!r}", f"this bundle has {', '.join(self._runtime.methods)}")
        self.method = method

    def _answer(self, message: str) -> None:
        """Print an answer while it is written. Ctrl-C ends it, and the conversation goes on from there."""
        from rich.console import Console

        from redraft.cli.written import styled
        from redraft.interrupts import interrupts_deferred
        from redraft.runtime.conversation import ConversationTooLong

        try:
            ids = self._conversation.ask(message)
        except ConversationTooLong as error:
            raise UsageError(error.message, "/new starts over") from None
        console = Console(highlight=False, soft_wrap=True)
        answer: Submission | None = None
        written: list[str] = []
        origins: Counter[str] = Counter()
        try:
            with interrupts_deferred() as interrupts:
                answer = self._runtime.pieces(ids, self._params, self.method)
                for piece in answer.pieces():
                    origins[piece.origin] += 1
                    written.append(piece.text)
                    if console.is_terminal:
                        console.print(styled(piece.text, piece.origin), end="")
                    else:
                        typer.echo(piece.text, nl=False)  # rich would replace tabs
                    if interrupts:
                        break  # leaving the text aborts it
        except KeyboardInterrupt:
            pass  # the answer has ended
        finally:
            typer.echo()
            self._conversation.answer("".join(written))
        if answer is not None:
            answer.abort()
            self._generations.append(answer.ended())
            self._origins.append(origins)

    def _print_stats(self) -> None:
        if not self._generations:
            raise UsageError("there is no answer yet")
        last = self._generations[-1]
        _print_figures("last answer", [last], self._origins[-1])
        if len(self._generations) > 1:
            _print_figures(f"{len(self._generations)} answers", self._generations, sum(self._origins, Counter()))
        used = last.prompt_tokens + len(last.token_ids)
        typer.echo(f"  the conversation fills {used} of {self._runtime.max_model_len} tokens")


def _print_figures(title: str, generations: list[Generation], origins: Counter[str]) -> None:
    from redraft.cli.written import print_counts

    metrics = [one.metrics for one in generations]
    tokens, steps = sum(len(one.token_ids) for one in generations), sum(one.num_steps for one in metrics)
    seconds = sum(sum(one.stage_ms.values()) for one in metrics) / 1e3
    first = max(one.time_to_first_token_ms for one in metrics) / 1e3
    rate = f"{tokens / seconds:.1f} tokens a second" if tokens and seconds else "too short to time"
    length = 1 + sum(one.num_accepted_draft_tokens for one in metrics) / max(steps, 1)
    typer.echo(f"  {title}: {rate}, {length:.2f} tokens a verification, first token after {first:.2f} s")
    print_counts(origins)
