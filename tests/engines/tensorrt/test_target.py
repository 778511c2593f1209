"""GPU, TensorRT and plugin of a build: what is found, and one line for every failure."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from redraft.config import NATIVE_RELEASES, BuildConfig, TensorRtBuild
from redraft.engines.gpu import Gpu, cuda_version, find_gpu
from redraft.engines.tensorrt.plugin import VARIABLE, find_plugin
from redraft.engines.tensorrt.target import Target, check_same, find_target, find_tools
from redraft.engines.tensorrt_records import TensorRtRecord
from redraft.errors import BackendError

GPU = Gpu("NVIDIA H200", (9, 0), 130 << 30, 140 << 30)


class FakeDriver:
    """libcuda's entries over plain values; `failing` is an entry and the code it returns."""

    def __init__(self, devices: int = 1, failing: tuple[str, int] = ("", 0)) -> None:
        self.devices, self.failing, self.calls = devices, failing, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.failing[0]:
                return self.failing[1]
            answer = vars(FakeDriver).get(f"_{name}")
            if answer:
                answer(self, *arguments)
            return 0

        return call

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.devices

    def _cuDeviceGetName(self, name: Any, size: Any, device: Any) -> None:
        name.value = b"NVIDIA H200"

    def _cuDeviceGetAttribute(self, value: Any, number: Any, device: Any) -> None:
        value._obj.value = {75: 9, 76: 0}[number.value]

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = 130 << 30, 140 << 30

    def _cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 12040

    def _cuGetErrorName(self, status: Any, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_NO_DEVICE"


def absent(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def loader(version: str) -> Any:
    return lambda name: SimpleNamespace(__version__=version)


def test_name_capability_and_memory_are_read_and_the_context_is_let_go() -> None:
    driver = FakeDriver()
    assert find_gpu(lambda name: driver) == GPU
    assert driver.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_the_newest_cuda_that_the_driver_runs_is_known() -> None:
    assert cuda_version(lambda name: FakeDriver()) == (12, 4)
    with pytest.raises(BackendError, match=r"no CUDA driver: libcuda\.so\.1 was not found; install"):
        cuda_version(absent)


def test_no_driver_no_gpu_and_a_broken_driver_are_one_line_each() -> None:
    with pytest.raises(BackendError, match=r"no CUDA driver: libcuda\.so\.1 was not found; install"):
        find_gpu(absent)
    with pytest.raises(BackendError, match="sees no GPU; make one visible"):
        find_gpu(lambda name: FakeDriver(devices=0))
    driver = FakeDriver(failing=("cuMemGetInfo_v2", 2))
    with pytest.raises(BackendError, match="cuMemGetInfo_v2 failed with CUDA_ERROR_NO_DEVICE; install"):
        find_gpu(lambda name: driver)
    assert "cuDevicePrimaryCtxRelease_v2" in driver.calls
    with pytest.raises(BackendError, match="no CUDA driver"):  # before TensorRT is imported
        find_target(lambda: find_gpu(absent), lambda name: pytest.fail(f"{name} was imported"))


def test_this_driver_is_asked_by_its_real_entries() -> None:
    """Without a driver, loading reports that; with one, every entry exists and answers."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(BackendError, match="no CUDA driver"):
            find_gpu()
    else:
        assert find_gpu().total_bytes > 0


def test_only_supported_versions_are_taken() -> None:
    for version in ("10.9.0.34", "11.4.0.106"):
        assert find_target(lambda: GPU, loader(version)) == Target(version, GPU)
    for version in ("10.8.0.43", "12.0.0"):
        with pytest.raises(BackendError, match=rf"expected TensorRT 10\.9 to 11\.x, found {version}; run `pip install"):
            find_target(lambda: GPU, loader(version))


def test_a_missing_package_and_a_missing_library_are_named() -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'tensorrt'", name="tensorrt")

    def broken(name: str) -> ModuleType:
        raise ImportError("libnvinfer.so.10: cannot open shared object file")

    with pytest.raises(BackendError, match="needs the package tensorrt, which is not installed; run `pip install"):
        find_target(lambda: GPU, missing)
    with pytest.raises(BackendError, match=r"does not load: libnvinfer\.so\.10: cannot open"):
        find_target(lambda: GPU, broken)


@pytest.mark.parametrize(("capability", "taken"), [((8, 6), False), ((8, 9), True)])
def test_fp8_is_refused_on_gpus_without_it_before_anything_is_built(
    capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Target("10.16.1", Gpu("NVIDIA A10", capability, 0, 0))
    monkeypatch.setattr("redraft.engines.tensorrt.target.find_target", lambda product, capability: found)
    native = TensorRtBuild("native")
    config = BuildConfig("fp8", "tensorrt", tensorrt=native)
    if taken:
        assert find_tools(config).target == found
    else:
        with pytest.raises(BackendError, match=r"capability 8\.9 or newer, found NVIDIA A10 of 8\.6; .*precision int8"):
            find_tools(config)
        assert find_tools(BuildConfig("fp16", "tensorrt", tensorrt=native)).plugin is None


@pytest.mark.parametrize(
    ("version", "taken"), [("10.14.1", False), ("10.15.0", True), ("11.0.0", True), ("11.1.0", False)]
)
def test_native_attention_is_refused_before_anything_is_exported(
    version: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redraft.engines.tensorrt.target.find_target", lambda product, capability: Target(version, GPU))
    config = BuildConfig("fp16", "tensorrt", tensorrt=TensorRtBuild("native"))
    if taken:
        assert find_tools(config).plugin is None
    else:
        with pytest.raises(BackendError, match=rf"^TensorRT {version[:4]}.*; build .*, or use {NATIVE_RELEASES}$"):
            find_tools(config)


def test_engines_of_another_gpu_or_version_are_refused() -> None:
    record = TensorRtRecord("10.13.3", "NVIDIA H200", "9.0", "plugin")
    check_same(record, Target("10.13.3", GPU), "rebuild")
    with pytest.raises(BackendError, match=r"TensorRT 10\.13\.3 on NVIDIA H200 \(9\.0\), found TensorRT 10\.14\.0"):
        check_same(record, Target("10.14.0", GPU), "rebuild")
    with pytest.raises(BackendError, match=r"found TensorRT 10\.13\.3 on NVIDIA L4 \(8\.9\); rebuild"):
        check_same(record, Target("10.13.3", Gpu("NVIDIA L4", (8, 9), 0, 0)), "rebuild")


def library(folder: Path, major: int) -> Path:
    path = folder / f"libredraft_tensorrt_{major}.so"
    path.write_bytes(b"code")
    return path


def test_the_library_of_the_major_version_is_found_with_its_digest(tmp_path: Path) -> None:
    library(tmp_path, 11)
    expected = library(tmp_path, 10)
    found = find_plugin(10, tmp_path, {})
    assert (found.path, found.digest) == (expected, hashlib.sha256(b"code").hexdigest())


def test_a_missing_library_names_found_files_and_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"libredraft_tensorrt_10\.so, found none; build it with `make plugins"):
        find_plugin(10, tmp_path, {})
    library(tmp_path, 11)
    with pytest.raises(BackendError, match=r"found libredraft_tensorrt_11\.so; .* --attention native"):
        find_plugin(10, tmp_path, {})


def test_the_variable_names_another_library_but_none_of_another_major(tmp_path: Path) -> None:
    other = tmp_path / "mine.so"
    other.write_bytes(b"code")
    assert find_plugin(10, tmp_path, {VARIABLE: str(other)}).path == other
    with pytest.raises(BackendError, match="was built for TensorRT 11, expected 10; build it"):
        find_plugin(10, tmp_path, {VARIABLE: str(library(tmp_path, 11))})
