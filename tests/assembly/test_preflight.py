"""A build is refused in one line before anything slow: no library, no network, a file of another kind, no room."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from tests.export.gguf_files import random_file
from tests.little import write_checkpoint

from redraft.assembly import models, preflight
from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model, find_model
from redraft.assembly.preflight import check_libraries, needs_of
from redraft.config import BuildConfig
from redraft.errors import BackendError, BundleError, CheckpointError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.gguf.checkpoint import GgufCheckpoint

INT8 = BuildConfig(precision="int8")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_file("qwen2").write(tmp_path_factory.mktemp("gguf") / "m.gguf")


def build(file: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build in int8. Fails if a build goes on after the checks."""
    monkeypatch.setattr("redraft.assembly.resolve.load_libraries", lambda: pytest.fail("the build went on"))
    build_bundle(Model("m", "m", file), INT8, out, {"code": "a"})


def test_too_little_disk(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = needs_of(GgufCheckpoint.open(file), INT8, tmp_path, measured=1000).disk
    assert weights == sum(values.size for values in random_file("qwen2").tensors.values())
    usage = preflight.shutil.disk_usage(tmp_path)._replace(free=weights - 1)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(BundleError, match=r"no space for .*/a/b: at least 0 MB needed, 0 MB free; free space, or give"):
        build(file, tmp_path / "a/b", monkeypatch)
    assert list(tmp_path.iterdir()) == []
    full = usage._replace(free=weights)  # enough for the bundle, and not for 1,000 tokens' logits
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(BundleError, match=r"no space in .*: \d+ MB of logits to compare, 0 MB free; .* TMPDIR"):
        build(file, tmp_path / "a/b", monkeypatch)


def test_too_little_memory(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = needs_of(GgufCheckpoint.open(file), INT8, tmp_path, measured=1000).memory
    monkeypatch.setattr(preflight, "available_bytes", lambda: needed - 1)
    with pytest.raises(BackendError, match=r"takes at least 0.7 GiB of memory; 0.7 are free; .* --precision int4"):
        build(file, tmp_path / "out", monkeypatch)
    monkeypatch.setattr(preflight, "available_bytes", lambda: needed)
    with pytest.raises(pytest.fail.Exception, match="the build went on"):
        build(file, tmp_path / "out", monkeypatch)


def test_needs_grow_with_the_weights_that_a_build_writes_and_loads(file: Path, tmp_path: Path) -> None:
    folder, packed = Checkpoint.open(write_checkpoint(tmp_path / "model")), GgufCheckpoint.open(file)
    int8, int4 = (needs_of(packed, replace(INT8, precision=precision), tmp_path, 1) for precision in ("int8", "int4"))
    assert (int4.disk, int4.memory < int8.memory) == (int8.disk // 2, True)
    least, most = (needs_of(packed, INT8, tmp_path, measured).memory for measured in (0, 1000))
    assert least < int8.memory < most
    fp32, fp16 = (needs_of(folder, BuildConfig(precision=precision), tmp_path, 1000) for precision in ("fp32", "fp16"))
    assert fp32.disk == 0 < fp16.disk  # hard links, and converted weights
    assert needs_of(folder, replace(INT8, random_weights=True), tmp_path, 0) == preflight.Needs(0, 0)


def test_files_that_are_none_are_refused_without_torch(file: Path, tmp_path: Path) -> None:
    """A damaged file and another architecture; a good file passes. Folders need no transformers either."""
    (tmp_path / "whisper.gguf").write_bytes(file.read_bytes().replace(b"qwen2", b"whale"))
    (tmp_path / "short.gguf").write_bytes(file.read_bytes()[:-1])
    program = f"""
import sys
from pathlib import Path
from redraft.assembly.preflight import check_file
from redraft.errors import RedraftError
from redraft.export.gguf.checkpoint import open_checkpoint
print("transformers" in sys.modules)
for path in {[str(file), *map(str, sorted(tmp_path.iterdir()))]!r}:
    try:
        check_file(open_checkpoint(Path(path)))
        print("good")
    except RedraftError as error:
        print(error)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    transformers, good, short, whale, torch = done.stdout.splitlines()
    assert (good, torch, transformers) == ("good", "False", "False")
    assert "short.gguf is truncated: it should hold" in short
    assert "whisper.gguf: architecture whale is not supported; give the model's Hugging Face folder" in whale


def test_without_the_extra_a_build_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_libraries()
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name in ("torch", "gguf") else name)
    with pytest.raises(BackendError, match=r"building needs torch, gguf, .* run `pip install 'redraft\[export\]'`"):
        check_libraries()


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops packets looks so, and the Hub's own client waits for it without a limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint=endpoint))
        monkeypatch.setattr(models, "HUB_SECONDS", 0.2)
        with pytest.raises(CheckpointError, match="the Hugging Face Hub cannot be reached; download"):
            find_model("nobody/nothing", None, lambda line: None)
