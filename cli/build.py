"""`redraft build`: a checkpoint to an engine bundle."""

from __future__ import annotations

import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.console import print_json, progress
from redraft.cli.options import Json
from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.config import BuildConfig, LyannaBuild, TensorRtBuild
    from redraft.engines.manifest import Manifest

ENGINES = Path("build/engines")


class Precision(StrEnum):
    """Of the matrix products."""

    fp32 = "fp32"
    int8 = "int8"
    int4 = "int4"


class TokenInfo(StrEnum):
    """Of Lyanna's drafter."""

    fp16 = "fp16"
    int8 = "int8"
    fp8 = "fp8"
    lowrank = "lowrank"


class Backend(StrEnum):
    """What runs the engines."""

    onnxruntime = "onnxruntime"
    tensorrt = "tensorrt"


class Attention(StrEnum):
    """Who computes attention in TensorRT engines."""

    plugin = "plugin"
    native = "native"


class Weights(StrEnum):
    """Where the weights come from."""

    checkpoint = "checkpoint"
    random = "random"


def build(
    model: Annotated[str, typer.Argument(help="A recipe (tiny), a Hugging Face checkpoint folder, or a Hub id.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The bundle; build/engines/NAME by default.")] = None,
    precision: Annotated[Precision | None, typer.Option(help="fp32, or weight-only int8 or int4.")] = None,
    backend: Annotated[Backend | None, typer.Option(help="What runs the engines.")] = None,
    weights: Annotated[Weights, typer.Option(help="`random`: shapes only, for latency work.")] = Weights.checkpoint,
    context: Annotated[int | None, typer.Option(help="Capacity in tokens; the model's own limit by default.")] = None,
    lyanna: Annotated[
        str | None, typer.Option(help="Folder of a Lyanna drafter for this model; `none` builds without one.")
    ] = None,
    token_info: Annotated[
        TokenInfo | None, typer.Option(help="How Lyanna's token information is kept: a table's type, or its factors.")
    ] = None,
    eval_text: Annotated[
        list[str] | None, typer.Option(help="KIND=FILE of held-out text to report perplexity on; `none` reports none.")
    ] = None,
    attention: Annotated[
        Attention | None, typer.Option(help="TensorRT: our plugin, or its own layers (10.15 and newer).")
    ] = None,
    embed_plugin: Annotated[
        bool, typer.Option("--embed-plugin", help="TensorRT: make the plugin part of the engines.")
    ] = False,
    batch: Annotated[int | None, typer.Option(help="TensorRT: sequences of one call, at most.")] = None,
    tree_nodes: Annotated[int | None, typer.Option(help="TensorRT: nodes of a tree and its root, at most.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build even if the bundle is current or of another name.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Build engines from a checkpoint. Building the same again does nothing."""
    start = time.monotonic()
    with progress(quiet=as_json) as report:
        from redraft.cli.assembly import build_bundle
        from redraft.cli.models import find_model

        texts = held_out(eval_text)
        found = find_model(model, report)
        config = choose(found.build, precision, backend, weights, context)
        config = replace(config, lyanna=choose_lyanna(config, lyanna, token_info))
        config = replace(config, tensorrt=choose_tensorrt(config, attention, embed_plugin, batch, tree_nodes))
        out = out or ENGINES / found.name
        manifest, cached = build_bundle(found, config, out, texts, force, report)
    summary = summarise(manifest, out, cached, time.monotonic() - start)
    print_json(summary) if as_json else typer.echo(describe(summary))


def choose(
    recipe: BuildConfig, precision: Precision | None, backend: Backend | None, weights: Weights, context: int | None
) -> BuildConfig:
    """The recipe's configuration with what the command line says instead."""
    return replace(
        recipe,
        precision=precision.value if precision else recipe.precision,
        backend=backend.value if backend else recipe.backend,
        context=recipe.context if context is None else context,
        random_weights=weights is Weights.random or recipe.random_weights,
    )


def choose_lyanna(config: BuildConfig, source: str | None, token_info: TokenInfo | None) -> LyannaBuild | None:
    """The recipe's drafter with what the command line says instead. None where there is none, or none can fit."""
    from redraft.config import LyannaBuild

    if source == "none" or (config.random_weights and source is None):
        chosen = None
    else:
        chosen = config.lyanna if source is None else replace(config.lyanna or LyannaBuild(source), source=source)
    if token_info is None:
        return chosen
    if chosen is None:
        raise UsageError("--token-info is for a Lyanna drafter, and none is built", "give --lyanna DIR")
    return replace(chosen, token_info=token_info.value)


def choose_tensorrt(
    config: BuildConfig, attention: Attention | None, embed_plugin: bool, batch: int | None, tree_nodes: int | None
) -> TensorRtBuild:
    """The recipe's engines with what the command line says instead. Raises UsageError beside another backend."""
    said = {"attention": attention and attention.value, "embed_plugin": embed_plugin or None, "batch": batch}
    said = {name: value for name, value in {**said, "tree_nodes": tree_nodes}.items() if value is not None}
    if said and config.backend != "tensorrt":
        option = next(iter(said)).replace("_", "-")
        raise UsageError(f"--{option} is for TensorRT engines", "give --backend tensorrt, or leave it out")
    return replace(config.tensorrt, **said)  # type: ignore[arg-type]


def held_out(options: list[str] | None) -> dict[str, str]:
    """Text by kind from KIND=FILE options; the repository's own without any. Raises UsageError and DataError."""
    from redraft.bench.evaluation import held_out_texts
    from redraft.bench.prompts import read_text

    if options == ["none"]:
        return {}
    if not options:
        return {kind: read_text(path) for kind, path in held_out_texts().items()}
    pairs = [option.partition("=") for option in options]
    if bad := next((option for option, pair in zip(options, pairs, strict=True) if not (pair[0] and pair[2])), None):
        raise UsageError(f"--eval-text {bad!r}: expected KIND=FILE, or none alone")
    return {kind: read_text(Path(file)) for kind, _, file in pairs}


def summarise(manifest: Manifest, out: Path, cached: bool, seconds: float) -> dict[str, Any]:
    """What was built, as a JSON object."""
    return {
        "bundle": str(out),
        "cached": cached,
        "seconds": round(seconds, 3),
        "name": manifest.name,
        "architecture": manifest.model.architecture,
        "precision": manifest.precision,
        "backend": manifest.backend,
        "random_weights": manifest.model.random_weights,
        "context": manifest.context,
        "drafters": list(manifest.drafters),
        "token_info": token_info(manifest),
        "bytes": sum(file.size for file in manifest.files.values()),
        "perplexity": dict(manifest.quality.perplexity) if manifest.quality else None,
        "perplexity_fp32": dict(manifest.quality.perplexity_fp32) if manifest.quality else None,
    }


def token_info(manifest: Manifest) -> dict[str, Any] | None:
    """How Lyanna's token information is kept, and its size."""
    from redraft.cli.inspect import token_info_bytes

    shape = manifest.lyanna
    if shape is None:
        return None
    return {"form": shape.token_info, "hot_tokens": shape.hot, "bytes": token_info_bytes(manifest)}


def describe(summary: dict[str, Any]) -> str:
    """The summary as lines."""
    did = "is already built" if summary["cached"] else f"built in {summary['seconds']:.1f} s"
    random = ", random weights" if summary["random_weights"] else ""
    lines = [
        f"{summary['bundle']}: {did}",
        f"  {summary['architecture']}, {summary['precision']}{random}, context {summary['context']}, "
        f"{summary['bytes'] / 1e6:.1f} MB",
    ]
    if info := summary["token_info"]:
        size = f"{info['bytes'] / 1e6:.1f} MB"
        lines.append(f"  Lyanna drafter, token information of {info['hot_tokens']} tokens in {info['form']}, {size}")
    for kind, value in (summary["perplexity"] or {}).items():
        exact = summary["perplexity_fp32"][kind]
        compared = "" if summary["precision"] == "fp32" else f" (fp32 {exact:.3f}, {100 * (value / exact - 1):+.2f} %)"
        lines.append(f"  perplexity on {kind}: {value:.3f}{compared}")
    return "\n".join(lines)
