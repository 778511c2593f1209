"""Loads for a machine with a GPU: cut to size, joined in any order; every step has a line."""

from __future__ import annotations

import json
import os
import struct
import sys
import zipfile
from pathlib import Path

import pytest

from experiments import gpu_day
from experiments.gpu_day import FAT_BINARY, Step, pack, run, unpack, without_other_code

MIB = 1 << 20
ENTRY = "<HHIQIIHHI"
"""Kind, version, bytes of the header and of the code, two words, minor and major version, architecture."""


def fat_binary(*architectures: int) -> bytes:
    """Return a fat binary with 40 bytes of code for each architecture."""
    header = struct.calcsize(ENTRY)
    entries = [struct.pack(ENTRY, 2, 257, header, 40, 0, 0, 0, 0, of) + bytes([of]) * 40 for of in architectures]
    return FAT_BINARY + struct.pack("<Q", sum(map(len, entries))) + b"".join(entries)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel whose library does not fit a load."""
    path = tmp_path_factory.mktemp("wheel") / "onnxruntime_gpu.whl"
    with zipfile.ZipFile(path, "w") as archive:
        library = b"text" + fat_binary(80, 90, 120) + os.urandom(3 * MIB)
        archive.writestr("onnxruntime/capi/libonnxruntime_providers_cuda.so", library)
        archive.mkdir("onnxruntime")
        archive.writestr("onnxruntime/__init__.py", "")
    return path


@pytest.fixture(scope="module")
def loads(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Its loads of at most 5 MiB."""
    bundle = tmp_path_factory.mktemp("bundles") / "tiny-fp16"
    bundle.mkdir()
    (bundle / "weights.bin").write_bytes(os.urandom(2 * MIB))
    return pack(tmp_path_factory.mktemp("day") / "out", wheel, [bundle], 90, 5 * MIB)


def test_loads_fit_and_make_the_whole_in_any_order(loads: list[Path], wheel: Path, tmp_path: Path) -> None:
    assert len(loads) == 2
    for load in loads:
        assert sum(path.stat().st_size for path in load.iterdir()) <= 5 * MIB
        assert (load / "gpu_day.py").exists()
    assert unpack(loads[1], tmp_path) == ["all"]
    assert unpack(loads[0], tmp_path) == []
    library = (tmp_path / "site/onnxruntime/capi/libonnxruntime_providers_cuda.so").read_bytes()
    original = zipfile.ZipFile(wheel).read("onnxruntime/capi/libonnxruntime_providers_cuda.so")
    assert library == original.replace(bytes([80]) * 40, bytes(40)).replace(bytes([120]) * 40, bytes(40))
    assert (tmp_path / "bundles/tiny-fp16/weights.bin").stat().st_size == 2 * MIB
    assert (tmp_path / "source/redraft/engines/tensorrt/target.py").exists()  # packages have their installed names
    assert (tmp_path / "source/plugins/CMakeLists.txt").exists()


def test_damaged_pieces_are_refused(loads: list[Path], tmp_path: Path) -> None:
    unpack(loads[0], tmp_path)
    piece = tmp_path / "pieces/cargo.0"
    piece.write_bytes(bytes(piece.stat().st_size))
    with pytest.raises(SystemExit, match="the pieces do not make what was packed"):
        unpack(loads[1], tmp_path)


def test_a_load_without_room_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="bytes without any piece: too many"):
        pack(tmp_path / "out", wheel, [], 90, MIB)


def test_a_library_of_one_architecture_stays_as_it_is() -> None:
    assert without_other_code(b"x" + fat_binary(90) + b"y", 90) == b"x" + fat_binary(90) + b"y"
    assert without_other_code(fat_binary(90)[:-3], 80)[-37:] == bytes(37)  # a cut one


def test_every_step_has_a_line_and_none_stops_the_next(
    loads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "print('first'); raise SystemExit('the reason')"
    found = "import sys; sys.path[:] = ['.', *sys.path]; import redraft.plugins.traffic"
    made = [
        Step("wrong", [sys.executable, "-c", wrong], 9),
        Step("slow", [sys.executable, "-c", "import time; time.sleep(60)"], 1),
        Step("absent", ["no-such-program"], 9),
        Step("needy", [sys.executable], 9, tmp_path / "kernels"),
        Step("right", [sys.executable, "-I", "-S", "-c", found], 60),
    ]
    monkeypatch.setattr(gpu_day, "steps", lambda work, out: made)
    assert run(loads[0], tmp_path / "out", tmp_path / "work", [], dry=False) == 3
    lines = [line.rpartition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == ["wrong: failed: the reason", "slow: failed: not done after 1 s", lines[3]]
    assert lines[3].startswith("absent: failed: ")
    assert lines[4:] == [f"needy: skipped: no {tmp_path / 'kernels'}", "right: ok"]
    kept = json.loads((tmp_path / "out/gpu_day.json").read_text())
    assert [each["step"] for each in kept] == ["wrong", "slow", "absent", "needy", "right"]


def test_a_dry_run_names_every_command_and_runs_none(
    loads: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(loads[0], tmp_path / "out", tmp_path / "work", [], dry=True) == 0
    shown = capsys.readouterr().out
    assert [line.partition(" ")[0] for line in shown.splitlines()] == ["build", "sanitize", "tests", "time"]
    assert "compute-sanitizer --tool memcheck" in shown
    assert not (tmp_path / "work").exists()
    assert not list((tmp_path / "out").iterdir())
