"""`redraft check lossless`: the proof that a bundle's speculation changes no text and no distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.console import print_caveats, print_json, print_table, progress
from redraft.cli.demo import CODE, QUESTIONS
from redraft.cli.options import Device, Engines, Json, NewTokens, Threads, Verify
from redraft.cli.sampling_options import AcceptanceRule
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.bench.prompts import BenchPrompt
    from redraft.runtime import Runtime

TEXTS = (
    CODE,
    *QUESTIONS,
    "the cat and the dog and the cat and the dog and the",
    "One and two are three. One and three are four. One and four are",
    "a b a b a",
)
"""The default prompts. Some repeat themselves, so that lookups find drafts."""
FEWEST_DRAWS = 1000
HEADER = ("method", "temperature", "compared", "accepted drafts", "least p", "bias found from", "holds")

app = typer.Typer(help="Proofs about a bundle on this machine.", no_args_is_help=True)


@app.callback()
def checks() -> None:
    """Proofs about a bundle on this machine."""


@app.command("lossless")
def lossless(
    engines: Engines,
    method: Annotated[str | None, typer.Option(help="The method to check; by default all of the bundle.")] = None,
    temperature: Annotated[
        float, typer.Option(help="Of the sampled part. With 0, only greedy texts are compared.")
    ] = 1.0,
    acceptance: AcceptanceRule = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines with `turns`, whose first ones are the prompts; may be given again."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts of each kind.")] = None,
    draws: Annotated[int, typer.Option(min=FEWEST_DRAWS, help="Draws of each tested distribution.")] = 20_000,
    max_new_tokens: NewTokens = 48,
    seed: Annotated[int, typer.Option(help="The first seed; each text and each draw has its own.")] = 0,
    threads: Threads = None,
    device: Device = None,
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Compare texts with plain decoding's, and draws with the model's distribution. Exit 1 if a method fails.

    A bundle with a chat template decodes answers to the prompts.
    """
    from redraft.bench.lossless import BATCH, Proof, check_methods
    from redraft.bench.prompts import load_prompts
    from redraft.cli.opening import open_runtime
    from redraft.runtime import SamplingParams
    from redraft.runtime.params import COUPLED

    rule = acceptance or COUPLED
    SamplingParams(temperature=temperature, acceptance=rule, seed=seed)  # refuses bad values before engines are opened
    if rule != COUPLED and not temperature:
        raise UsageError(f"--acceptance {rule} needs a temperature above 0", "greedy decoding accepts no token by it")
    loaded = load_prompts(prompts, limit) if prompts else _default_prompts()[:limit]
    SamplingParams(seed=seed + 2 * len(loaded) + draws)  # a bound of the last seed
    opening = {"threads": threads, "device": device}
    with progress(quiet=as_json) as report:
        report("opening the engines")
        with open_runtime(engines, verify=verify, **opening) as runtime:
            methods = check_methods(runtime, method)
            asked, ids = _encoded(runtime, loaded, bool(prompts))
            proof = Proof(asked, ids, methods, temperature, rule, max_new_tokens, draws, seed, report)
            proof.alone(runtime)
            about = {
                "temperature": temperature,
                "acceptance": rule,
                "seed": seed,
                "device": runtime.verifier.device.name,
                "exact": runtime.exact,
                "caveats": list(runtime.caveats),
            }
        slots = min(BATCH, _most_sequences(engines))
        if slots > 1:
            report("opening the engines for batches")
            with open_runtime(engines, max_num_seqs=slots, verify=False, **opening) as runtime:
                proof.together(runtime)
    result = {**about, **proof.result()}
    print_json(result) if as_json else _print(result)
    raise typer.Exit(0 if result["holds"] else 1)


def _default_prompts() -> tuple[BenchPrompt, ...]:
    from redraft.bench.prompts import BenchPrompt

    return tuple(BenchPrompt(f"default/{number}", "default", text) for number, text in enumerate(TEXTS, 1))


def _encoded(
    runtime: Runtime, prompts: Sequence[BenchPrompt], given: bool
) -> tuple[list[BenchPrompt], list[list[int]]]:
    """Return prompts and their token ids, through the chat template if the bundle has one.

    given: a prompt that does not fit the context raises UsageError. Default prompts are left out if they fill more than
    half of the context.
    """
    from redraft.bench.compare import Settings, first_turn
    from redraft.runtime import SamplingParams

    try:
        runtime.tokenizer.check_chat_template()
        chat = True
    except UsageError:
        chat = False
    settings = Settings(SamplingParams(), chat=chat)
    fitting: list[tuple[BenchPrompt, list[int]]] = []
    for prompt in prompts:
        try:
            ids = first_turn(runtime, prompt, settings)
        except UsageError:
            if given:
                raise
            continue
        if given or len(ids) <= runtime.max_model_len // 2:
            fitting.append((prompt, ids))
    if not fitting:
        raise UsageError("no default prompt fits half of this model's context", "give --prompts")
    return [prompt for prompt, _ in fitting], [ids for _, ids in fitting]


def _most_sequences(engines: Path) -> int:
    """Return how many sequences at once the bundle's engines take."""
    import sys

    from redraft.engines.manifest import load_manifest

    largest = load_manifest(engines).largest_call
    return largest[0] if largest else sys.maxsize


def _print(result: Mapping[str, Any]) -> None:
    print_caveats(result["caveats"])
    rows = [row for method, one in result["methods"].items() for row in _rows(method, one, result["temperature"])]
    print_table([HEADER, *rows], f"acceptance {result['acceptance']}, device {result['device']}")
    for line in _lines(result):
        typer.echo(line)
    typer.echo("lossless" if result["holds"] else "NOT lossless")


def _rows(method: str, one: Mapping[str, Any], temperature: float) -> Iterator[tuple[str, ...]]:
    """Yield a row of the texts at each temperature, and one of the draws."""
    words = {True: "yes", False: "NO"}
    for each in dict.fromkeys(text["temperature"] for text in one["texts"]):
        texts = [text for text in one["texts"] if text["temperature"] == each]
        count, differing = sum(text["texts"] for text in texts), sum(len(text["differences"]) for text in texts)
        holds = words[all(text["holds"] for text in texts)]
        yield method, f"{each:g}", f"{count - differing} of {count} same", _accepted(texts), "-", "-", holds
    drawn = one["distribution"]
    if drawn is not None and drawn["draws"]:
        least = f"{min(test['p_value'] for test in drawn['tests'].values()):.1e}"
        bias, holds = f"{drawn['total_variation']:.1%}", words[drawn["holds"]]
        yield method, f"{temperature:g}", f"{drawn['draws']} draws", _accepted([drawn]), least, bias, holds


def _accepted(parts: Sequence[Mapping[str, Any]]) -> str:
    from redraft.bench.lossless import drafts_of

    drafted, accepted = drafts_of(parts)
    return f"{accepted} of {drafted}" if drafted else "-"


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield every difference and failed test, then warnings."""
    for method, figures in result["methods"].items():
        for text in figures["texts"]:
            for one in text["differences"]:
                kind = "near-tie" if one["near_tie"] else "DIFFERENT"
                margin = "past the end" if one["logit_margin"] is None else f"margin {one['logit_margin']:.2g}"
                yield (
                    f"{kind}: {method}, {text['trees']}, {text['max_num_seqs']} at a time, temperature "
                    f"{text['temperature']:g}: prompt {one['prompt']}, token {one['token']}, {margin}"
                )
        drawn = figures["distribution"]
        for name, test in (drawn["tests"] if drawn else {}).items():
            if test["p_value"] < drawn["least_p_value"]:
                yield (
                    f"BIASED: {method}, {name}: chi-square {test['chi_square']:.0f} of {test['degrees_of_freedom']} "
                    f"degrees of freedom in {drawn['draws']} draws, p {test['p_value']:.1e}"
                )
    seeds = result["seeds"]
    if seeds and not seeds["holds"]:
        yield f"WITHOUT NOISE: two seeds wrote the same {seeds['texts']} texts at temperature {result['temperature']:g}"
    for line in result["warnings"]:
        yield f"warning: {line}"
