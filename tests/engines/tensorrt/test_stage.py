"""A bundle's engines from beginning to end, with a stand-in for TensorRT's builder."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import onnx
import onnx_ir as ir
import pytest

from redraft import names, signatures
from redraft.config import TensorRtBuild
from redraft.engines.bundle import BundleWriter, open_bundle
from redraft.engines.drafters import BuiltDrafter
from redraft.engines.gpu import Gpu
from redraft.engines.manifest import GraphRecord, Manifest, dump_manifest
from redraft.engines.tensorrt import memory, prepare, stage
from redraft.engines.tensorrt.builder import EngineBuild
from redraft.engines.tensorrt.plugin import Plugin
from redraft.engines.tensorrt.stage import stage_engines
from redraft.engines.tensorrt.target import Target, Tools
from redraft.engines.tensorrt_records import Range, weights_file
from redraft.errors import BackendError, BundleError
from redraft.export.graph.step_graphs import export_step_graphs
from redraft.methods.lyanna import METHOD, LyannaShape
from tests.engines.bundles import manifest_of
from tests.engines.drafters import lyanna_record
from tests.engines.graphs import Decoder, save_verifier, stored_outside

DECODER = Decoder()
OPTIONS = TensorRtBuild(batch=2, tree_nodes=16, prefill=32)
GPU = Gpu("NVIDIA H200", (9, 0), 130 << 30, 140 << 30)
DISK = (
    r"take at least 0\.00 GiB of disk, 0\.00 are free in .* \(GiB: verifier 0\.00\); free some, or build with -o on "
    r"another disk$"
)
Build = Callable[..., tuple[Manifest, list[EngineBuild]]]


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    library = tmp_path / "libredraft_tensorrt_10.so"
    library.write_bytes(b"plugin")
    return Tools(Target("10.13.3", GPU), Plugin(library, "0" * 64))


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of portable graphs: `plain`, and `copies`, whose weights are not in the order of the merged ones."""
    folder = tmp_path_factory.mktemp("portable")
    for name, save in (("plain", save_verifier), ("copies", partial(stored_outside, backwards=True))):
        (folder / name).mkdir()
        save(DECODER, folder / name)
        export_step_graphs(DECODER.shape, folder / name, gathers=False)
        (folder / name / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: Tools, portable: Path) -> Build:
    """Build a bundle with the test's own cache folder; returns its manifest and the graphs of built engines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(
        out: str = "bundle", options: TensorRtBuild = OPTIONS, tools: Tools = tools, kind: str = "plain",
        **changes: object,
    ) -> tuple[Manifest, list[EngineBuild]]:  # fmt: skip
        built: list[EngineBuild] = []

        def fake(one: EngineBuild) -> memoryview:
            built.append(one)
            return memoryview(b"engine of " + one.graph.name.encode())

        with BundleWriter(tmp_path / out, "small") as writer:
            shutil.copytree(portable / kind, writer.staging, dirs_exist_ok=True)
            manifest = manifest_of(DECODER, backend="tensorrt", **changes)
            staged = stage_engines(writer.staging, manifest, options, tools, lambda line: None, fake)
            return writer.commit(staged), built

    return run


def test_the_bundle_holds_engine_graph_plugin_and_the_portable_graph(build: Build, tmp_path: Path) -> None:
    manifest, built = build()
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.manifest == manifest
    record = bundle.manifest.tensorrt
    assert record is not None
    assert (record.version, record.gpu, record.compute_capability) == ("10.13.3", "NVIDIA H200", "9.0")
    assert (bundle.path / record.engines[names.VERIFIER].file).read_bytes() == b"engine of verifier.tensorrt.onnx"
    assert (bundle.path / record.plugin_file).read_bytes() == b"plugin"
    onnx.checker.check_model(bundle.path / bundle.graph(names.VERIFIER).file, full_check=True)
    assert [profile.name for profile in record.engines[names.VERIFIER].profiles] == ["prefill", "token", "tree"]
    assert built[0].profiles == record.engines[names.VERIFIER].profiles


def test_an_engine_without_a_digest_is_refused(build: Build, tmp_path: Path) -> None:
    manifest, _ = build()
    files = {name: record for name, record in manifest.files.items() if name != "verifier.engine"}
    (tmp_path / "bundle" / "manifest.json").write_text(dump_manifest(replace(manifest, files=files)))
    with pytest.raises(BundleError, match=r"no digest of verifier\.engine"):
        open_bundle(tmp_path / "bundle")


def test_a_cached_engine_is_used_for_the_same_graph_and_nothing_else(build: Build, tools: Tools) -> None:
    assert tools.digests() == {"tensorrt": "10.13.3", "gpu": "NVIDIA H200 9.0", "plugin": "0" * 64}
    assert len(build("first")[1]) == 1
    manifest, built = build("again")
    assert built == []
    assert manifest.tensorrt is not None
    plugin = tools.plugin
    assert plugin is not None
    others: dict[str, dict[str, object]] = {
        "version": {"tools": replace(tools, target=Target("10.14.0", GPU))},
        "gpu": {"tools": replace(tools, target=Target("10.13.3", replace(GPU, name="NVIDIA L4")))},
        "plugin": {"tools": replace(tools, plugin=replace(plugin, digest="1" * 64))},
        "profiles": {"options": replace(OPTIONS, tree_nodes=17)},
        "embedded": {"options": replace(OPTIONS, embed_plugin=True)},
    }
    for change, arguments in others.items():
        assert len(build(change, **arguments)[1]) == 1, change


def test_an_embedded_plugin_is_no_file_of_the_bundle(build: Build) -> None:
    manifest, built = build(options=replace(OPTIONS, embed_plugin=True))
    assert manifest.tensorrt is not None
    assert manifest.tensorrt.plugin_file == ""
    assert manifest.tensorrt.plugin == "0" * 64
    assert built[0].embed_plugin


def test_without_a_plugin_kept_rows_have_an_engine(build: Build) -> None:
    """Our kernel does it, which is built with the plugin."""
    signature = signatures.step_signatures(DECODER.shape, gathers=False)[names.STEP_COMPACT_KV]
    keep = {names.STEP_COMPACT_KV: GraphRecord(f"{names.STEP_COMPACT_KV}.onnx", *signature)}
    graphs = {**manifest_of(DECODER).graphs, **keep}
    native = replace(OPTIONS, attention="native")
    manifest, built = build("native", native, Tools(Target("10.15.0", GPU), None), graphs=graphs)
    assert manifest.tensorrt is not None
    assert set(manifest.tensorrt.engines) == {names.VERIFIER, names.STEP_COMPACT_KV}
    assert [one.graph.name for one in built] == ["verifier.tensorrt.onnx", "step.compact_kv.tensorrt.onnx"]
    assert (manifest.tensorrt.plugin, manifest.tensorrt.plugin_file, built[0].plugin) == ("", "", None)
    assert all(names.KV_LEN in profile.inputs for profile in built[0].profiles)
    manifest, _ = build("plugin", graphs=graphs)
    assert manifest.tensorrt is not None
    assert set(manifest.tensorrt.engines) == {names.VERIFIER}


def test_the_tree_that_is_tuned_for_is_the_drafters(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    lyanna = LyannaShape(32, 61, 2, 16, 3, 3, 7, 4, "fp16", 61, 8)
    monkeypatch.setattr(BuiltDrafter, "engine_graphs", {})
    manifest, _ = build(drafters={METHOD.id: lyanna_record(lyanna, "verifier.onnx")})
    assert manifest.tensorrt is not None
    tree = manifest.tensorrt.engines[names.VERIFIER].profiles[-1]
    assert tree.inputs[names.TOKEN_IDS] == Range((1, 2), (1, 8), (2, 16))


def test_too_little_memory_is_found_before_anything_is_built(build: Build, tools: Tools, tmp_path: Path) -> None:
    small = replace(tools, target=Target("10.13.3", replace(GPU, free_bytes=1 << 20)))
    with pytest.raises(BackendError, match=r"of GPU memory needed.*, 0\.00 free on NVIDIA H200.*--ignore-memory$"):
        build(tools=small)
    assert not (tmp_path / "bundle").exists()
    assert len(build(tools=small, options=replace(OPTIONS, ignore_memory=True))[1]) == 1


def test_too_little_disk_is_found_before_anything_is_built(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have copies of the weights, also if a bundle's weights are hard links."""
    free(monkeypatch, 1 << 10)
    with pytest.raises(BackendError, match=rf"^the engines {DISK}"):
        build()


def test_merged_weights_are_copied_only_if_the_disk_has_space(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("copied", kind="copies")
    model = ir.load(tmp_path / "copied" / "verifier.onnx")
    assert (tmp_path / "copied" / weights_file(names.VERIFIER)).stat().st_size == prepare.copied_bytes(model) > 0
    monkeypatch.setattr(prepare, "_copy", lambda part, out: pytest.fail("copied"))
    free(monkeypatch, 1 << 10)
    with pytest.raises(BackendError, match=rf"^copies of merged weights {DISK}"):
        build(kind="copies")


def test_a_disk_that_is_full_while_weights_are_copied_ends_the_build_with_a_line(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(part: ir.ExternalTensor, out: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare, "_copy", full)
    with pytest.raises(BundleError, match=r"^no space for .*bundle: .* MB written, .* MB free; free space, or give"):
        build(kind="copies")
    assert not (tmp_path / "bundle").exists()


def test_a_linked_engine_needs_no_disk_and_no_memory(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the cache's; from another file system it is copied."""
    build("first")
    free(monkeypatch, 1 << 10)
    monkeypatch.setattr(stage, "available_bytes", lambda: 1 << 10)
    assert build("second")[1] == []
    monkeypatch.setattr(stage, "same_disk", lambda one, other: False)
    with pytest.raises(BackendError, match="of disk"):
        build("third")


def test_too_little_memory_of_the_host_is_found_before_anything_is_built(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "available_bytes", lambda: 1 << 10)
    with pytest.raises(BackendError, match=r"^building verifier takes at least 0\.00 GiB of the host's memory"):
        build()
    assert len(build(options=replace(OPTIONS, ignore_memory=True))[1]) == 1


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Give the disk this many free bytes when engines are checked."""
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=size, total=1 << 40))
