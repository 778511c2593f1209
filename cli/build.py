"""`redraft build`: a checkpoint to an engine bundle."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.assembly.options import DRAFTER_FORM, PRECISION_FORM, choose_drafters, parse_precisions
from redraft.cli.build_options import Amount, Attention, Backend, Weights, choose, choose_tensorrt
from redraft.cli.console import print_json, progress
from redraft.cli.options import Json
from redraft.cli.quality import quality_lines, quality_object
from redraft.config import HALVES, NATIVE, NATIVE_RELEASES, WEIGHT_ONLY, BuildConfig
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.engines.drafters import BuiltDrafter
    from redraft.engines.manifest import Manifest

ENGINES = Path("build/engines")


def build(
    model: Annotated[
        str, typer.Argument(help="A recipe (tiny, vicuna-7b …), a checkpoint folder, a GGUF file, or a Hub id.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The bundle; build/engines/NAME by default.")] = None,
    model_path: Annotated[
        Path | None, typer.Option(help="The recipe's checkpoint, a folder or a GGUF file, instead of a download.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar=PRECISION_FORM,
            help="Precision: fp32, fp16 or bf16; or int8, int4 or fp8 weights (on CPUs with 8-bit activations). On "
            "GPUs the last three save memory, but may be slower than fp16. Several make a bundle each, OUT-PRECISION. "
            "KEY is `target`, a rise of perplexity in percent, or a pattern of weights' names, with 4, 8 or 32 bits.",
        ),
    ] = None,
    backend: Annotated[Backend | None, typer.Option(help="The backend that runs the engines.")] = None,
    weights: Annotated[Weights, typer.Option(help="`random`: shapes only, to measure latency.")] = Weights.checkpoint,
    max_model_len: Annotated[
        int | None, typer.Option(help="Maximum sequence length in tokens; the model's own limit by default.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar=DRAFTER_FORM,
            help="A drafter for this model, any number of times; `none` builds none. DIR is its folder; a smaller "
            "model's folder, GGUF file, recipe or Hub id; `native` for the module inside of the checkpoint; `random` "
            "for latency work; or the id of a recipe's drafter. KEY is method, precision or an option of the method.",
        ),
    ] = None,
    eval_text: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND=FILE of held-out text to report perplexity on; `none` reports none, the default in fp16 and "
            "bf16."
        ),
    ] = None,
    quality: Annotated[
        Amount, typer.Option(help="Tokens of held-out text to report quality on: 1000 in all, or 6000 with `full`.")
    ] = Amount.short,
    attention: Annotated[
        Attention | None, typer.Option(help=f"TensorRT: our plugin, or TensorRT's own layers ({NATIVE_RELEASES}).")
    ] = None,
    embed_plugin: Annotated[
        bool, typer.Option("--embed-plugin", help="TensorRT: make the plugin part of the engines.")
    ] = False,
    batch: Annotated[int | None, typer.Option(help="TensorRT: at most this many sequences in a call.")] = None,
    tree_nodes: Annotated[
        int | None, typer.Option(help="TensorRT: at most this many nodes of a tree, its root included.")
    ] = None,
    compute_capability: Annotated[
        str | None, typer.Option(help="TensorRT for RTX: that of the GPUs to build for, such as 8.9; else that here.")
    ] = None,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="TensorRT: build even if GPU or host memory seems too small.")
    ] = False,
    skip_check: Annotated[
        bool, typer.Option("--skip-check", help="Do not compare the engines with transformers' own model.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Build even if the bundle is current or has another name.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Build engines from a checkpoint. Does nothing if the same build is there already."""
    with progress(quiet=as_json) as report, ExitStack() as stack:
        from redraft.assembly.bundle import build_bundle, shared_work
        from redraft.assembly.drafters import native_drafter
        from redraft.assembly.models import Place, find_model, find_recipe
        from redraft.assembly.preflight import check_libraries
        from redraft.assembly.quality import DEFAULT_TOKENS, FULL_TOKENS
        from redraft.engines.backends import check_buildable

        check_libraries()
        scratch = stack.enter_context(TemporaryDirectory(prefix="redraft-"))
        recipe = find_recipe(model)
        asked = parse_precisions(precision) if precision else [None]
        configs = []
        for one in asked:
            config = choose(recipe.build if recipe else BuildConfig(), one, backend, weights, max_model_len)
            engines = choose_tensorrt(
                config, attention, embed_plugin, batch, tree_nodes, ignore_memory, compute_capability
            )
            config = replace(config, tensorrt=engines)
            check_buildable(config)
            configs.append(replace(config, drafters=choose_drafters(config, drafter or (), report)))
        texts = [held_out(eval_text, config) for config in configs]
        found = find_model(model, recipe, Place(model_path, config.random_weights, Path(scratch)), report)
        tokens = FULL_TOKENS if quality is Amount.full else DEFAULT_TOKENS
        shared = stack.enter_context(shared_work(configs))
        summaries = []
        for config, text in zip(configs, texts, strict=True):
            start = time.monotonic()
            to = _place_of(out or ENGINES / found.name, config, len(configs))
            manifest, cached = build_bundle(
                found, config, to, text, force, report, check=not skip_check, tokens=tokens, shared=shared
            )
            native = native_drafter(found.path) if not (cached or manifest.drafters or config.random_weights) else ""
            summaries.append(summarise(manifest, to, cached, time.monotonic() - start, native))
    if as_json:
        print_json(summaries[0] if len(summaries) == 1 else {"bundles": summaries})
    else:
        typer.echo("\n".join(map(describe, summaries)))


def _place_of(out: Path, config: BuildConfig, builds: int) -> Path:
    """Return the folder of one of several builds."""
    return out if builds == 1 else out.with_name(f"{out.name}-{config.precision}")


def held_out(options: list[str] | None, config: BuildConfig) -> dict[str, str]:
    """Return text by kind from KIND=FILE options. Without any, return the repository's own text.

    Without options, builds in fp16, bf16 or for TensorRT get no text: their models may be too large for the fp32
    engines to compare with. Raises UsageError and DataError.
    """
    from redraft.assembly.evaluation import held_out_texts
    from redraft.files import read_text

    if options == ["none"] or (not options and (config.precision in HALVES or config.for_tensorrt)):
        return {}
    if not options:
        return {kind: read_text(path) for kind, path in held_out_texts().items()}
    pairs = [option.partition("=") for option in options]
    if bad := next((option for option, pair in zip(options, pairs, strict=True) if not (pair[0] and pair[2])), None):
        raise UsageError(f"--eval-text {bad!r}: expected KIND=FILE, or `none` alone")
    kinds = [kind for kind, _, _ in pairs]
    if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
        raise UsageError(f"--eval-text: the kind {twice!r} is given twice", "join its files, or name two kinds")
    return {kind: read_text(Path(file)) for kind, _, file in pairs}


def summarise(manifest: Manifest, out: Path, cached: bool, seconds: float, native: str = "") -> dict[str, Any]:
    """Return the build's result as a JSON object.

    `own_bytes` leaves hard links out; `weight_shares` is `sizes.weight_shares`; `native` is a line about a drafter
    inside of the checkpoint, if the bundle has no drafter.
    """
    from redraft.engines.drafters import read_drafters
    from redraft.engines.sizes import engine_bytes, own_bytes, total_bytes, weight_shares

    engines, merged = engine_bytes(manifest)
    return {
        "bundle": str(out),
        "cached": cached,
        "seconds": round(seconds, 3),
        "name": manifest.name,
        "architecture": manifest.model.architecture,
        "precision": manifest.precision,
        "backend": manifest.backend,
        "random_weights": manifest.model.random_weights,
        "caveats": list(manifest.model.caveats),
        "max_model_len": manifest.max_model_len,
        "drafters": {drafter.id: describe_drafter(drafter, out, manifest) for drafter in read_drafters(manifest)},
        "native": native or None,
        "bytes": total_bytes(manifest),
        "own_bytes": own_bytes(out, manifest),
        "engine_bytes": engines,
        "merged_weight_bytes": merged,
        "weight_shares": dict(weight_shares(out, manifest)),
        **quality_object(manifest),
        "quality": list(quality_lines(manifest)),
    }


def describe_drafter(drafter: BuiltDrafter, bundle: Path, manifest: Manifest) -> dict[str, Any]:
    """Return a drafter as a JSON object. `table_bytes` is the size of its tables, `draft_cost` is `bytes_cost`."""
    from redraft.engines.draft_costs import bytes_cost

    summary = drafter.method.describe(drafter.shape)
    record = drafter.record
    return {
        "method": record.method,
        "precision": record.precision,
        "summary": summary,
        "shape": dict(record.shape),
        "table_bytes": record.table_bytes,
        "draft_cost": bytes_cost(bundle, manifest, drafter),
    }


def describe(summary: dict[str, Any]) -> str:
    """Return the summary as lines."""
    from redraft.engines.draft_costs import describe_cost
    from redraft.engines.sizes import describe_shares, describe_size

    did = "is already built" if summary["cached"] else f"built in {summary['seconds']:.1f} s"
    lines = [
        f"{summary['bundle']}: {did}",
        f"  {summary['architecture']}, {summary['precision']}, context {summary['max_model_len']}, "
        f"{describe_size(summary['bytes'], summary['own_bytes'])}",
    ]
    if summary["engine_bytes"]:
        engines, merged = (summary[key] / 1e6 for key in ("engine_bytes", "merged_weight_bytes"))
        lines.append(f"  engines {engines:.1f} MB, weights copied to merge projections {merged:.1f} MB")
    if summary["precision"] in WEIGHT_ONLY:
        lines.append(f"  weights: {describe_shares(summary['weight_shares'])}")
    for drafter, found in summary["drafters"].items():
        tables = f", tables of {found['table_bytes'] / 1e6:.1f} MB" if found["table_bytes"] else ""
        lines.append(f"  drafter {drafter} ({found['method']}): {found['summary']}{tables}")
        if found["draft_cost"] is not None:
            lines.append(f"  drafter {drafter}: {describe_cost(found['draft_cost'], found['shape']['steps'])}")
    lines += [f"  {caveat}" for caveat in summary["caveats"]]
    lines += [f"  {line}" for line in summary["quality"]]
    if summary["native"]:
        lines.append(f"  the checkpoint has {summary['native']}: build with --drafter {NATIVE} to draft with it")
    return "\n".join(lines)
