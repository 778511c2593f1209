"""Products with quantized weights by redraft, ONNX Runtime, OpenVINO, ggml and oneDNN, side by side on two threads.

    python -m experiments.kernels.peers [--bits 8 4] [--rows 1 8] [--shapes 1536x8960] [--rounds 5] [--peers ggml]

All have the same weights: symmetric codes in blocks of 32 inputs that share a scale, which fp16 holds. Each has as many
copies as fill 512 MiB and multiplies with one after the other. `ms` is the least wall-clock time of one product, GB/s
the peer's own bytes of weights and scales in that time, and `of_read` its share of a plain read's, on as many threads.
`over_ours` is the time over redraft's, `error` relative to fp32 activations. `exact`: rows have the same bits alone and
among 2 to 16, or the smallest number of rows at which not. All are timed in turns.

Peers that are not installed are left out. ggml is the CPU kernels of llama.cpp, compiled for this processor; its kinds
of buffers have kernels of their own. oneDNN needs a C++ compiler. Each library is measured against redraft in a process
of its own: they take AMX's tiles and each other's drivers away.

    pip install openvino==2026.4.1 onednn==2026.1.0 onednn-devel==2026.1.0
    CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-dse -fno-tree-dse'" pip install llama-cpp-python==0.3.36

The two flags are for g++ 12, which drops parts of what ggml loads into AMX's configuration.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.plugins.products import BlockMatrix, Floats, Products

from experiments.kernels.products import BLOCK, COLD_BYTES, ROWS, compiled_floors, huge_pages, product_session
from redraft.bench.command import markdown_table
from redraft.plugins.library import BUILD

SHAPES = ("1536x8960", "8960x1536", "896x4864", "576x1536")
LIBRARIES = ("ONNX Runtime", "OpenVINO", "ggml", "oneDNN")
THREADS = 2
EXACT_ROWS = (2, 3, 4, 5, 6, 7, 8, 12, 16)
IDLE_S = 0.01
"""Threads of one library spin for a moment after a product."""

Peer = Callable[[Floats], Floats]
"""Multiplies x with each copy of the weights. Returns the product with the first."""
Made = tuple[int, Peer]
"""Bytes of a copy, and the peer."""


def main() -> None:
    """Print a line for each product when it is measured, then all as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=(8, 4), choices=(4, 8))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    args = parser.parse_args()
    if len(args.peers) > 1:
        for library in args.peers:
            subprocess.run(
                [sys.executable, "-m", "experiments.kernels.peers", *sys.argv[1:], "--peers", library], check=True
            )
        return
    table = [["bits", "shape", "peer", "MB", "error", "exact", "rows", "ms", "GB/s", "of_read", "over_ours"]]
    read = plain_read()
    for bits, shape in product(args.bits, args.shapes):
        k, n = map(int, shape.split("x"))
        weights = Weights(k, n, bits)
        made = {"redraft": redraft(weights)}
        made |= {name: peer for name, make in peers(args.peers[0]) if (peer := make(weights)) is not None}
        x = np.random.default_rng(1).standard_normal((max(*args.rows, *EXACT_ROWS), k), np.float32)
        known = {
            name: (f"{size / 1e6:.2f}", weights.error(peer, x), exact(peer, x)) for name, (size, peer) in made.items()
        }
        for rows in args.rows:
            *least, reading = times([*(partial(peer, x[:rows]) for _, peer in made.values()), read], args.rounds)
            for (name, (size, _)), seconds in zip(made.items(), least, strict=True):
                ms, share = seconds / weights.copies * 1e3, size * weights.copies / seconds / COLD_BYTES * reading
                table.append([
                    str(bits), shape, name, *known[name], str(rows), f"{ms:.3f}", f"{size / ms / 1e6:.1f}",
                    f"{share:.2f}", f"{seconds / least[0]:.2f}",
                ])  # fmt: skip
                print(" ".join(table[-1]), flush=True)
    print(markdown_table(table))


def plain_read() -> Callable[[], object]:
    """Return what reads as many bytes as the copies of a product have."""
    floors, memory = compiled_floors(), huge_pages(COLD_BYTES)
    memory[:] = 1
    pool, words = ThreadPoolExecutor(THREADS), COLD_BYTES // THREADS // 8

    def read_share(share: int) -> None:
        floors.read_all(ctypes.c_void_p(memory.ctypes.data + 8 * words * share), ctypes.c_int64(words))

    return lambda: [*pool.map(read_share, range(THREADS))]


def times(products: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the least wall-clock time of each, in turns."""
    least = [np.inf] * len(products)
    for _ in range(rounds):
        for number, run in enumerate(products):
            time.sleep(IDLE_S)
            run()  # wakes its threads
            started = time.perf_counter()
            run()
            least[number] = min(least[number], time.perf_counter() - started)
    return least


def exact(peer: Peer, x: Floats) -> str:
    """Return "yes", or the smallest number of rows at which a row is not as alone."""
    alone = np.concatenate([peer(x[row : row + 1]) for row in range(max(EXACT_ROWS))])
    for rows in EXACT_ROWS:
        if not np.array_equal(peer(x[:rows]), alone[:rows]):
            return f"not at {rows}"
    return "yes"


class Weights:
    """The weights, signed and as MatMulNBits has them. scales: [n, k / BLOCK]."""

    def __init__(self, k: int, n: int, bits: int) -> None:
        rng = np.random.default_rng(0)
        self.k, self.n, self.bits = k, n, bits
        self.copies = max(1, COLD_BYTES // (k * n * bits // 8))
        self.matrix = BlockMatrix.random(rng, n, k, bits, BLOCK, zero_points=False)
        np.maximum(self.matrix.codes, bits // 8, out=self.matrix.codes)  # ggml has no code -128
        self.matrix.scales[:] = (self.matrix.scales / (1 << bits)).astype(np.float16)
        self.scales = self.matrix.scales
        self.codes = (self.matrix.codes.astype(np.int16) - (1 << bits - 1)).astype(np.int8)

    def error(self, peer: Peer, x: Floats) -> str:
        right = x[:16] @ (self.codes * self.scales[..., None]).reshape(self.n, self.k).T
        return f"{np.linalg.norm(peer(x[:16]) - right) / np.linalg.norm(right):.4f}"


def redraft(weights: Weights) -> Made:
    """Return redraft's own products."""
    library = BUILD / "libredraft_operators.so"
    packed = Products(library).pack(weights.matrix)
    assert packed is not None
    return packed.memory.size, _session_peer(weights, library)


def peers(library: str) -> Iterator[tuple[str, Callable[[Weights], Made | None]]]:
    """Yield the name of each peer of a library, if it is installed, and what makes it if it takes the weights."""
    if library == "ONNX Runtime":
        yield library, _onnxruntime
    elif library == "OpenVINO" and find_spec("openvino"):
        yield f"OpenVINO int8 by {BLOCK}", partial(_openvino, group=BLOCK, precision="f32")
        for precision in ("f32", "bf16"):
            yield f"OpenVINO {precision}", partial(_openvino, group=0, precision=precision)
    elif library == "ggml" and (found := find_spec("llama_cpp")):
        ggml = Ggml(Path(next(iter(found.submodule_search_locations or ()))) / "lib")
        for buffer in ggml.buffers():
            yield f"ggml {ggml.name(buffer)}", partial(ggml.peer, buffer=buffer)
    elif library == "oneDNN" and any(each.name == "onednn" for each in metadata.distributions()):
        yield f"oneDNN int8 by {BLOCK}", partial(_onednn, dynamic=True)
        yield "oneDNN f32", partial(_onednn, dynamic=False)


def _onnxruntime(weights: Weights) -> Made:
    codes, scales, _ = weights.matrix.stored()
    return codes.nbytes + scales.nbytes, _session_peer(weights, None)


def _session_peer(weights: Weights, library: Path | None) -> Peer:
    session = product_session(weights.matrix, weights.copies, THREADS, library)
    return lambda x: session.run(None, {"x": x})[0]


def _openvino(weights: Weights, group: int, precision: str) -> Made:
    """group: inputs of activations that share a scale when they are rounded to 8 bits; 0: they are not."""
    import openvino as ov
    from openvino import opset13 as op

    x = op.parameter([-1, weights.k], np.float32)
    results = []
    for number in range(weights.copies):
        codes = np.roll(weights.codes, number, axis=0)  # equal ones may be shared
        kind, stored = (ov.Type.i8, codes) if weights.bits == 8 else (ov.Type.i4, _pairs(codes))
        constant = op.constant(ov.Tensor(stored, codes.shape, kind), shared_memory=False)
        scales = op.constant(weights.scales[..., None].astype(np.float16))
        rows = op.reshape(op.multiply(op.convert(constant, "f16"), scales), [weights.n, weights.k], False)
        results.append(op.matmul(x, op.convert(rows, "f32"), False, True))
    config = {
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
    }  # fmt: skip
    request = ov.Core().compile_model(ov.Model(results, [x]), "CPU", config).create_infer_request()

    def run(values: Floats) -> Floats:
        request.infer([values], share_inputs=True, share_outputs=True)
        return np.array(request.get_output_tensor(0).data)

    return weights.codes.size * weights.bits // 8 + 2 * weights.scales.size, run


def _pairs(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Join pairs of signed codes of 4 bits, the first in the low bits."""
    unsigned = codes.view(np.uint8) & 15
    return np.ascontiguousarray(unsigned[..., ::2] | unsigned[..., 1::2] << 4)


_F32, _Q4_0, _Q8_0 = map(ctypes.c_int, (0, 2, 8))
"""ggml's numbers of types."""


class Ggml:
    """ggml's C entries."""

    def __init__(self, folder: Path) -> None:
        ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self.call("log_set", self._quiet, 0)
        self._registry = self.call("backend_cpu_reg")
        self._device = self.call("backend_reg_dev_get", self._registry, ctypes.c_size_t(0))
        self._backend = self.call("backend_cpu_init")
        self.call("backend_cpu_set_n_threads", self._backend, ctypes.c_int(THREADS))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call an entry. A pointer is an integer."""
        found = getattr(self._library, f"ggml_{name}")
        results = {"backend_buft_name": ctypes.c_char_p, "backend_dev_supports_op": ctypes.c_bool}
        found.restype = results.get(name, ctypes.c_void_p)
        return found(*(ctypes.c_void_p(each) if isinstance(each, int) else each for each in arguments))

    def buffers(self) -> list[int]:
        """Return the kinds of buffers: the plain one, and those that pack weights."""
        entry = self.call("backend_reg_get_proc_address", self._registry, b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(entry)
        found, kinds = extra(self._device), []
        while found[len(kinds)]:
            kinds.append(found[len(kinds)])
        return [self.call("backend_cpu_buffer_type"), *kinds]

    def name(self, buffer: int) -> str:
        name: bytes = self.call("backend_buft_name", buffer)
        return name.decode()

    def peer(self, weights: Weights, buffer: int) -> Made | None:
        data, owned = self._blocks(weights), Owned(self)
        stored, kind = owned.context(weights.copies), _Q8_0 if weights.bits == 8 else _Q4_0
        matrices = [
            self.call("new_tensor_2d", stored, kind, *_sizes(weights.k, weights.n)) for _ in range(weights.copies)
        ]
        owned.allocate("backend_alloc_ctx_tensors_from_buft", stored, buffer)
        if not self.call("backend_dev_supports_op", self._device, self._graph(owned, matrices[:1], 1, weights.k)[2]):
            return None
        for matrix in matrices:
            self.call("backend_tensor_set", matrix, data.ctypes.data, *_sizes(0, data.nbytes))
        graphs: dict[int, tuple[int, int, int]] = {}

        def run(x: Floats) -> Floats:
            if len(x) not in graphs:
                graphs[len(x)] = self._graph(owned, matrices, *x.shape)
            graph, inputs, first = graphs[len(x)]
            y = np.empty((len(x), weights.n), np.float32)
            self.call("backend_tensor_set", inputs, x.ctypes.data, *_sizes(0, x.nbytes))
            self.call("backend_graph_compute", self._backend, graph)
            self.call("backend_tensor_get", first, y.ctypes.data, *_sizes(0, y.nbytes))
            return y

        return data.nbytes, run

    def _graph(self, owned: Owned, matrices: list[int], rows: int, k: int) -> tuple[int, int, int]:
        """Return a graph of the products, its input and its first output."""
        context = owned.context(2 * len(matrices))
        x = self.call("new_tensor_2d", context, _F32, *_sizes(k, rows))
        graph = self.call("new_graph_custom", context, ctypes.c_size_t(2 * len(matrices) + 2), ctypes.c_bool(False))
        products = [self.call("mul_mat", context, matrix, x) for matrix in matrices]
        for each in products:
            self.call("build_forward_expand", graph, each)
        owned.allocate("backend_alloc_ctx_tensors", context, self._backend)
        return graph, x, products[0]

    @staticmethod
    def _blocks(weights: Weights) -> NDArray[np.uint8]:
        """Return blocks of a scale in fp16 and codes. Of 4 bits, the second half of the inputs is in the high bits."""
        codes = weights.matrix.codes
        if weights.bits == 8:
            codes = weights.codes.view(np.uint8)
        else:
            codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        scales = weights.scales.astype(np.float16)[..., None].view(np.uint8)
        return np.ascontiguousarray(np.concatenate([scales, codes], axis=-1))


class Owned:
    """Contexts and buffers of a peer of ggml, which go with it."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml

    def context(self, tensors: int) -> int:
        """Return a context for so many tensors and a graph of them, without their data."""
        size = (tensors + 1) * 1024 + (1 << 16)

        class Parameters(ctypes.Structure):
            _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

        return self._kept(self._ggml.call("init", Parameters(size, None, True)), "free")

    def allocate(self, name: str, context: int, where: int) -> None:
        """Give the tensors of a context their data."""
        self._kept(self._ggml.call(name, context, where), "backend_buffer_free")

    def _kept(self, made: int, free: str) -> int:
        assert made
        weakref.finalize(self, self._ggml.call, free, made)
        return made


def _sizes(*sizes: int) -> Iterator[ctypes.c_int64]:
    return map(ctypes.c_int64, sizes)


def _onednn(weights: Weights, dynamic: bool) -> Made:
    library = _onednn_library()
    codes = np.ascontiguousarray(weights.codes.reshape(weights.n, weights.k).T)
    codes, scales = codes if weights.bits == 8 else _pairs(codes), np.ascontiguousarray(weights.scales.T)
    sizes = (*_sizes(weights.k, weights.n, BLOCK), weights.bits, dynamic, ctypes.c_int64(weights.copies))
    made = ctypes.c_void_p(library.peer_open(*sizes, _address(codes), _address(scales)))

    def run(x: Floats) -> Floats:
        y = np.empty((len(x), weights.n), np.float32)
        library.peer_run(made, ctypes.c_int64(len(x)), _address(x), _address(y))
        return y

    weakref.finalize(run, library.peer_close, made)
    return library.peer_bytes(made), run


@cache
def _onednn_library() -> ctypes.CDLL:
    """Compile peers_onednn.cpp. Its engine for CPUs is SYCL's, over the OpenCL driver that pip installs too."""
    files = {file.name: Path(str(file.locate())).resolve() for file in metadata.files("onednn") or ()}
    folder = files["libdnnl.so"].parent
    os.environ["OCL_ICD_FILENAMES"] = str(folder / "libintelocl.so")
    with tempfile.TemporaryDirectory() as made:
        to = Path(made) / "peers.so"
        flags = f"-std=c++17 -O3 -march=native -ffast-math -shared -fPIC -I{folder.parent / 'include'}".split()
        link = f"-L{folder} -ldnnl -Wl,-rpath,{folder},--disable-new-dtags,--allow-shlib-undefined".split()
        subprocess.run(["c++", *flags, Path(__file__).with_name("peers_onednn.cpp"), "-o", to, *link], check=True)
        library = ctypes.CDLL(str(to))
    library.peer_open.restype = ctypes.c_void_p
    library.peer_bytes.restype = ctypes.c_int64
    return library


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


if __name__ == "__main__":
    main()
