"""Options of the command line that become `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.runtime import Runtime, SamplingParams

MODEL = "model"

Temperature = Annotated[
    float | None,
    typer.Option(help="0, the default, is greedy; above, tokens are drawn from softmax(logits / temperature)."),
]
TopK = Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens; 0 is all.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")]
MinP = Annotated[float | None, typer.Option(help="Draw from tokens at least this share as likely as the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Seed of every random number, from 0; equal seeds give equal texts.")]
Repetition = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Divide the logits of tokens in prompt and answer by this.")
]
Presence = Annotated[
    float | None, typer.Option("--presence-penalty", help="Subtract this from the logits of the answer's tokens.")
]
Frequency = Annotated[
    float | None, typer.Option("--frequency-penalty", help="Subtract this for each time a token is in the answer.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", help="Add a number to a token's logit, such as 42=-1.5; may be given again."),
]
Banned = Annotated[list[int] | None, typer.Option("--ban", help="A token id that is never chosen; may be given again.")]
MinNewTokens = Annotated[
    int | None, typer.Option("--min-new-tokens", help="No end of the text before so many new tokens.")
]
Logprobs = Annotated[
    int | None,
    typer.Option("--logprobs", help="With --json, each token's log probability and those of so many alternatives."),
]
JsonSchema = Annotated[
    Path | None, typer.Option("--json-schema", help="A file with a JSON schema that the text must match.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="The text must be a JSON object.")]
Regex = Annotated[str | None, typer.Option("--regex", help="A regular expression that the whole text must match.")]
LarkGrammar = Annotated[
    Path | None, typer.Option("--grammar", help="A file with a Lark grammar that the text must match.")
]
AcceptanceRule = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="Above temperature 0, how drafts are accepted. `coupled`: the text is the same with any method. "
        "`rejection`, `block`: the text only has the same distribution.",
    ),
]
Sampling = Annotated[
    str | None,
    typer.Option("--sampling", help=f"`{MODEL}`: defaults of the model's generation_config.json, not greedy decoding."),
]


def check_sampling(sampling: str | None, **given: Any) -> SamplingParams:
    """Return the parameters of the options that were given, without the model's. Raises UsageError."""
    from redraft.runtime import SamplingParams

    if sampling not in (None, MODEL):
        raise UsageError(f"--sampling {sampling!r} is unknown", f"the only choice is {MODEL}")
    return SamplingParams(**_given(given))


def sampling_params(runtime: Runtime, sampling: str | None, **given: Any) -> SamplingParams:
    """Return the parameters of the options that were given, and the model's own for the others if requested."""
    if sampling == MODEL:
        return runtime.model_sampling(**_given(given))
    return check_sampling(sampling, **given)


def parse_biases(texts: Sequence[str] | None) -> dict[int, float] | None:
    """Return biases by token id from texts of the form ID=BIAS. Raises UsageError for another form."""
    found: dict[int, float] = {}
    for text in texts or ():
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias {text!r}: expected ID=BIAS", "for example 42=-1.5") from None
    return found or None


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
