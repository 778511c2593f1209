"""`redraft build --backend tensorrt` on the embedded model, with a stand-in for the GPU and for TensorRT's builder."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
from tests.cli.conftest import Refused, Run
from tests.engines.bundles import write_bundle
from tests.standins.tensorrt import FakeTensorRt

from redraft import names
from redraft.cli import main
from redraft.config import NATIVE_RELEASES
from redraft.engines import open_bundle
from redraft.engines.gpu import Gpu
from redraft.engines.tensorrt import stage
from redraft.engines.tensorrt.builder import EngineBuild, build_engine
from redraft.engines.tensorrt.plugin import Plugin
from redraft.engines.tensorrt.target import NATIVE_FROM, STALE_RELEASES, Target, Tools

Build = Callable[..., int]


@pytest.fixture
def built() -> list[str]:
    """Graphs of the built engines."""
    return []


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: list[str]) -> Build:
    """Run `redraft build` for a TensorRT release that is not installed; returns the exit status."""
    library = tmp_path / "libredraft_tensorrt_10.so"
    library.write_bytes(b"plugin")

    def fake(one: EngineBuild) -> bytes:
        built.append(one.graph.name)
        return b"engine"

    def run(release: str, *words: object, builder: Callable[[EngineBuild], bytes | memoryview] = fake) -> int:
        tools = Tools(Target(release, Gpu("NVIDIA H200", (9, 0), 130 << 30, 140 << 30)), Plugin(library, "0" * 64))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr("redraft.engines.tensorrt.target.find_spec", lambda name: object())
        monkeypatch.setattr("redraft.engines.tensorrt.target.find_tools", lambda options: tools)
        monkeypatch.setattr(stage, "stage_engines", partial(_STAGE, build=builder))
        return main.run(["build", *map(str, words), "--backend", "tensorrt", "--precision", "fp16", "--skip-check"])

    return run


_STAGE: Any = stage.stage_engines


LITTLE = """
source = "little"
[shape]
architectures = ["LlamaForCausalLM"]
model_type = "llama"
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 1
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 512
max_position_embeddings = 256
"""
"""A recipe whose operators are those of the embedded model."""


@pytest.fixture
def little(tmp_path: Path) -> tuple[object, ...]:
    """The arguments of a build of that recipe."""
    (tmp_path / "little.toml").write_text(LITTLE)
    return tmp_path / "little.toml", "--weights", "random"


def parsed(bundle: Path) -> set[str]:
    """Return the graphs that a real parser of TensorRT takes. Fails with its words if it refuses one."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("TensorRT for RTX has no package for this machine")
    command = [sys.executable, "-m", "tests.engines.tensorrt.real_parser", str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    words = {each["graph"]: each["refused"] for each in found if "refused" in each}
    assert (words, done.returncode) == ({}, 0), words or done.stderr
    return {each["graph"] for each in found}


DRAFT_MODEL = ("--drafter", "dm=random,method=draft_model,draft_vocabulary=512")


@pytest.mark.slow
def test_every_graph_of_the_embedded_model_is_taken(build: Build, built: list[str], tmp_path: Path) -> None:
    """By a parser of TensorRT: that is, of the model, of its drafter and of a draft model, with our plugin."""
    out = tmp_path / "tiny"
    command = ("tiny", "-o", out, "--attention", "plugin", "--drafter", "lyanna", *DRAFT_MODEL)
    assert build("10.9.0.34", *command) == 0
    record = open_bundle(out).manifest.tensorrt
    assert record is not None
    assert set(record.engines) == {*stage.graphs_of("plugin"), "lyanna.draft", "lyanna.resample", "dm.draft"}
    assert sorted(built) == sorted(engine.graph for engine in record.engines.values())
    assert parsed(out) == set(record.engines)
    assert [profile.name for profile in record.engines["dm.draft"].profiles] == ["prefill", "tree", "token"]


@pytest.mark.slow
def test_every_graph_with_native_attention_is_taken(
    build: Build, built: list[str], little: tuple[object, ...], tmp_path: Path, run: Run
) -> None:
    """A draft model's too: its KV buffers have a fixed number of rows."""
    out = tmp_path / "engines"
    lyanna = ("--drafter", "lyanna=random,method=lyanna")
    command = (*little, "-o", out, "--attention", "native", *lyanna, *DRAFT_MODEL)
    assert build("10.16.1", *command) == 0
    manifest = open_bundle(out).manifest
    record = manifest.tensorrt
    assert record is not None
    taken = {*stage.graphs_of("native"), "lyanna.draft", "lyanna.resample", "dm.draft"}
    assert set(record.engines) == taken
    assert parsed(out) == taken
    for graph in manifest.all_graphs.values():
        onnx.checker.check_model(out / graph.file, full_check=True)
    assert build("10.16.1", *command) == 0
    assert len(built) == len(record.engines)  # the second build did nothing

    shown = run("inspect", out)
    assert shown["inputs"] == []
    assert {f"{graph}: built by trtexec" for graph in ("verifier", "lyanna.draft", "lyanna.resample")} <= set(
        shown["commands"]
    )
    kept = shown["commands"]["verifier: on ONNX Runtime, inputs and outputs kept"]
    shape, rows = manifest.shape, names.kv_rows(manifest.max_model_len)  # native KV buffers have a fixed size
    assert f"{names.key_cache(0)}:[1,{shape.kv_heads},{rows},{shape.head_dim}]" in kept
    written = run("inspect", out, "--write-inputs", tmp_path / "inputs")["inputs"]
    assert sorted(written) == sorted(map(str, (tmp_path / "inputs").iterdir()))
    assert {"lyanna.draft.tree.num_pending.bin", "dm.draft.token.output_rows.bin"} <= {
        Path(file).name for file in written
    }


PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int4", "int8")


@pytest.mark.slow
def test_a_real_builder_takes_every_precision(tmp_path: Path, little: tuple[object, ...], refused: Refused) -> None:
    """TensorRT for RTX builds ahead of time, without a GPU. In a process of its own, since a refusal may abort.

    `make check-tensorrt` builds the embedded model.
    """
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("TensorRT for RTX has no package for this machine")
    options = ["--precision", ",".join(PRECISIONS), "--drafter", "none", "--skip-check", "--compute-capability", "8.9"]
    command = [Path(sys.executable).with_name("redraft"), "build", *little, "-o", tmp_path / "tiny"]
    done = subprocess.run([*command, "--backend", "tensorrt-rtx", *options, "--json"], capture_output=True, text=True,
                          env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [one["precision"] for one in json.loads(done.stdout)["bundles"]] == list(PRECISIONS)
    for precision in PRECISIONS:
        manifest = open_bundle(tmp_path / f"tiny-{precision}").manifest
        record = manifest.tensorrt
        assert record is not None
        assert (record.compute_capability, record.attention, record.plugin) == ("8.9", "native", "")
        assert set(record.engines) == {*stage.graphs_of("native")} - {"step.gather_features", "step.store_trees"}
    if importlib.util.find_spec("cuda") is None:  # without a GPU: what is missing, in one line
        line = refused("generate", "--engines", tmp_path / "tiny-int4", "--prompt", "a", status=1)
        assert "no CUDA driver: libcuda.so.1 was not found; install NVIDIA's driver" in line


@pytest.mark.parametrize(
    ("options", "status", "line"),
    [
        (
            ("--compute-capability", "9.0"),
            1,
            r"builds for no GPU of compute capability 9\.0; give --compute-capability 7\.5",
        ),
        (("--compute-capability", "new"), 2, r"'new': expected a number such as 8\.9"),
        (("--attention", "plugin"), 2, "takes no plugins; leave --attention and --embed-plugin out"),
        (("--precision", "fp8", "--compute-capability", "8.6"), 1, r"need a GPU of compute capability 8\.9 or newer"),
    ],
)
def test_what_no_engine_can_be_built_for_is_one_line(
    options: tuple[str, ...], status: int, line: str, refused: Refused, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    command = ("build", "tiny", "-o", tmp_path / "tiny", "--backend", "tensorrt-rtx")
    assert re.search(line, refused(*command, *options, status=status))
    assert not (tmp_path / "tiny").exists()


@pytest.mark.slow
def test_the_standard_output_has_one_json_object_alone(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tensorrt = FakeTensorRt(version="10.13.3.9", inputs=None)
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    command = ("tiny", "-o", tmp_path / "tiny", "--precision", "fp16", "--skip-check", "--json")
    assert build("10.13.3.9", *command, builder=build_engine) == 0, capfd.readouterr().err
    shown = json.loads(capfd.readouterr().out)
    assert shown["engine_bytes"] == len(b"engine") * len(tensorrt.configs) > 0
    assert shown["merged_weight_bytes"] == 0  # of a converted checkpoint, written with the parts in a row


def test_help_and_documentation_name_the_releases_with_native_attention(root: Path) -> None:
    assert f"TensorRT {NATIVE_RELEASES}" in " ".join((root / "docs/building.md").read_text(encoding="utf-8").split())
    assert all(".".join(map(str, release)) in NATIVE_RELEASES for release in (NATIVE_FROM, *STALE_RELEASES))


def test_without_engines_no_inputs_are_written(refused: Refused, tmp_path: Path) -> None:
    write_bundle(tmp_path / "small")
    line = refused("inspect", tmp_path / "small", "--write-inputs", tmp_path / "inputs", status=2)
    assert "has no TensorRT engines to write inputs for; leave --write-inputs out" in line
    assert not (tmp_path / "inputs").exists()


def test_operators_that_the_parser_lacks_are_named_and_nothing_is_left(
    build: Build, built: list[str], little: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = ("--drafter", "lyanna=random,method=lyanna,token_info=int8")
    assert build("10.13.3", *little, "-o", tmp_path / "engines", *drafter) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "lyanna.draft: node " in line
    assert "is Gather of int8" in line
    assert line.endswith("build the drafter with token_info=fp16")
    assert not (tmp_path / "engines").exists()
    assert built == []


def test_options_of_tensorrt_are_refused_elsewhere(refused: Refused, tmp_path: Path) -> None:
    line = refused("build", "tiny", "-o", tmp_path / "tiny", "--attention", "native", status=2)
    assert "--attention is for TensorRT engines; give --backend tensorrt" in line
    line = refused("build", "tiny", "-o", tmp_path / "tiny", "--precision", "fp8", status=2)
    assert "fp8 weights are for TensorRT engines" in line
