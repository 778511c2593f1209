"""Runtimes on a device: ONNX Runtime in host memory, and TensorRT's programs over fakes of CUDA and TensorRT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from redraft import names
from redraft.engines import open_bundle
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact
from redraft.engines.cuda import Cuda
from redraft.engines.device import Device
from redraft.engines.host_device import HostDevice
from redraft.engines.tensorrt_device import TensorRtDevice
from redraft.runtime import Runtime, api
from tests.engines.fake_onnxruntime import onnxruntime_cuda
from tests.standins.cuda import FakeCuda
from tests.standins.tensorrt import FakeTensorRt, Profile, write_engine

UPDATING = (names.VERIFIER, names.STEP_COMPACT_KV)
"""Graphs of a step that update buffers in place; drafts do too."""
STEP = (
    *UPDATING, names.STEP_PREPARE_TREE, names.STEP_ACCEPT, names.STEP_ACCEPT_SAMPLED, names.STEP_GATHER_FEATURES,
    names.STEP_STORE_TREES,
)  # fmt: skip


@dataclass
class Fakes:
    """The fakes that a runtime uses."""

    cuda: FakeCuda
    tensorrt: FakeTensorRt
    device: TensorRtDevice


def write_engines(
    bundle: Bundle, out: Path, profiles: Mapping[str, list[Profile]], host: tuple[str, ...]
) -> dict[str, Path]:
    """Write an engine for every graph of a step in the bundle. host: inputs that the verifier reads on the host."""
    roles = (names.DRAFT, names.STEER, names.RESAMPLE)
    drafts = [names.drafter_graph(drafter, role) for drafter in bundle.manifest.drafters for role in roles]
    return {
        graph: write_engine(
            out / f"{graph}.engine", (bundle.path / bundle.graph(graph).file).resolve(), profiles.get(graph, [{}]),
            host if graph == names.VERIFIER else (), graph in UPDATING or graph.endswith(f".{names.DRAFT}"),
        )
        for graph in (*STEP, *drafts)
        if graph in bundle.manifest.all_graphs
    }  # fmt: skip


def tensorrt_device(
    bundle: Bundle, out: Path, profiles: Mapping[str, list[Profile]] = {}, host: tuple[str, ...] = (),
    kernels: Compact | None = None, cuda: FakeCuda | None = None,
) -> Fakes:  # fmt: skip
    """Return a device over the fakes. Its staging memory is small, so that tests exhaust it."""
    cuda = cuda or FakeCuda()
    tensorrt = FakeTensorRt(cuda)
    engines = write_engines(bundle, out, profiles, host)
    return Fakes(cuda, tensorrt, TensorRtDevice(bundle, engines, Cuda(cuda, 1 << 12), tensorrt, kernels))


def open_over(device: Device, path: Path, max_num_seqs: int = 1, **lyanna: object) -> Runtime:
    """Return the bundle's runtime over an existing device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "open_device", lambda bundle, name, threads: device)
        options = {"lyanna": lyanna} if lyanna else {}
        return Runtime.open(
            path, threads=1, max_num_seqs=max_num_seqs, verify=False, drafter_options=options, device=device.name
        )


def opener(kind: str, path: Path, folder: Path, patch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """Return a function of slots and the drafter's options that opens a bundle: on the host, or on a kind of device.

    kind: `host`, `cpu`, `tensorrt`, `sizes on the host` for TensorRT engines that read sizes there, or `onnxruntime on
    a GPU`.   folder: for engines of the fakes.
    """
    bundle = open_bundle(path, verify=False)

    def device() -> Device:
        if kind == "cpu":
            return cpu_device(bundle)
        if kind == "onnxruntime on a GPU":
            return onnxruntime_cuda(bundle, patch)
        return tensorrt_device(bundle, folder, host=(names.KV_LEN,) if kind == "sizes on the host" else ()).device

    def open_runtime(max_num_seqs: int = 1, **lyanna: object) -> Runtime:
        if kind == "host":
            options = {"lyanna": lyanna} if lyanna else {}
            return Runtime.open(path, threads=1, max_num_seqs=max_num_seqs, verify=False, drafter_options=options)
        return open_over(device(), path, max_num_seqs, **lyanna)

    return open_runtime


def cpu_device(bundle: Bundle, kernels: Compact | None = None) -> HostDevice:
    """Return the device of ONNX Runtime on the CPU."""
    return HostDevice(bundle, 1, kernels)
