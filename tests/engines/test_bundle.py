"""Bundles on disk: opening refuses invalid ones, and a failed build never damages existing files."""

from __future__ import annotations

import errno
import json
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from redraft.engines.bundle import BundleWriter, open_bundle
from redraft.engines.check_record import is_current
from redraft.engines.digests import build_key, code_digests
from redraft.engines.manifest import MANIFEST, dump_manifest, load_manifest, signed
from redraft.errors import BundleError

from .bundles import manifest_of, write_bundle
from .graphs import Decoder, save_verifier

BUILD_THEN_WAIT = """
import sys, time
from pathlib import Path
from redraft.engines.bundle import BundleWriter
with BundleWriter(Path(sys.argv[1]), "small") as writer:
    (writer.staging / "half").write_text("half a bundle")
    print("building", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def out(tmp_path) -> Path:
    path = tmp_path / "engines" / "small"
    write_bundle(path)
    return path


def siblings(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


def start_build(out: Path) -> subprocess.Popen[str]:
    build = subprocess.Popen([sys.executable, "-c", BUILD_THEN_WAIT, str(out)], stdout=subprocess.PIPE, text=True)
    assert build.stdout is not None
    assert build.stdout.readline() == "building\n"
    return build


def one_line(error: pytest.ExceptionInfo[BundleError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_one_flipped_byte_is_found(out):
    file = out / "verifier.onnx"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError) as error:
        open_bundle(out)
    text = one_line(error)
    assert text.startswith(f"{out}: verifier.onnx: expected SHA-256 ")
    assert text.endswith(f"run `redraft build small-source -o {out} --force`")
    assert open_bundle(out, verify=False).path == out


def test_any_flipped_byte_of_the_manifest_is_found(out):
    """No file's digest covers token ids, offsets and sources."""
    data = (out / MANIFEST).read_bytes()
    for where in range(0, len(data), 7):
        (out / MANIFEST).write_bytes(data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :])
        with pytest.raises(BundleError):
            open_bundle(out, verify=False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / "verifier.onnx").unlink(), "expected file verifier.onnx, found none"),
        (lambda out: (out / "tokenizer.json").write_text("{ }"), "tokenizer.json: expected 2 bytes, found 3"),
        (lambda out: (out / MANIFEST).unlink(), "expected manifest.json in it, found none"),
        (lambda out: (out / MANIFEST).write_text("{"), "expected JSON, found"),
        (lambda out: (out / MANIFEST).write_text("[]"), "expected a JSON object, found list"),
        (lambda out: (out / MANIFEST).write_text("[" * 100_000), "expected JSON, found maximum recursion depth"),
    ],
)
def test_missing_and_damaged_files_are_named(out, damage, message):
    damage(out)
    with pytest.raises(BundleError) as error:
        open_bundle(out, verify=False)
    assert message in one_line(error)
    assert "run `redraft build " in one_line(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema_version=1), "expected schema version 11, found 1"),
        (lambda m: m.update(colour="red"), "manifest: unknown key colour"),
        (lambda m: m["shape"].update(layers="2"), "manifest: shape.layers must be a whole number, not '2'"),
        (lambda m: m["files"].update({"../x": {"size": 1, "sha256": ""}}), "file name '../x' leaves the bundle"),
        (lambda m: m["files"].pop("verifier.onnx"), "manifest has no digest of verifier.onnx"),
        (lambda m: m["graphs"].clear(), "expected a graph 'verifier', found none"),
        (
            lambda m: m["graphs"]["verifier"]["inputs"][0].update(dtype="int32"),
            "graph verifier: expected token_ids int64[B,T], found token_ids int32[B,T]",
        ),
        (lambda m: m["graphs"]["verifier"]["outputs"].pop(1), "expected tensor hidden_states.last, found none"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(out, change, message):
    values = json.loads((out / MANIFEST).read_text())
    change(values)
    (out / MANIFEST).write_text(json.dumps(signed(values)))
    with pytest.raises(BundleError) as error:
        open_bundle(out)
    assert message in one_line(error)
    assert "run `redraft build small-source -o" in one_line(error)


def test_nothing_or_a_file_in_place_of_a_bundle(tmp_path):
    with pytest.raises(BundleError, match=r"found nothing; run `redraft build MODEL -o "):
        open_bundle(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="found a file"):
        open_bundle(tmp_path / "file")


def test_manifest_survives_the_round_trip(out):
    manifest = load_manifest(out)
    assert dump_manifest(manifest) == (out / MANIFEST).read_text()
    assert set(manifest.files) == {"verifier.onnx", "tokenizer.json"}
    assert replace(manifest, files={}) == manifest_of(Decoder())


@pytest.mark.parametrize("failure", [RuntimeError("export failed"), KeyboardInterrupt()])
def test_a_failed_build_leaves_the_old_bundle_and_no_litter(out, failure):
    before = (out / MANIFEST).read_bytes()

    def build():
        with BundleWriter(out, "small") as writer:
            (writer.staging / "half").write_text("half")
            raise failure

    with pytest.raises(type(failure)):
        build()
    assert siblings(out) == ["small"]
    assert (out / MANIFEST).read_bytes() == before
    open_bundle(out)


def test_files_of_a_killed_build_are_deleted_by_the_next(out):
    build = start_build(out)
    build.kill()
    build.wait(10)
    assert len(siblings(out)) == 3
    open_bundle(out)
    write_bundle(out, Decoder(seed=1))
    assert siblings(out) == ["small"]
    open_bundle(out)


def test_a_build_killed_between_the_renames_gives_the_old_bundle_back(out):
    out.rename(out.parent / ".small.old-123")
    with BundleWriter(out, "small"):
        open_bundle(out)
    assert siblings(out) == ["small"]


def test_a_failed_rename_gives_the_old_bundle_back(out, monkeypatch):
    rename = Path.rename

    def fail_for_staging(self, target):
        if "building" in self.name:
            raise OSError(errno.EIO, "input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_staging)
    with pytest.raises(OSError, match="input/output"):
        write_bundle(out, Decoder(seed=1))
    open_bundle(out)
    assert siblings(out) == ["small"]


def test_a_second_build_at_once_fails_and_a_terminated_one_cleans_up(out):
    build = start_build(out)
    try:
        with pytest.raises(BundleError) as error:
            write_bundle(out)
        assert f"{out} is being built by process {build.pid}" in one_line(error)
        assert "wait for it" in one_line(error)
        open_bundle(out)
    finally:
        build.terminate()
    assert build.wait(10) == 128 + signal.SIGTERM
    assert siblings(out) == ["small"]
    write_bundle(out)


def test_only_bundles_are_replaced(out, tmp_path):
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter").write_text("one")
    with pytest.raises(BundleError, match="is not an engine bundle; give another -o"):
        write_bundle(precious, force=True)
    assert (precious / "chapter").read_text() == "one"
    with pytest.raises(BundleError, match=r"holds the bundle 'small', not 'other'.*--force"):
        write_bundle(out, name="other")
    write_bundle(out, name="other", force=True)
    assert open_bundle(out).manifest.name == "other"


def test_a_bundle_of_an_older_schema_is_replaced_by_its_own_name_only(out):
    """After an upgrade, `make demo` must not need --force. Folders that are not bundles stay."""
    manifest = out / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema_version": 1}))
    with pytest.raises(BundleError, match="holds the bundle 'small', not 'other'"):
        write_bundle(out, name="other")
    write_bundle(out)
    assert open_bundle(out).manifest.name == "small"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema_version": 99}))
    with pytest.raises(BundleError, match="expected schema version"):
        write_bundle(out)


def test_a_full_disk_is_one_line_and_damages_nothing(out, monkeypatch):
    """A real refusal of the kernel: the process may not write larger files."""
    before = (out / MANIFEST).read_bytes()
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, previous[1]))
    try:
        with pytest.raises(BundleError) as error:
            write_bundle(out, Decoder(seed=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"no space for {out}: " in one_line(error)
    assert " MB free; free space, or give an -o on another disk" in one_line(error)
    assert (out / MANIFEST).read_bytes() == before
    assert siblings(out) == ["small"]
    open_bundle(out)


def test_too_little_space_is_an_error_before_any_write(out):
    message = r"no space for .*: 1,000,000,000,000\.0 MB needed, .* MB free"
    with pytest.raises(BundleError, match=message), BundleWriter(out, "small") as writer:
        writer.reserve(10**18)
    open_bundle(out)


def test_a_folder_that_is_not_writable_is_named():
    """The lock is the first file, which the error must not name."""
    with pytest.raises(BundleError, match=r"cannot write /proc/engines: .*; give a writable -o"):
        BundleWriter(Path("/proc/engines"), "small").__enter__()


def test_an_error_that_is_its_own_context_is_passed_on(out):
    error = BundleError("refused")
    error.__context__ = ValueError("while tracing")
    error.__context__.__cause__ = error
    with pytest.raises(BundleError, match="refused"), BundleWriter(out, "small"):
        raise error


def test_random_weights_replace_a_model_only_on_request(out):
    with pytest.raises(BundleError, match="holds engines of a model, which random weights would replace"):
        BundleWriter(out, "small", random_weights=True).__enter__()
    with BundleWriter(out, "small", force=True, random_weights=True) as writer:
        save_verifier(Decoder(), writer.staging)
        made = manifest_of(Decoder())
        writer.commit(replace(made, model=replace(made.model, random_weights=True)))
    for random in (True, False):
        with BundleWriter(out, "small", random_weights=random):
            pass


def test_a_second_build_of_the_same_is_seen_and_a_damaged_one_is_not(out, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not is_current(tmp_path / "none", "key")
    with BundleWriter(out, "small") as writer:
        save_verifier(Decoder(), writer.staging)
        writer.commit(manifest_of(Decoder(), build_key="key"))
    assert is_current(out, "key")
    assert not is_current(out, "other key")
    file = out / "verifier.onnx"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert not is_current(out, "key")


def test_the_build_key_depends_on_every_input(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "module.py").write_text("x = 1\n")
    code = code_digests(tmp_path)
    inputs = ({"model.safetensors": "ab"}, Decoder(), {"torch": "2"}, code)
    (tmp_path / "module.py").write_text("x = 12\n")
    changed = ({"model.safetensors": "ac"}, Decoder(layers=3), {"torch": "3"}, code_digests(tmp_path))
    keys = {build_key(*inputs)}
    for i, other in enumerate(changed):
        keys.add(build_key(*inputs[:i], other, *inputs[i + 1 :]))
    assert len(keys) == 5
