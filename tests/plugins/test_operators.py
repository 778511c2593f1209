"""ONNX Runtime's products by redraft's kernels: the kernels' own bits in any shape and on any threads, and refusals."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, save

from redraft.engines.onnxruntime_backend import register_operators, session_options
from redraft.errors import KernelError
from redraft.plugins import operators
from redraft.plugins.operators import OFF, OPERATORS_VARIABLE, Operators, find_operators, missing_operators

Arrays = dict[str, NDArray[Any]]
N, K = 70, 200
"""Outputs and inputs: with blocks of 32, both end within a tile and a block."""
LARGE = 1024
"""Outputs and inputs of products that threads share."""


def weight(bits: int = 8, block: int = 32, zeros: bool = False, bias: bool = False, n: int = N, k: int = K) -> Arrays:
    """Return the constant inputs of a node by name."""
    generator = np.random.default_rng(bits)
    blocks = -(-k // block)
    arrays: Arrays = {
        "B": generator.integers(0, 256, (n, blocks, block * bits // 8), np.uint8),
        "scales": generator.uniform(0.001, 0.01, (n, blocks)).astype(np.float32),
    }
    if zeros:
        arrays["zero_points"] = generator.integers(0, 256, (n, -(-blocks * bits // 8)), np.uint8)
    if bias:
        arrays["bias"] = generator.standard_normal(n, np.float32)
    return arrays


def activations(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal(shape, np.float32)


def session(
    arrays: Arrays, library: Operators | None, rank: int = 3, threads: int = 1, variable: str = "",
    operator: str = "com.microsoft.MatMulNBits", **attributes: int,
) -> ort.InferenceSession:  # fmt: skip
    """Return a session of one product. Its weights are constants, but for the input `variable`."""
    domain, operator = operator.rsplit(".", 1)
    names = ["A", *("B", "scales", "zero_points", "g_idx", "bias")]
    given = [name if name in ("A", *arrays) else "" for name in names]
    sizes = {"N": arrays["B"].shape[0], "K": K, "bits": 8, "block_size": 32, "accuracy_level": 4} | attributes
    node = helper.make_node(operator, given, ["Y"], domain=domain, **sizes)
    rows = ["B", "T", "R"][-rank + 1 :] if rank > 1 else []
    inputs = [helper.make_tensor_value_info("A", TensorProto.FLOAT, [*rows, None])]
    if variable:
        dtype = helper.np_dtype_to_tensor_dtype(arrays[variable].dtype)
        inputs.append(helper.make_tensor_value_info(variable, dtype, arrays[variable].shape))
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items() if name != variable]
    output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, [*rows, None])
    graph = helper.make_graph([node], "product", inputs, [output], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = session_options(threads, "error")
    if library:
        register_operators(options, library)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class _Matrix(ctypes.Structure):
    """`redraft_block_matrix`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "k")),
        *((name, ctypes.c_int32) for name in ("bits", "block")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zero_points")),
    )


def reference(library: Operators, arrays: Arrays, x: NDArray[np.float32], bits: int, block: int) -> NDArray[np.float32]:
    """Return the product of x [..., k] by the C entries, in one call."""
    entries = ctypes.CDLL(str(library.path))
    for name in ("packed_bytes", "scratch_bytes", "tiles"):
        getattr(entries, f"redraft_products_{name}").restype = ctypes.c_int64
    n, k = arrays["B"].shape[0], x.shape[-1]
    x = np.ascontiguousarray(x.reshape(-1, k))
    y = np.empty((len(x), n), np.float32)
    rows = ctypes.c_int64(len(x))
    matrix = _Matrix(n, k, bits, block, *(_address(arrays.get(name)) for name in ("B", "scales", "zero_points")))
    packed = _aligned(entries.redraft_products_packed_bytes(ctypes.byref(matrix)))
    assert entries.redraft_products_pack(ctypes.byref(matrix), _address(packed)) == 0
    scratch = _aligned(entries.redraft_products_scratch_bytes(_address(packed), rows))
    tiles = ctypes.c_int64(entries.redraft_products_tiles(_address(packed)))
    start, bias = ctypes.c_int64(0), _address(arrays.get("bias"))
    entries.redraft_products_quantize(_address(packed), _address(x), rows, start, rows, _address(scratch))
    entries.redraft_products_multiply(_address(packed), _address(scratch), rows, bias, _address(y), start, tiles)
    return y


def _address(array: NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _aligned(size: int) -> NDArray[np.uint8]:
    raw = np.zeros(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_session_computes_the_kernels_bits(
    operators_library: Operators, bits: int, block: int, zeros: bool, bias: bool
) -> None:
    arrays, x = weight(bits, block, zeros, bias), activations(2, 5, K)
    (found,) = session(arrays, operators_library, bits=bits, block_size=block).run(None, {"A": x})
    assert found.shape == (2, 5, N)
    assert found.tobytes() == reference(operators_library, arrays, x, bits, block).tobytes()
    (own,) = session(arrays, None, bits=bits, block_size=block).run(None, {"A": x})
    assert np.abs(found - own).max() < 0.02 * np.abs(own).max()
    assert found.tobytes() != own.tobytes()  # ONNX Runtime's kernels add in another order


SUMMED = "redraft.SummedProduct"


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("block", "inputs"), [(16, 16), (32, 160), (256, 512)])
def test_a_summed_product_appends_the_sums_of_blocks(
    operators_library: Operators, bits: int, block: int, inputs: int
) -> None:
    k, x = inputs + inputs // block, activations(40, inputs)
    arrays = weight(bits, block, zeros=True, bias=True, k=k)
    sums = x.reshape(len(x), -1, block // 16, 16).cumsum(2, np.float32)[:, :, -1]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    expected = reference(operators_library, arrays, np.concatenate([x, sums[..., 0]], 1), bits, block)
    product = session(arrays, operators_library, 2, 2, operator=SUMMED, bits=bits, block_size=block, K=k)
    for rows in (1, 40, 3):
        (found,) = product.run(None, {"A": x[:rows]})
        assert found.tobytes() == expected[:rows].tobytes()
    x[1, 0] = np.inf
    (found,) = product.run(None, {"A": x})
    assert np.isnan(found[1]).all()
    assert np.delete(found, 1, 0).tobytes() == np.delete(expected, 1, 0).tobytes()
    with pytest.raises(Exception, match=f"A: expected a last dimension of {inputs}, found {k}"):
        product.run(None, {"A": activations(2, k)})


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_and_threads_change_no_bit(operators_library: Operators, threads: int) -> None:
    arrays, x = weight(n=LARGE, k=LARGE), activations(40, LARGE)
    expected = reference(operators_library, arrays, x, 8, 32)
    product = session(arrays, operators_library, rank=2, threads=threads, K=LARGE)
    for rows in (1, 2, 7, 40):  # grows, then shrinks
        for start in (0, 40 - rows):
            (found,) = product.run(None, {"A": x[start : start + rows]})
            assert found.tobytes() == expected[start : start + rows].tobytes()


@pytest.mark.parametrize("shape", [(K,), (0, K), (1, K), (3, K), (2, 0, K), (2, 3, K), (2, 2, 2, K)])
def test_leading_dimensions_are_kept(operators_library: Operators, shape: tuple[int, ...]) -> None:
    arrays, x = weight(), activations(*shape)
    (found,) = session(arrays, operators_library, rank=len(shape)).run(None, {"A": x})
    assert found.shape == (*shape[:-1], N)
    if found.size:
        assert found.tobytes() == reference(operators_library, arrays, x, 8, 32).tobytes()


@pytest.mark.parametrize(
    ("changes", "attributes", "message"),
    [
        ({"B": np.zeros((N, 6, 32), np.uint8)}, {}, "B: expected 15680 elements, found 13440"),
        ({"scales": np.zeros((N, 6), np.float32)}, {}, "scales: expected 490 elements, found 420"),
        ({"zero_points": np.zeros((N, 8), np.uint8)}, {}, "zero_points: expected 490 elements, found 560"),
        ({"g_idx": np.zeros(K, np.int32)}, {}, "g_idx is not supported"),
        ({}, {"bits": 2}, "expected weights of 4 or 8 bits in blocks of 16 to 256, a power of two; found 2 bits"),
        ({}, {"block_size": 512}, "found 8 bits, blocks of 512"),
        ({}, {"block_size": 48}, "found 8 bits, blocks of 48"),
        ({}, {"N": -1}, "N and K: expected positive numbers, found -1 and 200"),
        ({}, {"operator": SUMMED}, "K: expected whole blocks of 32 and their sums, found 200"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(
    operators_library: Operators, changes: Arrays, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        session(weight() | changes, operators_library, **attributes)


def test_weights_must_be_constants(operators_library: Operators) -> None:
    with pytest.raises(Exception, match="scales must be an initializer"):
        session(weight(), operators_library, variable="scales")


def test_a_call_that_does_not_fit_is_refused(operators_library: Operators) -> None:
    product = session(weight(), operators_library, rank=2)
    with pytest.raises(Exception, match="A: expected a last dimension of 200, found 199"):
        product.run(None, {"A": activations(2, 199)})
    arrays = weight(bias=True)
    arrays["bias"] = arrays["bias"][1:]
    product = session(arrays, operators_library, rank=2)
    with pytest.raises(Exception, match="bias: expected 70 elements, found 69"):
        product.run(None, {"A": activations(2, K)})


def test_gates_of_any_rank_and_refused_ones(operators_library: Operators) -> None:
    node = helper.make_node("SiluGate", ["x", "factors"], ["y"], domain="redraft")
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "factors")]
    graph = helper.make_graph([node], "gate", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("redraft", 1)]
    options = session_options(2, "error")
    register_operators(options, operators_library)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    gate = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    x, factors = activations(200, 3, 140), activations(70)
    (whole,) = gate.run(None, {"x": x, "factors": factors})
    assert whole.shape == (200, 3, 70)
    (row,) = gate.run(None, {"x": x[150, 2], "factors": factors})
    assert row.tobytes() == whole[150, 2].tobytes()
    assert gate.run(None, {"x": x[:, :0], "factors": factors})[0].shape == (200, 0, 70)
    with pytest.raises(Exception, match="an even last dimension"):
        gate.run(None, {"x": x[..., :3], "factors": factors})
    with pytest.raises(Exception, match="a number for each"):
        gate.run(None, {"x": x, "factors": factors[:3]})


def test_memory_of_a_files_weights_is_given_back_and_still_read(operators_library: Operators, tmp_path: Path) -> None:
    """Tied embeddings: the product and the lookup of rows have initializers of the same bytes."""
    arrays, x = weight(n=LARGE, k=LARGE), activations(3, LARGE)
    (tmp_path / "weights").write_bytes(arrays["B"].tobytes() + arrays["scales"].tobytes())
    places = {"B": ("B", 0), "scales": ("scales", arrays["B"].nbytes), "rows": ("B", 0)}
    constants = []
    for name, (source, offset) in places.items():
        shape = (LARGE, LARGE) if name == "rows" else arrays[source].shape
        dtype = helper.np_dtype_to_tensor_dtype(arrays[source].dtype)
        tensor = TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "weights"), ("offset", offset), ("length", arrays[source].nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        constants.append(tensor)
    sizes = {"N": LARGE, "K": LARGE, "bits": 8, "block_size": 32, "accuracy_level": 4}
    table = {"bits": 8, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    nodes = [
        helper.make_node("MatMulNBits", ["A", "B", "scales"], ["Y"], domain="com.microsoft", **sizes),
        helper.make_node("GatherBlockQuantized", ["rows", "I", "scales"], ["E"], domain="com.microsoft", **table),
    ]
    kinds = {"A": TensorProto.FLOAT, "I": TensorProto.INT64, "Y": TensorProto.FLOAT, "E": TensorProto.FLOAT}
    shapes = {"A": ["T", LARGE], "I": ["R"], "Y": ["T", LARGE], "E": ["R", LARGE]}
    given, outputs = (
        [helper.make_tensor_value_info(name, kinds[name], shapes[name]) for name in names] for names in ("AI", "YE")
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "tied", given, outputs, constants)
    save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "tied.onnx")
    options = session_options(1, "error")
    register_operators(options, operators_library)
    tied = ort.InferenceSession(str(tmp_path / "tied.onnx"), options, providers=["CPUExecutionProvider"])
    resident = resident_bytes(tmp_path / "weights")
    assert resident  # mapped
    assert sum(resident) < arrays["B"].nbytes / 8
    found, rows = tied.run(None, {"A": x, "I": np.arange(LARGE)})
    assert found.tobytes() == reference(operators_library, arrays, x, 8, 32).tobytes()
    scales = np.repeat(arrays["scales"], 32, axis=1)
    assert np.array_equal(rows, (arrays["B"].reshape(LARGE, LARGE).astype(np.float32) - 128) * scales)


def resident_bytes(path: Path) -> list[int]:
    """Return the bytes in memory of each mapping of the file in this process."""
    found, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if " " in line and "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            found.append(int(line.split()[1]) * 1024)
    return found


def test_the_library_exports_its_entries_only(operators_library: Operators) -> None:
    library = ctypes.CDLL(str(operators_library.path))
    assert hasattr(library, "RegisterCustomOps")
    assert not hasattr(library, "_ZTIN7redraft9operators7RefusedE")


def test_an_older_onnx_runtime_is_refused_with_a_status(operators_library: Operators) -> None:
    """Its table of entries is shorter, so none but the first may be used."""
    messages: list[bytes] = []
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
        lambda code, message: messages.append(message) or 8
    )
    table = (ctypes.c_void_p * 1)(ctypes.cast(create, ctypes.c_void_p))
    asked: list[int] = []

    def get_api(version: int) -> int:
        asked.append(version)
        return ctypes.addressof(table) if version == 1 else 0

    get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(get_api)
    release = ctypes.create_string_buffer(b"1.16.3")
    version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(release))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get, ctypes.c_void_p), ctypes.cast(version, ctypes.c_void_p))
    register = ctypes.CDLL(str(operators_library.path)).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, base) == 8
    assert messages == [b"redraft's operators need ONNX Runtime 1.17 or newer, found 1.16.3"]
    assert asked == [17, 1]


def test_the_library_is_found_by_variable_and_precision(operators_library: Operators, tmp_path: Path) -> None:
    named = {OPERATORS_VARIABLE: str(operators_library.path)}
    found = find_operators(named)
    assert found == operators_library
    assert len(found.digest) == 64
    assert found.identity == f"{found.digest[:16]} {found.instruction_set}"
    assert find_operators(named) == found
    assert missing_operators(named) is None
    assert find_operators({OPERATORS_VARIABLE: OFF}) is None
    assert missing_operators({OPERATORS_VARIABLE: OFF}) == f"{OPERATORS_VARIABLE}={OFF}"
    with pytest.raises(KernelError, match=f"no operators at {tmp_path}/none.so"):
        find_operators({OPERATORS_VARIABLE: f"{tmp_path}/none.so"})


def test_without_a_built_library_there_are_no_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tmp_path / operators.OPERATORS_LIBRARY
    monkeypatch.setattr(operators, "BUILD", tmp_path)
    assert find_operators({OPERATORS_VARIABLE: ""}) is None
    assert missing_operators({}) == f"no operators at {built}"
    built.write_bytes(b"built while the process runs")
    assert find_operators({}) is None  # engines of a process compute alike
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(KernelError, match="does not load"):
        find_operators({OPERATORS_VARIABLE: str(broken)})


def test_a_wheels_library_comes_after_the_named_and_before_the_built_one(
    operators_library: Operators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = Path(shutil.copy(operators_library.path, tmp_path)).resolve()
    monkeypatch.setattr(operators, "PACKAGED", tmp_path)
    assert find_operators({}) == replace(operators_library, path=packaged)
    assert find_operators({OPERATORS_VARIABLE: str(operators_library.path)}) == operators_library
    packaged.unlink()
    assert operators.missing_operators({}) is None
    assert find_operators({}) == operators_library


def test_libraries_without_the_operators_are_refused(operators_library: Operators) -> None:
    for other in (
        Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_shared.so",
        operators_library.path.with_name("libredraft_kernels_cpu.so"),
    ):
        with pytest.raises(KernelError, match="is not a library of redraft's operators"):
            find_operators({OPERATORS_VARIABLE: str(other)})
    with pytest.raises(KernelError, match="RegisterCustomOps"):
        register_operators(session_options(1, "error"), replace(operators_library, path=other))


def test_plain_c_plus_plus_does_not_replace_onnx_runtimes_products(
    operators_library: Operators, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.so"
    shutil.copy(operators_library.path, copy)
    assert ctypes.CDLL(str(copy)).redraft_products_use(operators.PLAIN.encode()) == 0
    with pytest.raises(KernelError, match="no instruction set"):
        find_operators({OPERATORS_VARIABLE: str(copy)})
