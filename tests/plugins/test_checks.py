"""The kernels are right by checks that cover every one of them, and that notice wrong ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from redraft.errors import KernelError
from redraft.plugins.library import HEAD_DIMS, Kernels

from . import checks as module
from .cases import NUMPY, attend, attention_args
from .checks import FEATURES, checks


def test_they_cover_every_kernel(any_kernels: Kernels) -> None:
    """Every type and head size, trees of all sizes, every feature, ragged batches, and compaction."""
    found = list(checks(any_kernels, 70, 4) if any_kernels.on_cpu else checks(any_kernels))
    trees = {(each["dtype"], each["head_dim"], each["rows"]) for each in found if each["what"] == "tree"}
    assert {each[:2] for each in trees} == {(dtype, size) for dtype in NUMPY for size in HEAD_DIMS}
    assert {each for each in trees if each[1] == 64} == {(dtype, 64, rows) for dtype in NUMPY for rows in (16, 32, 64)}
    assert {(each["dtype"], each["what"]) for each in found} == {
        (dtype, what) for dtype in NUMPY for what in ("tree", "random", *FEATURES, "compaction")
    }


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("window", 0), ("softcap", 0.0), ("node_counts", None), ("mask_bits", None), ("mask_bools", None), ("k", None)],
)
def test_they_notice_an_option_that_a_kernel_ignores(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, field: str, wrong: int | None
) -> None:
    def args(*given: Any, **options: Any) -> Any:
        made = attention_args(*given, **options)
        setattr(made, field, wrong)
        if field == "k":
            made.v = None
        return made

    monkeypatch.setattr("tests.plugins.cases.attention_args", args)
    with pytest.raises(KernelError, match=r"float16, head size 64, .* nodes, .*: e(rror|xpected)"):
        list(checks(kernels, kv_len=101))


def test_they_notice_a_row_written_behind_the_new_ones(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is right: only the cache is wrong."""

    def careless(*given: Any, **options: Any) -> Any:
        out, keys, values = attend(*given, **options)
        keys[-1, :, -1] = 0
        return out, keys, values

    monkeypatch.setattr(module, "attend", careless)
    with pytest.raises(KernelError, match="expected the new rows in the cache"):
        list(checks(kernels, kv_len=21))


def test_they_notice_compaction_that_moves_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "compact", lambda self, args, stream=0: None)
    with pytest.raises(KernelError, match="float16, compaction of 1 rows"):
        list(checks(kernels, kv_len=21))


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(device_kernels: Kernels, tool: str) -> None:
    """Allocations are the driver's, not PyTorch's pool, so that an access past an end is seen.

    Initcheck follows the writes of every kernel: without PyTorch's own, it would take their memory for unwritten.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    ours_only = [] if tool == "initcheck" else ["--kernel-regex", "kns=redraft"]
    command = [sanitizer, "--tool", tool, *ours_only, "--report-api-errors", "no", "--error-exitcode", "9",
               sys.executable, "-m", "tests.plugins.checks"]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert '"compaction"' in done.stdout
