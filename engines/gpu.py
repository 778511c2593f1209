"""The GPU and its memory, by the CUDA driver itself: safe if no driver is installed, unlike TensorRT."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redraft.errors import BackendError

LIBRARY = "libcuda.so.1"
_CAPABILITY = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
_NAME_BYTES = 256
_INSTALL = "install NVIDIA's driver, or give a container the GPU (docker run --gpus all)"

Loader = Callable[[str], Any]


@dataclass(frozen=True)
class Gpu:
    """The first visible GPU. `compute_capability` is like (9, 0)."""

    name: str
    compute_capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


def find_gpu(load: Loader = ctypes.CDLL) -> Gpu:
    """Return the GPU that the driver reports. Raises BackendError without a driver or GPU, or if it does not start."""
    driver = _Driver(load)
    driver.call("cuInit", ctypes.c_uint(0))
    if driver.integer("cuDeviceGetCount") < 1:
        raise BackendError("the CUDA driver sees no GPU", "make one visible (CUDA_VISIBLE_DEVICES)")
    device = ctypes.c_int(driver.integer("cuDeviceGet", ctypes.c_int(0)))
    name = ctypes.create_string_buffer(_NAME_BYTES)
    driver.call("cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
    major, minor = (driver.integer("cuDeviceGetAttribute", ctypes.c_int(each), device) for each in _CAPABILITY)
    free_bytes, total_bytes = _memory(driver, device)
    return Gpu(name.value.decode(), (major, minor), free_bytes, total_bytes)


def cuda_version(load: Loader = ctypes.CDLL) -> tuple[int, int]:
    """Return the newest CUDA that the driver runs, like (12, 4). Raises BackendError without a driver."""
    number = _Driver(load).integer("cuDriverGetVersion")
    return number // 1000, number % 1000 // 10


def _memory(driver: _Driver, device: ctypes.c_int) -> tuple[int, int]:
    """Return free and total bytes. The device's context is held only during the query."""
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        driver.call("cuCtxPushCurrent_v2", context)
        try:
            driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            driver.call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        driver.call("cuDevicePrimaryCtxRelease_v2", device)
    return free.value, total.value


class _Driver:
    """The driver's functions. Each returns 0 or an error code. Raises BackendError if it is not installed."""

    def __init__(self, load: Loader) -> None:
        try:
            self._library = load(LIBRARY)
        except OSError:
            raise BackendError(f"no CUDA driver: {LIBRARY} was not found", _INSTALL) from None

    def call(self, function: str, *arguments: Any) -> None:
        """Raise BackendError naming the function and the error."""
        status = getattr(self._library, function)(*arguments)
        if status:
            raise BackendError(f"the CUDA driver does not work: {function} failed with {self._name(status)}", _INSTALL)

    def integer(self, function: str, *arguments: Any) -> int:
        """Return the integer that a function writes to its first argument."""
        value = ctypes.c_int()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def _name(self, status: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text)) == 0
        return text.value.decode() if known and text.value else f"error {status}"
