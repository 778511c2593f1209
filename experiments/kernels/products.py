"""The products with quantized weights against their floors and ONNX Runtime's MatMulNBits, on one core.

    python -m experiments.kernels.products [--bits 8 4] [--rows 1 8] [--shapes 1536x576] [--isa avx2] [--rounds 7]

A shape is inputs x outputs. Each product has enough copies of its weights that no cache holds them. `us` is the time of
one product. The floors are a plain read of the packed bytes and the multiplications of the kernel in registers alone;
`over_floor` is the time over the longer of the two, `of_peak` the share of the multiplications. `over_theirs` is ours
over MatMulNBits. All are timed in turns, as the least CPU time of the rounds. Prints a table.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tests.plugins.products import BlockMatrix, Floats, Packed, Products

from redraft.bench.command import markdown_table
from redraft.plugins.library import BUILD

SHAPES = ("576x1536", "1536x576", "576x576", "576x49152", "896x4864", "4864x896", "1536x8960")
ROWS = (1, 2, 4, 8, 16, 32, 256)
BLOCK = 32
COLD_BYTES = 512 << 20
FLAGS = {"avx2": ("-mavx2",), "avx_vnni": ("-mavx2", "-mavxvnni")}
PEAK_ROUNDS = 200_000


def main() -> None:
    """Print a line for each size when it is measured, then all as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=(8, 4), choices=(4, 8))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", help="the default is the best one of this CPU")
    args = parser.parse_args()
    products = Products(BUILD / "libredraft_operators.so")
    if args.isa and not products.use(args.isa):
        parser.error(f"this CPU has no {args.isa}")
    floors = compiled_floors(products.isa)
    print(f"{products.isa}, ONNX Runtime {ort.__version__}")
    table = [["bits", "shape", "rows", "us", "of t(1)", "over_floor", "of_peak", "over_theirs"]]
    for bits, shape in product(args.bits, args.shapes):
        k, n = map(int, shape.split("x"))
        copies = Copies(products, k, n, bits)
        first = 0.0
        for rows in args.rows:
            ours, theirs, read, peak = copies.times(floors, rows, args.rounds)
            first = first or ours
            least = max(read, peak)
            ratios = (ours / first, ours / least, peak / ours, ours / theirs)
            table.append([str(bits), shape, str(rows), f"{ours * 1e6:.1f}", *(f"{ratio:.2f}" for ratio in ratios)])
            print(" ".join(table[-1]), flush=True)
    print(markdown_table(table))


def compiled_floors(isa: str = "") -> ctypes.CDLL:
    """Return the functions of products_floors.cpp, compiled for an instruction set of the products, or this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder) / "floors.so", Path(__file__).with_name("products_floors.cpp")
        flags = FLAGS.get(isa, ("-march=native",))
        subprocess.run(
            ["c++", "-std=c++17", "-O3", "-shared", "-fPIC", *flags, str(source), "-o", str(library)], check=True
        )
        floors = ctypes.CDLL(str(library))
    floors.multiply_all.restype = ctypes.c_int64
    return floors


class Copies:
    """Products of one shape over several copies of weights, by us and by ONNX Runtime."""

    def __init__(self, products: Products, k: int, n: int, bits: int) -> None:
        self.k, self.n, self.bits = k, n, bits
        self.count = max(1, COLD_BYTES // (k * n * bits // 8))
        matrix = BlockMatrix.random(np.random.default_rng(0), n, k, bits, BLOCK, zero_points=False)
        packed = products.pack(matrix)
        assert packed is not None
        copies = huge_pages(self.count * packed.memory.size).reshape(self.count, -1)
        copies[:] = packed.memory
        self.packed = [Packed(packed.library, copy, n, k) for copy in copies]
        self.session = product_session(matrix, self.count)

    def times(self, floors: ctypes.CDLL, rows: int, rounds: int) -> tuple[float, float, float, float]:
        """Return seconds of one product: ours, theirs, the read of its bytes, and the multiplications in registers."""
        x = np.random.default_rng(rows).standard_normal((rows, self.k), np.float32)
        y, scratch = np.empty((rows, self.n), np.float32), self.packed[0].scratch(rows)
        timed = (
            partial(self._ours, x, y, scratch),
            partial(self.session.run, None, {"x": x}),
            partial(self._read, floors),
            partial(floors.multiply_all, self.bits, ctypes.c_int64(PEAK_ROUNDS)),
        )
        least = [min(column) for column in zip(*([_seconds(run) for run in timed] for _ in range(rounds)), strict=True)]
        products = floors.multiply_all(self.bits, ctypes.c_int64(1)) * PEAK_ROUNDS
        ours, theirs, read = (seconds / self.count for seconds in least[:3])
        return ours, theirs, read, least[3] * rows * self.k * self.n / products

    def _ours(self, x: Floats, y: Floats, scratch: NDArray[np.uint8]) -> None:
        for packed in self.packed:
            packed.quantize(x, 0, len(x), scratch)
            packed.multiply(scratch, None, y, 0, packed.tiles)

    def _read(self, floors: ctypes.CDLL) -> None:
        for packed in self.packed:
            floors.read_all(ctypes.c_void_p(packed.memory.ctypes.data), ctypes.c_int64(packed.memory.size // 8))


def huge_pages(size: int) -> NDArray[np.uint8]:
    """Return memory in huge pages, if the system has them, as ONNX Runtime's weights are: small ones cost a third."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _seconds(run: Callable[[], object]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started


def product_session(
    matrix: BlockMatrix, copies: int, threads: int = 1, library: Path | None = None
) -> ort.InferenceSession:
    """Return a session that multiplies x by each copy of the weights, with ONNX Runtime's kernel or a library's."""
    codes, scales, _ = matrix.stored()
    n, _, block = matrix.codes.shape
    given = {"b": codes, "scales": scales.reshape(-1)}
    nodes, weights = [], []
    for number in range(copies):
        names = [f"{name}{number}" for name in given]
        for name, array in zip(names, given.values(), strict=True):
            weights.append(onnx.numpy_helper.from_array(np.roll(array, number), name))  # equal ones may be shared
        nodes.append(helper.make_node(
            "MatMulNBits", ["x", *names], [f"y{number}"], domain="com.microsoft",
            K=matrix.k, N=n, bits=matrix.bits, block_size=block, accuracy_level=4,
        ))  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", matrix.k])
    y = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, ["rows", n]) for node in nodes]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "products", [x], y, weights), opset_imports=opsets)
    model.ir_version = 10
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
