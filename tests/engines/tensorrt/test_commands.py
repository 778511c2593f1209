"""Commands of other tools: complete, and with a syntax that Polygraphy itself accepts."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from polygraphy import tools

from redraft import names, signatures
from redraft.engines import Bundle
from redraft.engines.manifest import Manifest
from redraft.engines.tensorrt.commands import commands, sound_inputs, write_inputs
from redraft.engines.tensorrt.plugin import FOLDER, VARIABLE
from redraft.engines.tensorrt.prepare import graph_file
from redraft.engines.tensorrt.profiles import CallLimits, drafter_symbols, profiles_of, verifier_symbols
from redraft.engines.tensorrt_records import EngineRecord, TensorRtRecord
from redraft.methods.lyanna import METHOD, LyannaShape
from tests.engines.bundles import manifest_of
from tests.engines.drafters import LYANNA_DRAFT, LYANNA_RESAMPLE, lyanna_record
from tests.engines.graphs import Decoder, save_verifier

DECODER = Decoder()
LIMITS = CallLimits(1, 16, 32, 64)
LIBRARY = "libredraft_tensorrt_10.so"


def manifest(native: bool = False, embedded: bool = False) -> Manifest:
    portable = manifest_of(DECODER)
    inputs = portable.graphs[names.VERIFIER].inputs
    profiles = profiles_of(verifier_symbols(names.VERIFIER, LIMITS), inputs, LIMITS, native)
    engine = EngineRecord("verifier.engine", graph_file(names.VERIFIER), profiles)
    record = TensorRtRecord(
        "10.13.3", "NVIDIA H200", "9.0", "native" if native else "plugin", "" if native else "0" * 64,
        "" if native or embedded else LIBRARY, {names.VERIFIER: engine},
    )  # fmt: skip
    return replace(portable, backend="tensorrt", tensorrt=record)


def found(folder: Path, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    return {command.purpose: command.words for command in commands(folder, manifest)}


@pytest.fixture
def polygraphy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Polygraphy's command, run in the test's folder. Returns its status."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: tools.main(list(words))


@pytest.mark.parametrize("native", [False, True])
def test_polygraphy_takes_the_comparison(native: bool, tmp_path: Path, polygraphy: Callable[..., int]) -> None:
    """It writes the script that it would run; without TensorRT it stops there."""
    words = list(found(tmp_path, manifest(native))["verifier: compared with ONNX Runtime's outputs"])
    assert polygraphy(*words[words.index("polygraphy") + 1 :], "--gen-script", "script.py") == 0
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
                s.name for s in signatures.verifier_inputs(DECODER.shape) if any(isinstance(d, str) for d in s.shape)
            }
            assert all(size.replace("x", "").isdigit() for size in sizes.values())
    assert f"--onnx={tmp_path / 'verifier.tensorrt.onnx'}" in words
    timed = found(tmp_path, manifest())["verifier: timed, profile tree"]
    assert "--useProfile=2" in timed
    assert any(word.startswith("--shapes=token_ids:1x13,") for word in timed)
    for command in (words, timed):  # a plugin next to the engine is registered and stays there
        assert f"--dynamicPlugins={tmp_path / LIBRARY}" in command
        assert not any(word.startswith("--setPluginsToSerialize") or word == "--versionCompatible" for word in command)


def test_without_a_plugin_none_is_named(tmp_path: Path) -> None:
    for command in commands(folder := tmp_path / "with a space", manifest(native=True)):
        assert not any("Plugins" in word or VARIABLE in word or "libredraft" in word for word in command.words)
        assert "--versionCompatible" not in command.words
        assert tuple(shlex.split(str(command))) == command.words
        assert str(folder) in str(command) or "--write-inputs" in command.words


def test_a_note_names_the_cache_copies_in_times_of_trtexec(tmp_path: Path) -> None:
    """It binds past and present apart. TensorRT's own attention needs no such note."""
    (note,) = [purpose for purpose, words in found(tmp_path, manifest()).items() if not words]
    assert "the plugin copies each cache in every call" in note
    assert all(found(tmp_path, manifest(native=True)).values())


@pytest.mark.parametrize("named", [True, False])
def test_a_plugin_inside_the_engine_is_needed_for_building_only(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trtexec registers it for the parser and the engine; Polygraphy builds again. Loading only allows its code."""
    monkeypatch.delenv(VARIABLE, raising=False)
    library = FOLDER / LIBRARY
    if named:
        library = tmp_path / "mine.so"
        monkeypatch.setenv(VARIABLE, str(library))
    commands = found(tmp_path, manifest(embedded=True))
    built, timed = commands["verifier: built by trtexec"], commands["verifier: timed, profile tree"]
    assert {f"--dynamicPlugins={library}", f"--setPluginsToSerialize={library}", "--versionCompatible"} <= set(built)
    assert "--versionCompatible" in timed
    assert not any("Plugins" in word for word in timed)
    assert f"{VARIABLE}={library}" in commands["verifier: compared with ONNX Runtime's outputs"]


def test_bfloat16_is_not_compared_with_onnxruntime_on_cpus(tmp_path: Path) -> None:
    bfloat16 = manifest_of(DECODER, precision="bf16", shape=replace(DECODER.shape, dtype="bfloat16"))
    record = replace(bfloat16.graphs[names.VERIFIER], inputs=signatures.verifier_inputs(bfloat16.shape))
    built = replace(bfloat16, graphs={names.VERIFIER: record}, tensorrt=manifest().tensorrt)
    commands = found(tmp_path, built)
    assert commands.pop("verifier: not compared, since ONNX Runtime does not compute bfloat16 on CPUs") == ()
    assert not any("polygraphy" in words for words in commands.values())
    assert "verifier: timed, profile tree" in commands


@pytest.mark.parametrize("native", [False, True])
def test_calls_are_timed_with_integers_that_are_sound_together(native: bool, tmp_path: Path) -> None:
    """Every file exists with the size that trtexec reads, and the graph runs with it at the given sizes."""
    portable = save_verifier(DECODER, tmp_path)
    built = manifest(native=native)
    commands = found(tmp_path, built)
    (folder,) = (words[-1] for words in commands.values() if "--write-inputs" in words)
    written = {str(path.relative_to(tmp_path)) for path in write_inputs(tmp_path / folder, built)}
    session = ort.InferenceSession(portable, providers=["CPUExecutionProvider"])
    named = set()
    for profile in ("prefill", "token", "tree"):
        words = dict(word.split("=", 1) for word in commands[f"verifier: timed, profile {profile}"] if "=" in word)
        shapes = dict(part.split(":") for part in words["--shapes"].split(","))
        files = dict(part.split(":") for part in words["--loadInputs"].split(","))
        named |= set(files.values())
        feeds = {}
        for spec in signatures.verifier_inputs(DECODER.shape):
            # without the plugin, `kv_len` has its value in place of a size
            text = shapes.get(spec.name, "1") if spec.name != names.KV_LEN else "1"
            size = list(map(int, text.split("x")))
            if spec.name in files:
                raw = (tmp_path / files[spec.name]).read_bytes()
                feeds[spec.name] = np.frombuffer(raw, spec.dtype).reshape(size)
            else:
                assert spec.dtype == "float32"
                feeds[spec.name] = np.ones(size, np.float32)
        rows = feeds[names.TOKEN_IDS].shape[1]
        assert feeds[names.KV_LEN][0] == feeds[names.CACHE_LEN][0] + rows <= feeds[names.key_cache(0)].shape[2]
        assert feeds[names.POSITIONS][0].tolist() == list(range(feeds[names.CACHE_LEN][0], feeds[names.KV_LEN][0]))
        assert feeds[names.OUTPUT_ROWS][0, -1] == rows - 1
        assert (feeds[names.TREE_MASK] == np.tri(rows, dtype=bool)).all()
        assert all(np.isfinite(output).all() for output in session.run(None, feeds))
    assert named == written


def test_integers_of_a_drafters_calls_are_sound() -> None:
    """All rows of a call are new, and of a chain the first step is used up."""
    lyanna = LyannaShape(32, 61, 2, 16, 3, 2, 8, 5, "fp16", 20, 5)
    manifest = manifest_of(DECODER, drafters={METHOD.id: lyanna_record(lyanna)})
    made, limits = {}, CallLimits(2, 16, 32, 64)
    for graph, role in ((LYANNA_DRAFT, names.DRAFT), (LYANNA_RESAMPLE, names.RESAMPLE)):
        symbols = drafter_symbols(METHOD.graphs[role], METHOD.spare_rows, limits)
        profile = profiles_of(symbols, METHOD.graphs[role].inputs(lyanna), limits, kv_len_is_shape=False)[-1]
        made[graph] = sound_inputs(graph, manifest, profile)
    draft, resample = made.values()
    assert draft[names.NUM_PENDING].tolist() == [16]
    assert draft[names.POSITIONS].tolist() == [list(range(32, 48))]
    assert (draft[names.CACHE_LEN].tolist(), draft[names.KV_LEN].tolist()) == ([32], [48])
    assert resample[names.FIRST_STEP].tolist() == [1]
    assert set(draft[f"{names.TOKEN_INFO}index"].tolist()) == set(range(21))
    assert all(0 <= token < 61 for token in draft[names.DRAFT_VOCABULARY])
    assert all(0 <= token < 61 for token in (*draft[names.TOKENS].ravel(), *resample[names.TOKENS]))
    assert all(values.dtype == np.int64 for call in made.values() for values in call.values())


def test_every_command_of_polygraphy_runs_on_onnx_runtime(
    drafted: Bundle, tmp_path: Path, polygraphy: Callable[..., int]
) -> None:
    """The drafter's inputs too: draft and resample need rows, steps and tokens that fit together."""
    commands = [words for words in found(drafted.path, drafted.manifest).values() if words]
    graphs = ["verifier.onnx", "lyanna.draft.onnx", "lyanna.resample.onnx"]
    assert [words[2].rpartition("/")[2] for words in commands] == graphs
    for name, *words in commands:
        assert name == "polygraphy"
        assert polygraphy(*words) == 0
    kept = {f"{graph.removesuffix('.onnx')}.{kind}.json" for graph in graphs for kind in ("inputs", "outputs")}
    assert {path.name for path in tmp_path.iterdir()} == kept
