"""Commands of other tools: complete, and of a syntax that Polygraphy itself accepts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from redraft import names
from redraft.engines.manifest import Manifest
from redraft.engines.tensorrt.commands import commands
from redraft.engines.tensorrt.prepare import graph_file
from redraft.engines.tensorrt.profiles import Limits, profiles_of
from redraft.engines.tensorrt.records import EngineRecord, TensorRtRecord
from tests.engines.bundles import manifest_of
from tests.engines.graphs import Decoder, save_verifier

DECODER = Decoder()
LIBRARY = "libredraft_tensorrt_10.so"


def manifest(native: bool = False, embedded: bool = False) -> Manifest:
    portable = manifest_of(DECODER)
    inputs = portable.graphs[names.VERIFIER].inputs
    profiles = profiles_of(names.VERIFIER, inputs, Limits(1, 16, 32, 64), native)
    engine = EngineRecord("verifier.engine", graph_file(names.VERIFIER), profiles)
    record = TensorRtRecord(
        "10.13.3", "NVIDIA H200", "9.0", "native" if native else "plugin", "" if native else "0" * 64,
        "" if native or embedded else LIBRARY, {names.VERIFIER: engine},
    )  # fmt: skip
    return replace(portable, backend="tensorrt", tensorrt=record)


def found(folder: Path, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    return {command.purpose: command.words for command in commands(folder, manifest)}


def polygraphy(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from polygraphy.tools import main; main()", *words]
    return subprocess.run(program, capture_output=True, text=True, cwd=folder, env={**os.environ, "COLUMNS": "200"})


def test_the_reference_runs_on_the_portable_graph(tmp_path: Path) -> None:
    save_verifier(DECODER, tmp_path)
    (words,) = found(tmp_path, manifest_of(DECODER)).values()
    assert words[0] == "polygraphy"
    result = polygraphy(list(words[1:]), tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert {"verifier.inputs.json", "verifier.outputs.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("native", [False, True])
def test_polygraphy_takes_the_comparison(native: bool, tmp_path: Path) -> None:
    """It writes the script that it would run, which is as far as it goes without TensorRT."""
    words = list(found(tmp_path, manifest(native))["verifier: compared with what ONNX Runtime gave"])
    words = words[words.index("polygraphy") + 1 :]
    result = polygraphy([*words, "--gen-script", "script.py"], tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    script = (tmp_path / "script.py").read_text()
    assert script.count("Profile()") == 3
    assert (("min=[1, 2]" in script.replace("(", "[").replace(")", "]")) and "strongly_typed" in script) or not native
    assert (graph_file(names.VERIFIER) in script) == native
    assert ("load_network" in script) != native


def test_trtexec_has_all_profiles_in_order_with_every_dynamic_input(tmp_path: Path) -> None:
    words = found(tmp_path, manifest())["verifier: built by trtexec"]
    numbered = [word for word in words if word.startswith("--profile=")]
    assert numbered == ["--profile=0", "--profile=1", "--profile=2"]
    for number in numbered:
        place = words.index(number)
        for which, word in zip(("min", "opt", "max"), words[place + 1 : place + 4], strict=True):
            option, _, spec = word.partition("=")
            assert option == f"--{which}Shapes"
            sizes = dict(part.split(":") for part in spec.split(","))
            assert sizes.keys() == {
                s.name for s in names.verifier_inputs(DECODER.shape) if any(isinstance(d, str) for d in s.shape)
            }
            assert all(size.replace("x", "").isdigit() for size in sizes.values())
    assert f"--dynamicPlugins={tmp_path / LIBRARY}" in words
    assert f"--onnx={tmp_path / 'verifier.tensorrt.onnx'}" in words


def test_every_profile_is_timed_at_what_it_is_tuned_for(tmp_path: Path) -> None:
    words = found(tmp_path, manifest())["verifier: timed, profile tree"]
    assert "--useProfile=2" in words
    assert any(word.startswith("--shapes=token_ids:1x13,") for word in words)


@pytest.mark.parametrize("kind", ["native", "embedded"])
def test_without_a_library_none_is_named(kind: str, tmp_path: Path) -> None:
    for words in found(tmp_path, manifest(native=kind == "native", embedded=kind == "embedded")).values():
        assert not any("Plugins" in word or "libredraft" in word for word in words)


def test_a_command_survives_the_shell(tmp_path: Path) -> None:
    for command in commands(tmp_path / "with a space", manifest()):
        assert tuple(shlex.split(str(command))) == command.words
