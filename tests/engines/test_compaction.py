"""redraft's kernel and the graph make the same rows contiguous, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from redraft import names, signatures
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import CompactProgram, can_compact
from redraft.engines.cuda import Cuda
from redraft.engines.device import Buffer, Device
from redraft.engines.host_device import HostDevice
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_device import OnnxRuntimeProgram
from redraft.engines.tensorrt_device import TensorRtDevice
from redraft.export.graph.step_graphs import export_step_graphs
from redraft.names import Dtype
from redraft.plugins.library import BUILD, CPU_LIBRARY, LIBRARY_VARIABLE, Kernels, find_kernels
from redraft.signatures import VerifierShape
from tests.engines.bundles import manifest_of
from tests.standins.cuda import FakeCuda, QueuedKernels
from tests.standins.tensorrt import FakeTensorRt

from .graphs import Decoder

CAPACITY = 40


def bundle_of(folder: Path, head_dim: int = 64, dtype: Dtype = "float32") -> Bundle:
    """A bundle with only the graphs of a step, without checks."""
    shape = VerifierShape(2, 2, head_dim, 32, 11, CAPACITY, dtype)
    files = export_step_graphs(shape, folder, gathers=False)
    of_graphs = signatures.step_signatures(shape, gathers=False)
    graphs = {name: GraphRecord(file, *of_graphs[name]) for name, file in files.items()}
    return Bundle(folder, manifest_of(Decoder(), shape=shape, graphs=graphs))


def kept(device: Device, dtype: Dtype, paths: np.ndarray, cache_len: np.ndarray, slots: int = 3) -> list[np.ndarray]:
    """The KV buffers after compaction, bound to the slots of `paths`."""
    program = device.program(names.STEP_COMPACT_KV)
    buffers, caches = dict[str, Buffer](), []
    for spec in program.inputs[2:]:
        whole = device.empty(dtype, slots, *(CAPACITY if dim == "C" else int(dim) for dim in spec.shape[1:]))
        caches.append(whole)
        buffers[spec.name] = buffers[names.present(spec.name)] = whole.part(len(paths), *whole.shape[1:])
    buffers[names.PATH], buffers[names.CACHE_LEN] = (device.empty("int64", *x.shape) for x in (paths, cache_len))
    run = device.chain([program.bind(buffers)])
    for _ in range(3):  # the first run in order, the rest as a graph: another run changes no row that counts
        for cache, seed in zip(caches, range(len(caches)), strict=True):
            cache.write(np.random.default_rng(seed).standard_normal(cache.shape).astype(dtype))
        buffers[names.PATH].write(paths)
        buffers[names.CACHE_LEN].write(cache_len)
        run()
    return [cache.read() for cache in caches]


def path(nodes: int, *accepted: int) -> list[int]:
    """A path of `STEP_ACCEPT`: the root, the accepted nodes, then entries equal to their index."""
    return [0, *accepted, *range(1 + len(accepted), nodes)]


PATHS = (
    [path(6, 2, 5)],
    [path(6, 1, 2, 3), path(6), path(6, 5)],
    [path(12, 1, 4, 11), path(12, 3, 7, 8, 9, 10, 11)],
    [path(2, 1)],
    [path(2)],
    [path(1), path(1)],
)


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("float16", 128)])
def test_the_kernel_compacts_the_same_rows_as_the_graph(
    kernels: Kernels, tmp_path: Path, head_dim: int, dtype: Dtype
) -> None:
    """The last row of the last path ends with its buffer. Slots outside the batch do not change."""
    bundle, cuda = bundle_of(tmp_path, head_dim, dtype), FakeCuda()
    queued = QueuedKernels(kernels, cuda)
    graph, host = HostDevice(bundle, 1), HostDevice(bundle, 1, kernels)
    gpu = TensorRtDevice(bundle, {}, Cuda(cuda), FakeTensorRt(cuda), queued)
    assert isinstance(graph.program(names.STEP_COMPACT_KV), OnnxRuntimeProgram)
    for paths in map(np.array, PATHS):
        cache_len = np.array([7, 0, CAPACITY - 12][: len(paths)])
        expected = kept(graph, dtype, paths, cache_len)
        for device in (host, gpu):
            assert isinstance(device.program(names.STEP_COMPACT_KV), CompactProgram)
            for found, wanted in zip(kept(device, dtype, paths, cache_len), expected, strict=True):
                assert found.tobytes() == wanted.tobytes(), paths
    assert (queued.launched, cuda.launches) == (2 * len(PATHS), 2 * len(PATHS))


def test_the_graph_handles_types_that_the_kernel_does_not(kernels: Kernels, tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, head_dim=16)
    assert not can_compact(bundle.graph(names.STEP_COMPACT_KV))
    assert isinstance(HostDevice(bundle, 1, kernels).program(names.STEP_COMPACT_KV), OnnxRuntimeProgram)


def test_reads_of_paths_end_with_the_buffer(kernels: Kernels, tmp_path: Path) -> None:
    """Memory after the paths would move rows if it were read."""
    bundle = bundle_of(tmp_path)
    arguments = []

    class Spy:
        def compact(self, args: object, stream: int = 0) -> None:
            arguments.append(args)

    device = HostDevice(bundle, 1, Spy())
    kept(device, "float32", np.array([path(4, 2), path(4, 3)]), np.array([1, 2]))
    (args,) = {id(args): args for args in arguments}.values()
    lengths = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 2).from_address(args.path_lengths))
    assert lengths.tolist() == [3, 3]
    assert args.max_path == 4


def test_the_kernels_for_the_cpu_are_none_for_the_gpu(kernels: Kernels) -> None:
    assert find_kernels("libnothing.so", {}) is None
    assert find_kernels(environment={LIBRARY_VARIABLE: str(BUILD / CPU_LIBRARY)}) is None
