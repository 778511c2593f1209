"""Figures of the compiler's reports, and those computed from them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from experiments.kernels import compiled
from experiments.kernels.compiled import described, instructions, parse, resident_blocks, sources_digest
from redraft.errors import UsageError
from redraft.plugins.library import Kernels

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7redraft5mergeINS_14AttentionShapeIfLi256ELi2EEEEEvNS_7ProblemEi' for 'sm_90'
ptxas info    : Function properties for _ZN7redraft5mergeINS_14AttentionShapeIfLi256ELi2EEEEEvNS_7ProblemEi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 0 barriers
ptxas info    : Compiling entry function '_ZN7redraft6attendINS_14AttentionShapeIfLi256ELi2EEEEEvNS_7ProblemE' for 'sm_90'
ptxas info    : Function properties for _ZN7redraft6attendINS_14AttentionShapeIfLi256ELi2EEEEEvNS_7ProblemE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 253 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN7redraft6attendINS_14AttentionShapeINS_8Bfloat16ELi64ELi4EEEEEvNS_7ProblemE' for 'sm_86'
ptxas info    : Function properties for _ZN7redraft6attendINS_14AttentionShapeINS_8Bfloat16ELi64ELi4EEEEEvNS_7ProblemE
    24 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 24 bytes cumulative stack size
"""  # noqa: E501

MACHINE_CODE = """\
\tcode for sm_90
\t\tFunction : _ZN7redraft5mergeINS_14AttentionShapeINS_4HalfELi128ELi2EEELi1EEEvNS_7ProblemEi
        /*0000*/                   LDG.E.128 R1, [R2] ;
\t\tFunction : _ZN7redraft6attendINS_14AttentionShapeINS_4HalfELi128ELi4EEEEEvNS_7ProblemE
        /*0010*/                   LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64] ;
        /*0020*/              @!P1 LDG.E.U8 R1, [R2.64] ;
        /*0030*/             @UP0 LDG.E.64 R1, [R2.64] ;
        /*0040*/                   LDL R1, [R2] ;
        /*0050*/                   HMMA.16816.F32 R1, R2, R3, R1 ;
        /*0060*/                   HMMA.16816.F32 R1, R2, R3, R1 ;
\t\tFunction : _ZN7redraft7compactENS_7CompactE
        /*0010*/                   STG.E.128 [R1], R2 ;
"""
MOST_SPILLED = 100
KEPT = Path(__file__).parents[2] / "docs/gpu/kernels_sm90.json"


def test_machine_code_is_counted_by_kernel_and_width() -> None:
    assert instructions(MACHINE_CODE) == {
        ("float16", 128, 64, "sm_90"): {"HMMA": 2, "LDG 1": 1, "LDG 8": 1, "LDGSTS 16": 1, "LDL 4": 1}
    }


def test_the_report_in_the_documentation_is_of_these_sources() -> None:
    """A change of a kernel needs a new report: `make plugins ARCHITECTURES=90`, then experiments.kernels.compiled."""
    report = json.loads(KEPT.read_text())
    assert report["sources"] == sources_digest()
    for kernel in report["kernels"]:
        # What comes from the caches is loaded 16 bytes at a time, and a kernel is fed by tensor cores.
        counts = kernel["instructions"]
        assert [name for name in counts if name.startswith("LDGSTS")] == ["LDGSTS 16"]
        assert counts["HMMA"] > 0
        assert kernel["spilled_bytes"] <= MOST_SPILLED


def test_attention_kernels_are_found() -> None:
    keys = ("dtype", "head_dim", "rows", "architecture", "registers", "spilled_bytes")
    assert [tuple(entry[key] for key in keys) for entry in parse(REPORT)] == [
        ("float32", 256, 32, "sm_90", 253, 0),
        ("bfloat16", 64, 64, "sm_86", 128, 44),
    ]


def test_tiles_come_from_the_library(kernels: Kernels) -> None:
    found = described(kernels, list(parse(REPORT))[1])
    assert (found["tile"], found["shared_bytes"]) == (64, (64 + 4 * 64) * 144)
    assert found["blocks"] == 2
    assert found["bytes_under_way"] == 2 * 2 * 64 * 128


@pytest.mark.parametrize(
    ("registers", "shared", "blocks"), [(255, 1000, 2), (128, 1000, 4), (129, 1000, 3), (32, 112 * 1024, 2)]
)
def test_blocks_at_once(registers: int, shared: int, blocks: int) -> None:
    """The scarcer of registers (in units of 8 a thread) and shared memory decides."""
    assert resident_blocks(registers, shared, "sm_90") == blocks


def test_a_report_of_an_earlier_build_does_not_count(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, (name, registers) in enumerate([("attend_half.txt", 200), ("attend_half.cu.o.txt", 253)]):
        path = tmp_path / name
        path.write_text(REPORT.replace("253 registers", f"{registers} registers"))
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(sys, "argv", ["compiled", "--reports", str(tmp_path)])
    found = compiled.main()["kernels"]
    assert [(entry["dtype"], entry["registers"]) for entry in found] == [("bfloat16", 128), ("float32", 200)]


def test_nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compiled", "--reports", str(tmp_path)])
    with pytest.raises(UsageError, match=r"no compiler reports in .*; build the kernels with `make plugins`"):
        compiled.main()
