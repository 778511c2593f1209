"""The GPU measurement's own parts, over host memory and the CPU build of the kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from redraft.bench import gpu_attention
from redraft.bench.gpu_attention import checks
from redraft.bench.gpu_device import missing_device
from redraft.bench.gpu_problem import DeviceProblem
from redraft.errors import RedraftError
from redraft.plugins.library import Kernels
from redraft.plugins.traffic import AttentionSizes, attention_bytes, attention_flops, compaction_bytes

SIZES = AttentionSizes("float32", 2, 30, 5, 4, 2, 64)


def test_checks_cover_every_type_and_head_size(kernels: Kernels) -> None:
    found = checks(kernels, device="cpu", live=21)
    assert {(each["dtype"], each["head_dim"]) for each in found} == {
        (dtype, head_dim) for dtype in ("float16", "bfloat16", "float32") for head_dim in (64, 80, 96, 128, 256)
    }


def test_a_wrong_kernel_fails_the_checks(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceProblem, "ours", lambda self, _: self.sdpa())  # leaves `out` as it was, zero
    with pytest.raises(RedraftError, match="float16, head size 64, 1 nodes: error"):
        checks(kernels, device="cpu", live=21)


def test_pytorchs_attention_is_given_the_same_problem(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = DeviceProblem(SIZES, device="cpu")
    problem.ours(kernels)()
    answers = []
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, **options: answers.append(attention(*given, **options)),
    )
    problem.sdpa()()
    torch.testing.assert_close(answers[0].transpose(1, 2), problem.out, atol=2e-6, rtol=0)
    torch.testing.assert_close(problem.reference(), problem.out, atol=2e-6, rtol=0)


def test_flashinfer_is_for_one_sequence() -> None:
    with pytest.raises(ValueError, match="one sequence"):
        DeviceProblem(SIZES, device="cpu").flashinfer()


def test_least_bytes() -> None:
    sizes = AttentionSizes("float16", 1, 16384, 1, 32, 8, 128)
    cache = 2 * 8 * 16385 * 256
    assert attention_bytes(sizes) == cache + 4 * 8 * 256 + 2 * 32 * 256 + 4
    assert attention_flops(sizes) == 4 * 32 * 16385 * 128
    assert compaction_bytes(64, 1, 32, 256, 4) == 2 * 64 * 32 * 4 * 256


@pytest.mark.skipif(missing_device() is None, reason="a CUDA device is here")
def test_without_a_device_the_report_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "attention.json"
    monkeypatch.setattr(sys, "argv", ["gpu_attention", "--out", str(out)])
    found = gpu_attention.main()
    assert found == {"skipped": missing_device()}
    assert json.loads(out.read_text()) == found
