"""`redraft generate`: continue one prompt, streaming, or as JSON with the figures."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from redraft.cli import options as common
from redraft.cli import sampling_options as sampled
from redraft.cli.console import print_caveats, print_json
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.runtime import Runtime

STANDARD_INPUT = "-"


def generate(
    engines: common.Engines,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt; `-` reads the standard input; empty is a bare BOS.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the bundle's chat template.")] = False,
    system: common.System = None,
    method: Annotated[
        str | None, typer.Option(help="Drafting method; `none` decodes plainly; the bundle's best by default.")
    ] = None,
    max_new_tokens: common.NewTokens = 128,
    min_new_tokens: sampled.MinNewTokens = None,
    temperature: sampled.Temperature = None,
    top_k: sampled.TopK = None,
    top_p: sampled.TopP = None,
    min_p: sampled.MinP = None,
    seed: sampled.Seed = None,
    sampling: sampled.Sampling = None,
    repetition_penalty: sampled.Repetition = None,
    presence_penalty: sampled.Presence = None,
    frequency_penalty: sampled.Frequency = None,
    logit_bias: sampled.LogitBias = None,
    ban: sampled.Banned = None,
    logprobs: sampled.Logprobs = None,
    acceptance: sampled.AcceptanceRule = None,
    json_schema: sampled.JsonSchema = None,
    json_object: sampled.JsonObject = False,
    regex: sampled.Regex = None,
    grammar: sampled.LarkGrammar = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past the end-of-sequence token.")] = False,
    budget: common.BudgetText = None,
    controller: common.ControllerText = None,
    prediction: Annotated[
        Path | None, typer.Option(help="A UTF-8 file with text that the answer will repeat in part; `-` reads it.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the trees and results of every step, one JSON line a step.")
    ] = None,
    threads: common.Threads = None,
    device: common.Device = None,
    inexact: common.Inexact = False,
    drafter_option: common.DrafterOptions = None,
    verify: common.Verify = None,
    as_json: common.Json = False,
) -> None:
    """Continue a prompt with the engines of a bundle."""
    from redraft.runtime.conversation import check_system

    check_system(system, chat)
    text, size = read_prompt(prompt, prompt_file), common.parse_budget(budget, method)
    options = common.parse_drafter_options(drafter_option)
    if prompt == STANDARD_INPUT and prediction == Path(STANDARD_INPUT):
        raise UsageError("--prompt and --prediction both read the standard input", "give one of them as a file")
    predicted = read_prompt(STANDARD_INPUT, None) if prediction == Path(STANDARD_INPUT) else None
    if prediction and predicted is None:
        predicted = read_file(prediction)

    if logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json", "add --json")

    from redraft.cli.opening import open_runtime
    from redraft.runtime import SpeculationParams

    how = SpeculationParams(method, predicted, size, controller)
    given = dict(
        max_tokens=max_new_tokens, min_tokens=min_new_tokens, stop=tuple(stop or ()), ignore_eos=ignore_eos,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=sampled.parse_biases(logit_bias), banned_tokens=ban, logprobs=logprobs,
        acceptance=acceptance, json_schema=json_schema and read_file(json_schema), json_object=json_object, regex=regex,
        grammar=grammar and read_file(grammar),
    )  # fmt: skip
    sampled.check_sampling(sampling, **given)  # before the engines are opened
    with ExitStack() as stack:
        runtime = stack.enter_context(
            open_runtime(
                engines, threads=threads, verify=verify, device=device, exact=not inexact, drafter_options=options
            )
        )
        params = sampled.sampling_params(runtime, sampling, **given)
        ids = encode(runtime, text, chat, system)
        runtime.stream(ids, params, how)  # refuses invalid options before an earlier trace is overwritten
        file = stack.enter_context(writable(trace)) if trace else None
        if as_json:
            found = runtime.generate([ids], params, how, trace=file)[0]
            chosen = method or runtime.default_method
            print_json({"method": chosen, "caveats": list(runtime.caveats), **found.to_json()})
            return
        print_caveats(runtime.caveats)
        try:
            for chunk in runtime.stream(ids, params, how, file):
                typer.echo(chunk, nl=False)
                sys.stdout.flush()
        finally:
            typer.echo()  # before the line of an error too


def writable(path: Path, option: str = "--trace") -> IO[str]:
    """Open a text file to write, named by `option`. Raises UsageError if that fails."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}", "give another file") from None


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the one option given. Raises UsageError for none or two, DataError if it is not UTF-8."""
    if (prompt is None) == (file is None):
        raise UsageError("expected one of --prompt and --prompt-file", 'for example --prompt "Once upon a time"')
    if file is not None:
        return read_file(file)
    if prompt == STANDARD_INPUT:
        try:
            return sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"the standard input is not UTF-8 (byte {error.start})", "convert it first") from error
    return prompt or ""


def read_file(path: Path) -> str:
    """Return the text of a file. Raises DataError if it is not UTF-8."""
    from redraft.files import read_text

    return read_text(path)


def encode(runtime: Runtime, text: str, chat: bool, system: str | None = None) -> list[int]:
    """Return token ids of the prompt; with `chat`, of a conversation with the prompt as the user's first message."""
    if not chat:
        return runtime.encode(text)

    from redraft.runtime.conversation import Conversation

    return Conversation(runtime, system).ask(text)
