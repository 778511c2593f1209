"""`redraft inspect`: show the contents of an engine bundle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.console import print_json
from redraft.cli.options import Json, Verify
from redraft.cli.quality import quality_lines
from redraft.errors import UsageError
from redraft.names import is_cache
from redraft.records import to_plain

if TYPE_CHECKING:
    from redraft.engines import Bundle
    from redraft.engines.tensorrt_records import TensorRtRecord

_DIGESTS = {
    True: "every digest holds",
    None: "every digest held at the last full check",
    False: "digests not checked",
}
"""The check of the bundle, by `--verify`."""


def inspect(
    bundle: Annotated[Path, typer.Argument(help="An engine bundle.")],
    verify: Verify = None,
    write_inputs: Annotated[
        Path | None, typer.Option(help="Write integer inputs of the engines' usual calls to this folder, for trtexec.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a bundle's model, graphs, signatures, drafters, quality and files, after checking it."""
    from redraft.engines import open_bundle

    opened = open_bundle(bundle, verify=verify)
    written = list(_written(opened, write_inputs)) if write_inputs else []
    if as_json:
        print_json({**as_object(opened), "inputs": written})
    else:
        typer.echo("\n".join([*as_lines(opened, verify), *(f"input      {path}" for path in written)]))


def _written(bundle: Bundle, folder: Path) -> Iterator[str]:
    """Write inputs for `trtexec --loadInputs`. Raises UsageError without TensorRT engines."""
    from redraft.engines.tensorrt.commands import write_inputs

    if bundle.manifest.tensorrt is None:
        raise UsageError(f"{bundle.path} has no TensorRT engines to write inputs for", "leave --write-inputs out")
    yield from map(str, write_inputs(folder, bundle.manifest))


def as_object(bundle: Bundle) -> dict[str, Any]:
    """Return the manifest, its path, and commands of other tools by their purpose."""
    from redraft.engines.sizes import own_bytes, total_bytes, weight_shares
    from redraft.engines.tensorrt.commands import commands

    values: dict[str, Any] = to_plain(bundle.manifest)
    sizes = {"bytes": total_bytes(bundle.manifest), "own_bytes": own_bytes(bundle.path, bundle.manifest)}
    shares = dict(weight_shares(bundle.path, bundle.manifest))
    found = commands(bundle.path, bundle.manifest)
    others = {command.purpose: str(command) if command.words else None for command in found}
    return {"bundle": str(bundle.path), **values, **sizes, "weight_shares": shares, "commands": others}


def as_lines(bundle: Bundle, verified: bool | None) -> list[str]:
    """Return the manifest as text: one fact a line, then commands of other tools."""
    from redraft.engines.draft_costs import bytes_cost, describe_cost
    from redraft.engines.drafters import read_drafters
    from redraft.engines.sizes import describe_shares, describe_size, kv_bytes, own_bytes, total_bytes, weight_shares
    from redraft.engines.tensorrt.commands import commands

    manifest, shape = bundle.manifest, bundle.manifest.shape
    size = describe_size(total_bytes(manifest), own_bytes(bundle.path, manifest))
    lines = [
        f"{bundle.path}: {manifest.name}, {len(manifest.files)} files, {size}, {_DIGESTS[verified]}",
        f"model      {manifest.model.architecture} from {manifest.model.source}"
        f"{' (random weights)' if manifest.model.random_weights else ''}",
        *(f"beware     {caveat}" for caveat in manifest.model.caveats),
        f"shape      {shape.layers} layers, {shape.hidden} wide, {shape.kv_heads} key/value heads of {shape.head_dim}, "
        f"vocabulary {shape.vocabulary}",
        f"engine     {manifest.backend} {manifest.backend_version}, {manifest.precisions}, "
        f"context {manifest.max_model_len}, KV of a full slot {kv_bytes(manifest, 1) / 1e6:.1f} MB",
        f"weights    {describe_shares(weight_shares(bundle.path, manifest))}",
        f"tokens     begin {manifest.bos_token_id}, end {', '.join(map(str, manifest.eos_token_ids)) or 'none'}",
        f"drafters   {', '.join(manifest.drafters) or 'none'}",
        f"states     {', '.join(manifest.hidden_states) or 'none'}",
    ]
    for drafter in read_drafters(manifest):
        lines.append(
            f"drafter    {drafter.id}: {drafter.record.method}, {drafter.method.describe(drafter.shape)}, "
            f"tables {drafter.record.table_bytes / 1e6:.1f} MB"
        )
        if (cost := bytes_cost(bundle.path, manifest, drafter)) is not None:
            lines.append(f"drafter    {drafter.id}: {describe_cost(cost, drafter.shape.steps)}")
    lines += [f"quality    {line}" for line in quality_lines(manifest)]
    for name, graph in manifest.all_graphs.items():
        shown = ", ".join(spec.name for spec in graph.inputs if not is_cache(spec.name))
        buffers = sum(is_cache(spec.name) for spec in graph.inputs)
        lines.append(f"graph      {name} ({graph.file}): {shown}, {buffers} buffers")
    if built := manifest.tensorrt:
        lines += _tensorrt_lines(built)
    lines += [f"file       {name}  {file.size} bytes  {file.sha256[:16]}" for name, file in manifest.files.items()]
    lines += [f"built by   {name} {version}" for name, version in manifest.tools.items()]
    for command in commands(bundle.path, manifest):
        lines += [f"command    {command.purpose}", *([f"           {command}"] if command.words else [])]
    return lines


def _tensorrt_lines(built: TensorRtRecord) -> Iterator[str]:
    plugin = f"plugin {built.plugin_file or 'in the engines'} {built.plugin[:16]}" if built.plugin else "no plugin"
    yield f"tensorrt   {built.version} on {built.gpu} ({built.compute_capability}), {plugin}"
    for graph, engine in built.engines.items():
        yield f"engine     {graph} ({engine.file}): profiles {', '.join(p.name for p in engine.profiles)}"
