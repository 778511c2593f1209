"""`redraft build`: files it writes, skipped rebuilds, and refusals without harm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Refused, Run
from tests.little import Redraft

from redraft.engines.writer import build_lock


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


def digest_tree(folder: Path) -> dict[str, bytes]:
    """Every file's bytes by its name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_second_build_is_a_no_op(run: Run, checkpoint: Path, bundle: Path) -> None:
    before = (bundle / "manifest.json").stat().st_mtime_ns
    assert run("build", checkpoint, "-o", bundle, "--eval-text", "none")["cached"] is True
    assert (bundle / "manifest.json").stat().st_mtime_ns == before


def test_bundle_holds_graphs_tokenizer_template_and_digests(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    step = {"step.prepare_tree", "step.accept", "step.accept_sampled", "step.compact_kv", "step.copy_slot"}
    assert set(manifest["graphs"]) == {"verifier", "verifier.batch", "verifier.single", "verifier.fast", *step}
    assert {"tokenizer.json", "chat_template.jinja", "verifier.onnx"} <= set(manifest["files"])
    assert (manifest["bos_token_id"], manifest["eos_token_ids"]) == (1, [2])
    assert manifest["max_model_len"] == 64
    assert len(manifest["model"]["weights"]) > 1


def test_quantized_builds_report_perplexity_next_to_fp32(
    redraft: Redraft, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. the dog did not. " * 5)
    text = ("--eval-text", f"words={tmp_path / 'text.txt'}")
    found = run("build", checkpoint, "-o", tmp_path / "out", "--precision", "int8,int4", "--skip-check", *text)
    rows, norms, vocabulary = 64 + 32 + 2 * 64 + 32, 5 * 32, 2 * 32 * 32
    weights, sums = 2 * (64 * 32 + 32 * 32 + 3 * 64 * 32), 2 * rows * 32
    counts = {
        "int8": {"8 bits": weights + vocabulary, "fp32": norms},
        "int4": {"4 bits": weights + sums, "8 bits": vocabulary, "fp32": norms},
    }
    for summary, (precision, expected) in zip(found["bundles"], counts.items(), strict=True):
        exact, out = summary["perplexity_fp32"]["words"], tmp_path / f"out-{precision}"
        assert (summary["precision"], summary["bundle"]) == (precision, str(out))
        files = [path for path in out.rglob("*") if path.is_file() and path.name != "manifest.json"]
        assert summary["bytes"] == sum(path.stat().st_size for path in files)
        whole = sum(expected.values())
        assert summary["weight_shares"] == pytest.approx({kind: count / whole for kind, count in expected.items()})
        shown = redraft("inspect", out).stdout
        assert f"{summary['bytes'] / 1e6:.1f} MB" in shown
        assert "every digest held at the last full check" in shown
        assert f"{100 * norms / whole:.1f} % in fp32" in shown
        assert summary["perplexity"]["words"] != exact
        assert summary["perplexity"]["words"] == pytest.approx(exact, rel=0.2)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_no_such_model(refused: Refused) -> None:
    line = refused("build", "no-such-thing", status=2)
    assert "no model 'no-such-thing'" in line
    assert "tiny" in line
    assert "Hugging Face Hub cannot be reached" in refused("build", "nobody/nothing", status=1)


def test_directory_that_is_no_checkpoint(refused: Refused, tmp_path: Path) -> None:
    assert "no config.json" in refused("build", tmp_path, "-o", tmp_path / "out", status=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "shard {} is missing"),
        ("truncated", "{} is truncated: "),
        ("no tokenizer", "no tokenizer.json"),
    ],
)
def test_damaged_checkpoint(refused: Refused, copy: Path, tmp_path: Path, damage: str, message: str) -> None:
    shard = min(copy.glob("model-*.safetensors"))
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 100)
    else:
        for path in copy.glob("tokenizer*"):
            path.unlink()
    line = refused("build", copy, "-o", tmp_path / "out", status=1)
    assert message.format(shard.name) in line
    assert damage != "truncated" or "download or copy the checkpoint again" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def test_output_that_is_no_bundle_is_left_alone(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert "not an engine bundle" in refused("build", checkpoint, "-o", tmp_path, status=1)
    assert (tmp_path / "precious").read_text() == "mine"


def test_full_disk(refused: Refused, checkpoint: Path, small_disk: Path) -> None:
    (small_disk / "kept.txt").write_text("what was there")
    line = refused("build", checkpoint, "-o", small_disk / "engines", "--eval-text", "none", status=1)
    assert "free" in line
    assert {path.name for path in small_disk.iterdir() if not path.name.endswith(".lock")} == {"kept.txt"}
    assert (small_disk / "kept.txt").read_text() == "what was there"


def test_second_build_at_once_is_refused(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    with build_lock(tmp_path / ".engines.lock", out):
        assert f"process {os.getpid()}" in refused("build", checkpoint, "-o", out, status=1)


def test_interrupted_build_leaves_the_earlier_bundle(
    redraft: Redraft, checkpoint: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(bundle, tmp_path / "little"))
    before = digest_tree(out)

    def interrupt(*arguments: object) -> None:
        assert any(path.name.startswith(".little.building") for path in tmp_path.iterdir())
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("redraft.assembly.tokenizers.write_text_files", interrupt)
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        done = redraft("build", checkpoint, "-o", out, "--force", "--max-model-len", "32", "--eval-text", "none")
    finally:
        signal.signal(signal.SIGINT, heeded)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "redraft: error: interrupted"
    assert digest_tree(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["little"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--precision", "fp7"], "--precision"),
        (["--weights", "none"], "--weights"),
        (["--max-model-len", "-1"], "context must be at least 2"),
        (["--max-model-len", "many"], "--max-model-len"),
        (["--backend", "abacus"], "--backend"),
        (["--eval-text", "prose"], "expected KIND=FILE"),
        (["--eval-text", "prose=/no/such/file"], "cannot read /no/such/file"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_options(refused: Refused, checkpoint: Path, tmp_path: Path, arguments: list[str], word: str) -> None:
    assert word in refused("build", checkpoint, "-o", tmp_path / "out", *arguments, status=2)
