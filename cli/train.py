"""`redraft train`: train a drafter from text, publish it, measure it."""

# pylint: disable=too-many-lines  # one function for each command of `redraft train`
from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from redraft.methods import find_method as specification
from redraft.train.objectives import COMMANDS

if TYPE_CHECKING:
    import torch

app = typer.Typer(help="Train drafters.", no_args_is_help=True)


Device = Literal["cpu", "cuda"]
Products = Literal["auto", "fp32", "bf16"]
DeviceOption = Annotated[Device, typer.Option(help="Device to compute on.")]
Dtype = Annotated[
    Products, typer.Option(help="Type of products; `auto` is bf16 if the device multiplies it faster, else fp32.")
]
Verifier = Annotated[
    str, typer.Option(help="The verifier: a checkpoint's folder, a GGUF file, a Hugging Face id, or a recipe.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")]


@app.callback()
def group() -> None:
    """Train drafters."""


def drafter(
    context: typer.Context,
    verifier: Verifier,
    out: Annotated[Path, typer.Option(help="Run folder: texts, progress, checkpoint.")],
    texts: Annotated[
        Path | None, typer.Option(help="A folder of `redraft train text` or `pack`, instead of --data.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND=SOURCE, once for each kind; SOURCE is stdlib, a .jsonl or a text file. Without it, the "
            "verifier writes all text."
        ),
    ] = None,
    config: Annotated[str | None, typer.Option(help="A recipe of redraft, or a .toml file.")] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="A run or published drafter to begin with, instead of the recipe's init."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole run, instead of the recipe's.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs over the text, instead of the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the recipe's.")] = None,
    device: DeviceOption = "cpu",
    dtype: Dtype = "auto",
    compile_graph: Annotated[bool, typer.Option("--compile", help="Use torch.compile (needs a C++ compiler).")] = False,
    threads: Threads = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's checkpoint.")] = False,
    checkpoint_every: CheckpointEvery = 100,
    as_json: Json = False,
) -> None:
    """Train a drafter by the method in the command's name. Without --config, its default recipe is used."""
    from rich.console import Console

    from redraft.errors import UsageError
    from redraft.train.data import parse_sources
    from redraft.train.drafter_run import train_drafter
    from redraft.train.objectives import find_training
    from redraft.train.progress import ProgressReport

    command = str(context.info_name)
    name = COMMANDS[command]
    training = find_training(name)
    if steps and epochs:
        raise UsageError("--steps and --epochs both give the length", "give one of them")
    recipe = training.recipe.load(config or training.schedule or command).with_options(steps, seed, epochs)
    if recipe.method != name:
        raise UsageError(
            f"the recipe {config} is for {recipe.method}",
            f"use `redraft train {specification(recipe.method).command}`",
        )
    if texts and data:
        raise UsageError("--texts and --data both give the text", "give one of them")
    _use_threads(threads)
    console = Console(quiet=as_json)
    with ProgressReport(console) as report:
        ran = train_drafter(
            name,
            _verifier_path(verifier),
            parse_sources(data or []),
            out,
            recipe,
            texts=texts,
            start=start,
            device=device,
            dtype=_dtype(dtype, device),
            compile_graph=compile_graph,
            resume=resume,
            checkpoint_every=checkpoint_every,
            report=report,
        )
    _trained(ran, out, console, as_json)


for _name, _method in COMMANDS.items():
    app.command(_name, help=f"Train a drafter. {specification(_method).summary}")(drafter)


@app.command("all")
def every(
    verifier: Verifier,
    out: Annotated[Path, typer.Option(help="Folder of the comparison: texts, runs, results.json.")],
    texts: Annotated[
        Path | None, typer.Option(help="A folder of `redraft train text` or `states`, instead of --data.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="KIND=SOURCE, once for each kind.")] = None,
    config: Annotated[str, typer.Option(help="A comparison of redraft, or a .toml file.")] = "compare",
    runs: Annotated[str | None, typer.Option(help="Runs of the comparison, separated by commas.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas, instead of the comparison's.")] = None,
    device: DeviceOption = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = None,
    checkpoint_every: CheckpointEvery = 100,
    as_json: Json = False,
) -> None:
    """Train several drafters under one protocol, and compare their acceptance. Continues what was interrupted."""
    from rich.console import Console

    from redraft.errors import UsageError
    from redraft.train.compare import CompareRecipe, chosen, train_all
    from redraft.train.compare_results import results_table
    from redraft.train.data import parse_sources
    from redraft.train.progress import ProgressReport

    if texts and data:
        raise UsageError("--texts and --data both give the text", "give one of them")
    if not all(word.isdecimal() for word in _words(seeds)):
        raise UsageError(f"--seeds {seeds}: expected whole numbers from 0, separated by commas")
    recipe = chosen(CompareRecipe.load(config), _words(runs), tuple(map(int, _words(seeds))))
    _use_threads(threads)
    console = Console(quiet=as_json)
    with ProgressReport(console) as report:
        results = train_all(
            recipe,
            _verifier_path(verifier),
            parse_sources(data or []),
            out,
            texts=texts,
            device=device,
            dtype=_dtype(dtype, device),
            checkpoint_every=checkpoint_every,
            report=report,
            begun=lambda name, seed: console.print(f"{name}, seed {seed}", soft_wrap=True, markup=False),
        )
    if as_json:
        typer.echo(json.dumps([one.to_dict() for one in results]))
    else:
        typer.echo(results_table(results))


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


@app.command()
def text(
    verifier: Verifier,
    out: Annotated[Path, typer.Option(help="Folder of the texts; an interrupted one is continued.")],
    config: Annotated[str, typer.Option(help="A recipe of texts of redraft, or a .toml file.")] = "smollm2-text",
    data: Annotated[
        list[str] | None, typer.Option(help="KIND=SOURCE, for every kind of the recipe except chat.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="A bundle of this verifier, whose engines write, several times as fast.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Texts that the bundle writes at once; 64 by default.")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Let a chat verifier answer questions, as text to train its drafters on; keeps its hidden states."""
    from redraft.errors import UsageError
    from redraft.train.data import load_corpus, parse_sources
    from redraft.train.text_shards import Shards
    from redraft.train.write_text import TextRecipe, check_engines, write_text, written_tokens

    recipe, sources = TextRecipe.load(config), parse_sources(data or [])
    if set(sources) != set(recipe.data_kinds):
        raise UsageError(
            f"--data gives {sorted(sources)}, the recipe asks about {sorted(recipe.data_kinds)}",
            "give one --data KIND=SOURCE for each",
        )
    if bundle is not None:
        check_engines(recipe)
    elif max_num_seqs is not None:
        raise UsageError("--max-num-seqs belongs to --bundle", "give --bundle too, or set `rows` in the recipe")
    corpora = {kind: load_corpus(kind, source, recipe.held_out_every) for kind, source in sources.items()}
    _use_threads(threads)
    model = _open_verifier(verifier, device, dtype)
    told = _batches(as_json), lambda line: typer.echo(f"warning: {line}", err=True)
    if bundle is None:
        write_text(model, corpora, recipe, out, *told)
    else:
        from redraft.cli.engine_writer import open_engines

        with open_engines(bundle, model.identity, max_num_seqs or 64, threads) as engines:
            write_text(model, corpora, recipe, out, *told, engines)
    tokens = dict(written_tokens(Shards(out)))
    _report({"out": str(out), "tokens": tokens}, f"{sum(tokens.values()):,} tokens in {out}: {tokens}", as_json)


@app.command()
def pack(
    texts: Annotated[Path, typer.Argument(help="Folder that `redraft train text` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    as_json: Json = False,
) -> None:
    """Write the token ids of texts as one small file, which `redraft train` and `redraft train states` read."""
    from redraft.train.text_shards import PACKED
    from redraft.train.text_shards import pack as write_packed

    write_packed(texts, out)
    size = (out / PACKED).stat().st_size
    _report({"out": str(out / PACKED), "bytes": size}, f"wrote {out / PACKED}, {size / 1e6:.1f} MB", as_json)


@app.command()
def states(
    texts: Annotated[Path, typer.Argument(help="Folder that `redraft train pack` wrote.")],
    verifier: Verifier,
    out: Annotated[Path, typer.Option(help="Folder of texts with states; an interrupted one is continued.")],
    hidden_states: Annotated[str, typer.Option(help="Hidden states to keep: `last`, or numbers of layers.")] = "last",
    limit: Annotated[int | None, typer.Option(min=1, help="Take only so many texts, the first ones.")] = None,
    device: DeviceOption = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compute the verifier's hidden states and likeliest logits of packed texts, once for all runs and methods."""
    from redraft.train.write_text import compute_states

    _use_threads(threads)
    kept = tuple(hidden_states.split(","))
    model = _open_verifier(verifier, device, dtype)
    compute_states(model, texts, out, kept, progress=_batches(as_json), limit=limit)
    _report({"out": str(out), "hidden_states": list(kept)}, f"wrote {out}", as_json)


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="Run folder that `redraft train` wrote; --format takes a drafter too.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    storage: Annotated[
        Literal["bf16", "int8"] | None, typer.Option(help="Type of matrices, instead of the method's.")
    ] = None,
    form: Annotated[
        Literal["drafter", "transformers"],
        typer.Option("--format", help="`transformers` writes a model of its own, with the verifier's embedding."),
    ] = "drafter",
    verifier: Annotated[str | None, typer.Option(help="The verifier, for --format transformers.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run as a drafter's checkpoint, with its figures and a card."""
    from redraft.train.publish import publish_drafter

    if form == "transformers":
        _publish_model(run, out, verifier, as_json)
        return
    training = publish_drafter(run, out, storage)
    if as_json:
        typer.echo(json.dumps(training))
        return
    typer.echo(f"wrote {out}, after {training['step']} steps")
    for kind, found in training["measured"].get("acceptance", {}).items():
        shares = " ".join(f"{top:.3f}/{wide:.3f}" for top, wide in zip(found["top"], found["wide"], strict=True))
        typer.echo(f"{kind}: {shares}")


def _publish_model(run: Path, out: Path, verifier: str | None, as_json: bool) -> None:
    from redraft.assembly.tokenizers import text_files
    from redraft.errors import UsageError
    from redraft.train.publish import publish_model

    if verifier is None:
        raise UsageError("--format transformers needs the verifier's embedding", "give --verifier")
    loaded = _open_verifier(verifier, "cpu", "fp32")
    publish_model(run, out, loaded, text_files(loaded.texts))
    _report({"out": str(out)}, f"wrote {out}, a model of transformers", as_json)


@app.command()
def acceptance(
    folder: Annotated[Path, typer.Argument(help="A published drafter.")],
    verifier: Verifier,
    prompts: Annotated[list[Path], typer.Option(help="A .jsonl file of prompts with turns; may be given again.")],
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens that the verifier writes after a prompt.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts of each kind.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the verifier's chat template.")] = False,
    device: DeviceOption = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Print how often a drafter's tokens equal those of its verifier's greedy text, by depth and kind of prompt."""
    from redraft.train.drafter_evaluate import evaluate_drafter

    _use_threads(threads)
    found = evaluate_drafter(folder, _verifier_path(verifier), prompts, new_tokens, limit, chat, device)
    if as_json:
        typer.echo(json.dumps({kind: values.to_dict() for kind, values in found.items()}))
        return
    typer.echo(
        "shares of correct drafts at each depth after a correct prefix: likeliest token / any of the four likeliest"
    )
    for kind, values in found.items():
        typer.echo(f"{kind} ({values.prompts} prompts): {values.acceptance}")


def _dtype(products: Products, device: Device) -> torch.dtype:
    import torch

    from redraft.train.verifier_model import fast_dtype

    return fast_dtype(device) if products == "auto" else {"fp32": torch.float32, "bf16": torch.bfloat16}[products]


def _verifier_path(name: str) -> Path:
    """Return the checkpoint that --verifier names. Downloads a Hugging Face id, and a recipe's package once."""
    from redraft.assembly.models import find_checkpoint

    if (folder := Path(name)).is_dir():
        return folder  # also one without a model, which training refuses with more detail
    return find_checkpoint(name, lambda line: typer.echo(line, err=True))


def _open_verifier(name: str, device: Device, dtype: Products) -> Any:
    from redraft.train.verifier_model import check_device, open_verifier

    check_device(device)
    return open_verifier(_verifier_path(name), device, _dtype(dtype, device))


def _batches(quiet: bool) -> Callable[[str, int, int, int], None]:
    """Return a report of batches: a line for each, with speed and the time left."""
    started: dict[str, tuple[float, int]] = {}  # by stage: seconds, batches done before
    total: Counter[str] = Counter()
    last = time.monotonic()

    def show(stage: str, done: int, of: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        begin, before = started.setdefault(stage, (last, done - 1))
        last = now
        total[stage] += tokens
        left_min = (now - begin) / (done - before) * (of - done) / 60
        if not quiet:
            typer.echo(f"{stage} {done}/{of} | {total[stage] / (now - begin):.0f} tokens/s, {left_min:.0f} min left")

    return show


def _report(values: dict[str, Any], line: str, as_json: bool) -> None:
    typer.echo(json.dumps(values) if as_json else line)


def _use_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def _trained(ran: int, out: Path, console: Any, as_json: bool) -> None:
    """Report a run; its length is the checkpoint's."""
    from redraft.train.loop import load_checkpoint

    steps = int(load_checkpoint(out)["step"])
    if as_json:
        typer.echo(json.dumps({"out": str(out), "steps": steps, "steps_run": ran}))
    else:
        console.print(f"trained {ran} steps, {steps} in all, in {out}", soft_wrap=True)
