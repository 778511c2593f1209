"""Commands of `trtexec` and `polygraphy run` that build, time and compare a bundle's graphs: all sizes are filled in.

Our plugin registers by its entry `getCreators`, which `trtexec --dynamicPlugins` calls. --staticPlugins and
Polygraphy's --plugins only load a library, so the parser does not find the plugin. If the engine contains the plugin,
the parser still needs it: --setPluginsToSerialize puts it into the engine and does not register it. Such an engine
brings code of its own, which --versionCompatible allows. Syntax: trtexec 10.9 to 11.1, Polygraphy 0.53.

trtexec fills integers with numbers from -128 on. With them a graph reads outside of its buffers, or a call is timed
that never happens. `write_inputs` therefore writes valid ones. Other inputs may have any values.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redraft import names
from redraft.engines.device import Array, sized
from redraft.engines.drafters import drafter_of, measured_graphs
from redraft.engines.manifest import GraphRecord, Manifest
from redraft.engines.tensorrt import plugin
from redraft.engines.tensorrt.builder import WORKSPACE_BYTES
from redraft.engines.tensorrt.plugin import FOLDER, VARIABLE, library_name
from redraft.engines.tensorrt.target import RTX, parse_version
from redraft.engines.tensorrt_records import Profile, TensorRtRecord
from redraft.names import TensorSpec

_PAST, _ROWS, _CAPACITY = 4, 8, 64
"""Committed rows, new rows, and rows of the buffers in the calls that are compared."""
_DRAFTED = names.DRAFT_WIDTHS[0]
"""New rows of a drafter's call."""
_INPUTS = "redraft-inputs"
"""Folder of the inputs of timed calls."""
_COPIES = (
    "times of trtexec include copies of whole KV caches: it binds past and present at different addresses, so the "
    "plugin copies each cache in every call. redraft binds them at one address"
)
_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Command:
    """A command line and its purpose. `words` is empty if no command exists; the purpose then gives the reason."""

    purpose: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands(folder: Path, manifest: Manifest) -> Iterator[Command]:
    """Yield commands for the bundle at `folder`: always for ONNX Runtime, for TensorRT if it has engines of that.

    TensorRT for RTX has neither trtexec nor a runner of Polygraphy's that takes a built engine.
    """
    built = manifest.tensorrt if manifest.backend != RTX.backend else None
    if built:
        words = ("redraft", "inspect", str(folder), "--write-inputs", _INPUTS)
        yield Command("integers of the timed calls, which trtexec would invent", words)
        if built.plugin:
            yield Command(_COPIES, ())
    measured = measured_graphs(manifest)
    for graph, record in manifest.all_graphs.items():
        if graph not in measured:
            continue
        compared = all(spec.dtype != "bfloat16" for spec in (*record.inputs, *record.outputs))
        if compared:
            yield _reference(folder, graph, record, manifest)
        else:
            yield Command(f"{graph}: not compared, since ONNX Runtime does not compute bfloat16 on CPUs", ())
        if built:
            yield from _tensorrt(folder, graph, record, built)
            if compared:
                yield _comparison(folder, graph, record, built)


def _reference(folder: Path, graph: str, record: GraphRecord, manifest: Manifest) -> Command:
    sizes = {"B": 1, "T": _ROWS, "M": _DRAFTED, "R": _ROWS, "C": _capacity(graph, record, manifest)}
    shapes = {
        spec.name: sized(spec.shape, sizes)
        for spec in record.inputs
        if any(isinstance(dim, str) for dim in spec.shape)  # a fixed input's sizes would be read as its values
    }
    ranges = [f"{name}:[{low},{high}]" for name, (low, high) in _value_ranges(graph, record, manifest).items()]
    return Command(
        f"{graph}: on ONNX Runtime, inputs and outputs kept",
        ("polygraphy", "run", str(folder / record.file), "--onnxrt", "--input-shapes",
         *(f"{name}:[{','.join(map(str, shape))}]" for name, shape in shapes.items()),
         "--val-range", *ranges, "--save-inputs", f"{graph}.inputs.json", "--save-outputs", f"{graph}.outputs.json"),
    )  # fmt: skip


def _capacity(graph: str, record: GraphRecord, manifest: Manifest) -> int:
    """Return the rows of KV buffers in the compared call: those of the engine, if it takes no other number."""
    engine = manifest.tensorrt.engines.get(graph) if manifest.tensorrt else None
    for spec in record.inputs if engine else ():
        if engine and "C" in spec.shape:
            axis, ranges = spec.shape.index("C"), engine.profiles[0].inputs[spec.name]
            return ranges.max[axis] if ranges.min[axis] == ranges.max[axis] else _CAPACITY
    return _CAPACITY


def _value_ranges(graph: str, record: GraphRecord, manifest: Manifest) -> Mapping[str, tuple[int, int]]:
    """Ranges of integer inputs that are valid together: every node sees the committed rows."""
    token = (0, manifest.shape.vocabulary - 1)
    rows = _DRAFTED if names.NUM_PENDING in {spec.name for spec in record.inputs} else _ROWS
    known = {
        names.TOKEN_IDS: token, names.TOKENS: token, names.POSITIONS: (_PAST, _PAST + rows - 1),
        names.CACHE_LEN: (_PAST, _PAST), names.KV_LEN: (_PAST + rows, _PAST + rows), names.OUTPUT_ROWS: (0, rows - 1),
        names.NUM_PENDING: (1, rows), **own_integers(graph, manifest),
    }  # fmt: skip
    return {spec.name: known[spec.name] for spec in record.inputs if spec.name in known}


def _tensorrt(folder: Path, graph: str, record: GraphRecord, built: TensorRtRecord) -> Iterator[Command]:
    engine = built.engines[graph]
    library, embedded = _library(folder, built), bool(built.plugin) and not built.plugin_file
    plugin = [f"--dynamicPlugins={library}"] if library else []
    inside = ["--versionCompatible"] if embedded else []
    yield Command(
        f"{graph}: built by trtexec",
        ("trtexec", f"--onnx={folder / engine.graph}", "--stronglyTyped", *plugin,
         *([f"--setPluginsToSerialize={library}"] if embedded else []), *inside,
         *_trtexec_profiles(engine.profiles), "--noTF32", "--maxAuxStreams=0",
         f"--memPoolSize=workspace:{WORKSPACE_BYTES >> 20}M", "--skipInference",
         f"--saveEngine={graph}.trtexec.engine"),
    )  # fmt: skip
    for number, profile in enumerate(engine.profiles):
        files = ((spec.name, input_file(graph, profile.name, spec.name)) for spec in made_inputs(record))
        yield Command(
            f"{graph}: timed, profile {profile.name}",
            ("trtexec", f"--loadEngine={folder / engine.file}", *(inside or plugin), f"--useProfile={number}",
             f"--shapes={_trtexec_sizes(profile, 'opt')}",
             f"--loadInputs={','.join(f'{name}:{_INPUTS}/{file}' for name, file in files)}"),
        )  # fmt: skip


def _library(folder: Path, built: TensorRtRecord) -> str:
    """Return the plugin's library: the bundle's own, or the built one if engines contain it; empty without a plugin."""
    if built.plugin_file:
        return str(folder / built.plugin_file)
    own = os.environ.get(VARIABLE) or str(FOLDER / library_name(parse_version(built.version)[0]))
    return own if built.plugin else ""


def _comparison(folder: Path, graph: str, record: GraphRecord, built: TensorRtRecord) -> Command:
    engine, library = built.engines[graph], _library(folder, built)
    network = [str(folder / engine.graph)]
    environment: list[str] = []
    if library:
        environment = ["env", f"{plugin.GRAPH_VARIABLE}={folder / engine.graph}", f"{VARIABLE}={library}"]
        network = [str(Path(plugin.__file__).resolve()), "--model-type", "trt-network-script"]
    tolerance = str(max(_TOLERANCE.get(spec.dtype, 0.0) for spec in record.outputs))
    files = ["--load-inputs", f"{graph}.inputs.json", "--load-outputs", f"{graph}.outputs.json"]
    return Command(
        f"{graph}: compared with ONNX Runtime's outputs",
        (*environment, "polygraphy", "run", *network, "--trt", "--strongly-typed",
         *_polygraphy_profiles(engine.profiles), "--optimization-profile", str(len(engine.profiles) - 1), *files,
         "--atol", tolerance, "--rtol", tolerance),
    )  # fmt: skip


def _trtexec_profiles(profiles: Sequence[Profile]) -> list[str]:
    words = []
    for number, profile in enumerate(profiles):
        words.append(f"--profile={number}")
        words += [f"--{which}Shapes={_trtexec_sizes(profile, which)}" for which in ("min", "opt", "max")]
    return words


def _trtexec_sizes(profile: Profile, which: str) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, getattr(each, which)))}" for name, each in profile.inputs.items())


def _polygraphy_profiles(profiles: Sequence[Profile]) -> list[str]:
    words = []
    for profile in profiles:
        for which in ("min", "opt", "max"):
            words.append(f"--trt-{which}-shapes")
            words += [f"{name}:{[*getattr(each, which)]}".replace(" ", "") for name, each in profile.inputs.items()]
    return words


def input_file(graph: str, profile: str, name: str) -> str:
    """Return the file of an input of a profile's usual call. It has the bytes alone, as trtexec reads them."""
    return f"{graph}.{profile}.{name}.bin"


def made_inputs(record: GraphRecord) -> tuple[TensorSpec, ...]:
    """Return the inputs of a graph that are written: those that are not floats."""
    return tuple(spec for spec in record.inputs if spec.dtype in ("bool", "int64", "int32"))


def write_inputs(folder: Path, manifest: Manifest) -> Iterator[Path]:
    """Write the inputs of every engine's usual calls into `folder`; yields the files as they are written."""
    folder.mkdir(parents=True, exist_ok=True)
    for graph, engine in (manifest.tensorrt.engines if manifest.tensorrt else {}).items():
        if graph not in measured_graphs(manifest):
            continue
        for profile in engine.profiles:
            for name, values in sound_inputs(graph, manifest, profile).items():
                path = folder / input_file(graph, profile.name, name)
                path.write_bytes(values.tobytes())
                yield path


def own_integers(graph: str, manifest: Manifest) -> Mapping[str, tuple[int, int]]:
    """Return least and largest valid values of the inputs that only a drafter's method has."""
    drafter = drafter_of(manifest, graph)
    spec = drafter.engine_graphs.get(graph) if drafter else None
    return spec.integers(drafter.shape) if drafter and spec else {}


def sound_inputs(graph: str, manifest: Manifest, profile: Profile) -> dict[str, Array]:
    """Return the integers of the call that a profile is tuned for: a chain after as many rows as fit before it."""
    record, own = manifest.all_graphs[graph], own_integers(graph, manifest)
    sizes = profile.sizes(record.inputs, "opt")
    rows = sizes.get("T", sizes.get("M", 1))
    cache_len = min(sizes.get("C", rows) // 2, manifest.max_model_len - rows)
    vocabulary, cache_len = manifest.shape.vocabulary, max(cache_len, 0)
    return {spec.name: _values(spec, sizes, cache_len, rows, vocabulary, own) for spec in made_inputs(record)}


def _values(
    spec: TensorSpec, sizes: Mapping[str, int], cache_len: int, rows: int, vocabulary: int,
    own: Mapping[str, tuple[int, int]],
) -> Array:  # fmt: skip
    shape = sized(spec.shape, sizes)
    random = np.random.default_rng(0)
    values: Mapping[str, Any] = {
        names.TOKEN_IDS: random.integers(0, vocabulary, shape),
        names.TOKENS: random.integers(0, vocabulary, shape),
        names.POSITIONS: cache_len + np.arange(rows),
        names.TREE_MASK: np.tri(rows, dtype=bool),
        names.CACHE_LEN: cache_len,
        names.KV_LEN: cache_len + rows,
        names.OUTPUT_ROWS: np.arange(rows - shape[-1], rows),
        names.NUM_PENDING: rows,
        **{name: low + np.arange(shape[-1]) % (high - low + 1) for name, (low, high) in own.items()},
    }
    return np.broadcast_to(values[spec.name], shape).astype(spec.dtype)
