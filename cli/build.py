"""`redraft build`: a checkpoint to an engine bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from redraft.assembly.options import DEFAULT_TOKENS, DRAFTER_FORM, FULL_TOKENS, PRECISION_FORM, BuildRequest
from redraft.cli.console import print_json, progress
from redraft.cli.options import Json
from redraft.cli.quality import quality_lines, quality_object
from redraft.config import NATIVE, NATIVE_RELEASES, RANDOM, WEIGHT_ONLY, Backend
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.assembly.bundle import Built
    from redraft.engines.drafters import BuiltDrafter
    from redraft.engines.manifest import Manifest


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
            "KEY is `target`, a rise of perplexity in percent, or a pattern of weights' names, with 4, 8 or 32 bits. "
            "`kv=fp16` holds keys and values in fp16, on CPUs.",
        ),
    ] = None,
    backend: Annotated[Backend | None, typer.Option(help="The backend that runs the engines.")] = None,
    weights: Annotated[
        Literal["checkpoint", "random"], typer.Option(help="`random`: shapes only, to measure latency.")
    ] = "checkpoint",
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
        Literal["short", "full"],
        typer.Option(help="Tokens of held-out text to report quality on: 1000 in all, or 6000 with `full`."),
    ] = "short",
    attention: Annotated[
        Literal["plugin", "native"] | None,
        typer.Option(help=f"TensorRT: our plugin, or TensorRT's own layers ({NATIVE_RELEASES})."),
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
    tensorrt = {
        "attention": attention, "embed_plugin": embed_plugin or None, "batch": batch, "tree_nodes": tree_nodes,
        "ignore_memory": ignore_memory or None, "compute_capability": compute_capability,
    }  # fmt: skip
    with progress(quiet=as_json) as report:
        request = BuildRequest(
            model=model,
            out=out,
            model_path=model_path,
            precision=precision,
            backend=backend,
            random_weights=weights == RANDOM,
            max_model_len=max_model_len,
            drafters=tuple(drafter or ()),
            tensorrt={name: value for name, value in tensorrt.items() if value is not None},
            texts=parse_texts(eval_text),
            tokens=FULL_TOKENS if quality == "full" else DEFAULT_TOKENS,
            check=not skip_check,
            force=force,
        )
        from redraft.assembly.bundle import build_bundles

        summaries = [summarise(built) for built in build_bundles(request, report)]
    if as_json:
        print_json(summaries[0] if len(summaries) == 1 else {"bundles": summaries})
    else:
        typer.echo("\n".join(map(describe, summaries)))


def parse_texts(options: list[str] | None) -> dict[str, str] | None:
    """Return text by kind from KIND=FILE options, None without any. Raises UsageError and DataError."""
    from redraft.files import read_text

    if not options:
        return None
    if options == ["none"]:
        return {}
    found: dict[str, str] = {}
    for option in options:
        kind, _, file = option.partition("=")
        if not (kind and file):
            raise UsageError(f"--eval-text {option!r}: expected KIND=FILE, or `none` alone")
        if kind in found:
            raise UsageError(f"--eval-text: the kind {kind!r} is given twice", "join its files, or name two kinds")
        found[kind] = read_text(Path(file))
    return found


def summarise(built: Built) -> dict[str, Any]:
    """Return the build's result as a JSON object.

    `own_bytes` leaves hard links out; `weight_shares` is `sizes.weight_shares`; `native` is a line about a drafter
    inside of the checkpoint, if the bundle has no drafter.
    """
    from redraft.engines.drafters import read_drafters
    from redraft.engines.sizes import engine_bytes, own_bytes, total_bytes, weight_shares

    out, manifest = built.out, built.manifest
    engines, merged = engine_bytes(manifest)
    return {
        "bundle": str(out),
        "cached": built.cached,
        "seconds": round(built.seconds, 3),
        "name": manifest.name,
        "architecture": manifest.model.architecture,
        "precision": manifest.precision,
        "precisions": manifest.precisions,
        "backend": manifest.backend,
        "random_weights": manifest.model.random_weights,
        "caveats": list(manifest.model.caveats),
        "max_model_len": manifest.max_model_len,
        "drafters": {drafter.id: describe_drafter(drafter, out, manifest) for drafter in read_drafters(manifest)},
        "native": built.native or None,
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
        f"  {summary['architecture']}, {summary['precisions']}, context {summary['max_model_len']}, "
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
