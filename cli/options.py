"""Options that several commands take, and parsers of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.types import Budget

T = TypeVar("T")
BUDGET_FORM = "nodes=12,depth=4,width=4"

Engines = Annotated[Path, typer.Option("--engines", help="An engine bundle, as `redraft build` writes.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; `redraft doctor` shows the default and its reason.")
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu or cuda: the device that runs whole steps. By default TensorRT's GPU, else the host."
    ),
]
Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="Check every byte of the bundle, or none. By default all bytes are checked if a file has changed since "
        "the last full check.",
    ),
]
Inexact = Annotated[
    bool,
    typer.Option(
        "--inexact",
        help="Compute single tokens of one sequence on the CPU up to a tenth faster, by kernels that round "
        "differently. A text may then differ from the same text in a batch or by another method. In fp32 few "
        "texts differ, in int8 and int4 most longer ones. With redraft's operators (see doctor) it changes nothing.",
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, help="At most this many new tokens.")]
System = Annotated[str | None, typer.Option("--system", help="The system message that begins a chat; needs --chat.")]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help=f"Size of every tree, such as {BUDGET_FORM}. By default the fastest size. A fixed size leaves out the "
        "n-grams of ngram+ID. With --device, a depth or width below the drafter's own copies every tree.",
    ),
]

ControllerText = Annotated[
    str | None,
    typer.Option(
        "--controller",
        help="Chooses the size of every draft: `adaptive` (the default: the fastest), `fixed` (the default with "
        "--budget), or a rule for its length: gammatune, gammatune+, heuristic, confidence, svip. Options follow after "
        "commas, such as gammatune,delta=1 or fixed,gamma=4. --budget limits every size.",
    ),
]

DrafterOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter-option",
        help="Set an option of a method or drafter, such as ngram.prompt_lookup_max=3; may be given again.",
    ),
]


def parse_budget(text: str | None, *methods: str | None) -> Budget | None:
    """Parse a budget like `nodes=12,depth=4,width=4`. Raises UsageError for other text, or if no method drafts."""
    from redraft.bench.command import budget

    expected = "nodes, depth and width, whole numbers from 0"
    return _parse("--budget", text, methods, budget, expected, f"for example {BUDGET_FORM}")


def parse_acceptance(text: str | None, *methods: str | None) -> tuple[float, ...] | None:
    """Parse probabilities by depth like `0.9,0.8,0.7`. Raises UsageError for other text, or if no method drafts."""
    from redraft.bench.command import rates

    return _parse("--synthetic-acceptance", text, methods, rates, "probabilities by depth", "such as 0.9,0.8")


def _parse(
    option: str, text: str | None, methods: Sequence[str | None], parser: Callable[[str], T], expected: str, hint: str
) -> T | None:
    if text is None:
        return None
    if methods and set(methods) <= {"none", "inexact"}:
        raise UsageError(f"plain decoding drafts nothing: {option} would do nothing", "leave it out, or name a method")
    try:
        return parser(text)
    except ValueError:
        raise UsageError(f"{option} {text!r}: expected {expected}", hint) from None


def parse_drafter_options(texts: Sequence[str] | None) -> dict[str, dict[str, bool | int | float | str]]:
    """Return options by drafter from texts of the form ID.KEY=VALUE. Raises UsageError for another form."""
    found: dict[str, dict[str, bool | int | float | str]] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        drafter, _, key = name.partition(".")
        if not (drafter and key and value):
            raise UsageError(
                f"--drafter-option {text!r}: expected ID.KEY=VALUE", "for example ngram.prompt_lookup_max=3"
            )
        found.setdefault(drafter, {})[key] = _value(value)
    return found


def _value(text: str) -> bool | int | float | str:
    """Return the truth value or number that a text is, or the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
