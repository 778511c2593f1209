"""Loading of the kernels and their refusals."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from redraft.errors import KernelError
from redraft.plugins import library
from redraft.plugins.library import (
    CPU_LIBRARY,
    AttentionArgs,
    AttentionPlan,
    CompactArgs,
    Kernels,
    open_kernels,
)

HEADER = Path(library.__file__).parent / "tree_attention" / "tree_attention.h"

GOOD = {
    "dtype": 0, "batch": 1, "nodes": 4, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "capacity": 8, "scale": 0.1,
    **dict.fromkeys(("q", "k", "v", "key_cache", "value_cache", "mask_bits", "cache_len", "out"), 64),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"dtype": -1}, r"dtype: expected 0 \(float16\), 1 \(bfloat16\) or 2 \(float32\), found -1"),
        ({"batch": 0}, "batch: expected 1 or more, found 0"),
        ({"nodes": 0}, "nodes: expected 1 or more, found 0"),
        ({"nodes": 9}, "nodes: expected at most capacity = 8, found 9"),
        ({"nodes": 5000, "capacity": 9000}, "nodes: expected at most 4096 under a mask, found 5000"),
        ({"capacity": 2**31 - 1}, "capacity: expected at most 2147483643 with 4 nodes, found 2147483647"),
        (
            {"nodes": 2**29, "capacity": 2**30, "mask_bits": None},
            "nodes: expected at most 268435455 with q_heads = 4, found 536870912",
        ),
        ({"kv_heads": 3}, "q_heads: expected a multiple of kv_heads = 3, found 4"),
        ({"q_heads": 0}, "q_heads: expected a multiple of kv_heads = 2, found 0"),
        ({"head_dim": 72}, "head_dim: expected 64, 80, 96, 128 or 256, found 72"),
        ({"capacity": -8}, "capacity: expected 1 or more, found -8"),
        ({"window": -1}, "window: expected 0 or more, found -1"),
        ({"softcap": -1.0}, "softcap: expected 0 or more, found -1"),
        ({"softcap": float("nan")}, "softcap: expected 0 or more, found -?nan"),
        ({"scale": float("inf")}, "scale: expected a finite number, found inf"),
        ({"ctas": -1}, "ctas: expected 0 to 65535, found -1"),
        ({"mask_bools": 64}, "mask_bits and mask_bools: expected one of them, found both"),
        ({"q": None}, "q: expected a pointer, found null"),
        ({"v": None}, "v: expected a pointer, found null"),
        ({"k": None}, "k: expected a pointer, found null"),
        ({"key_cache": 72}, "key_cache: expected an address at a multiple of 16 bytes, found 0x48"),
        ({"cache_len": None}, "cache_len: expected a pointer, found null"),
        ({"window": 3}, "positions: expected a pointer, found null"),
        ({"out": 8}, "out: expected an address at a multiple of 16 bytes, found 0x8"),
    ],
)
def test_bad_arguments_are_named(kernels: Kernels, wrong: dict[str, int | float | None], line: str) -> None:
    with pytest.raises(KernelError, match=f"^{line}"):
        kernels.attend(AttentionArgs(**{**GOOD, **wrong}), 64, 2**40)


def test_too_small_a_workspace_is_named(kernels: Kernels) -> None:
    needed = kernels.workspace_bytes(AttentionArgs(**GOOD))
    with pytest.raises(KernelError, match=f"workspace: expected {needed} bytes, found {needed - 1}"):
        kernels.attend(AttentionArgs(**GOOD), 64, needed - 1)
    with pytest.raises(KernelError, match="workspace: expected a pointer, found null"):
        kernels.attend(AttentionArgs(**GOOD), 0, needed)


def test_the_workspace_follows_sizes_not_lengths(kernels: Kernels) -> None:
    """The size is queried once, before lengths are known, and serves a captured graph."""
    small, large = (kernels.workspace_bytes(AttentionArgs(**{**GOOD, "capacity": c})) for c in (8, 80000))
    assert small == large
    assert kernels.workspace_bytes(AttentionArgs(**{**GOOD, "ctas": 12})) == 2 * small  # the CPU build has 6 blocks


@pytest.mark.parametrize(
    ("dtype", "head_dim", "nodes", "rows", "tile"),
    [(0, 128, 1, 16, 64), (0, 128, 16, 32, 64), (1, 128, 33, 64, 64), (0, 256, 1, 32, 32), (2, 64, 1, 16, 64),
     (2, 128, 64, 64, 32), (2, 256, 200, 32, 16)],
)  # fmt: skip
def test_plans_follow_the_queries(
    kernels: Kernels, dtype: int, head_dim: int, nodes: int, rows: int, tile: int
) -> None:
    """The fewest query rows a block that hold a tree, and never more shared memory than the smallest device has."""
    sizes = {"dtype": dtype, "head_dim": head_dim, "nodes": nodes, "capacity": 300}
    plan = kernels.plan(AttentionArgs(**{**GOOD, **sizes}))
    assert (plan.rows, plan.tile, plan.threads) == (rows, tile, 128)
    assert plan.shared_bytes <= 99 * 1024
    assert plan.partial_bytes == 2 * plan.ctas * rows * (head_dim + 2) * 4
    assert kernels.workspace_bytes(AttentionArgs(**{**GOOD, **sizes})) == plan.partial_bytes


@pytest.mark.parametrize("kind", [AttentionArgs, CompactArgs])
def test_a_field_that_is_not_there(kind: type[AttentionArgs]) -> None:
    with pytest.raises(TypeError, match="has no field heads, ql"):
        kind(batch=1, heads=2, ql=3)


def test_structs_have_the_headers_layout(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to read the header with")
    kinds = {
        "redraft_tree_attention_args": AttentionArgs,
        "redraft_attention_plan": AttentionPlan,
        "redraft_compact_args": CompactArgs,
    }
    fields = [(struct, name) for struct, kind in kinds.items() for name, _ in kind._fields_]
    offsets = "".join(f'printf("%zu\\n", offsetof({struct}, {name}));' for struct, name in fields)
    sizes = "".join(f'printf("%zu\\n", sizeof({struct}));' for struct in kinds)
    (tmp_path / "offsets.c").write_text(
        f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {offsets} {sizes} return 0; }}\n'
    )
    subprocess.run([compiler, "-std=c99", "-Wall", "-Werror", "offsets.c", "-o", "offsets"], cwd=tmp_path, check=True)
    found = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True).stdout.split()
    expected = [getattr(kinds[struct], name).offset for struct, name in fields]
    assert list(map(int, found)) == [*expected, *map(ctypes.sizeof, kinds.values())]


def test_no_library(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"no kernels at .*missing\.so; build them with `make plugins`"):
        open_kernels(environment={"REDRAFT_KERNELS": str(tmp_path / "missing.so")})


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"not a library")
    with pytest.raises(KernelError, match="does not load"):
        open_kernels(environment={"REDRAFT_KERNELS": str(path)})


def test_another_library() -> None:
    core = next(Path(np.__file__).parent.glob("_core/_multiarray_umath*.so"))
    with pytest.raises(KernelError, match="is not a library of redraft's kernels"):
        open_kernels(environment={"REDRAFT_KERNELS": str(core)})


def test_kernels_of_another_interface(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_ABI", 99)
    with pytest.raises(KernelError, match="expected kernels of interface 99, found 2; rebuild: make plugins"):
        Kernels(library.BUILD / CPU_LIBRARY)
