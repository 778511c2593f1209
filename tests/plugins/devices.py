"""A CUDA device by PyTorch: memory of kernels, and CUDA graphs of their calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def missing_device() -> str | None:
    """Return the reason why no kernel can run here, or None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "PyTorch is not installed; it brings the device memory and the reference"
    if not torch.version.cuda:
        return f"PyTorch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device: the driver is absent or lists none"
    return None


class DeviceMemory:
    """NumPy arrays as device memory and back, bytes unchanged (PyTorch and NumPy do not share bfloat16)."""

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")
        self.held: dict[int, Any] = {}

    def put(self, array: NDArray) -> int:
        """Return the address of a copy on the device."""
        held = self.torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy()).cuda()
        self.held[int(held.data_ptr())] = held
        return int(held.data_ptr())

    def get(self, address: int, like: NDArray) -> NDArray:
        """Return the current content at an address that `put` returned."""
        self.torch.cuda.synchronize()
        content: NDArray = self.held[address].cpu().numpy().view(like.dtype).reshape(like.shape)
        return content


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of `calls`, each over its own memory, so that none finds its data in the cache.

    It holds the calls: a graph has their memory's addresses, and PyTorch gives memory that nothing holds to others.
    """

    replay: Callable[[], None]
    calls: Sequence[Callable[[], object]]


def capture(calls: Sequence[Callable[[], object]]) -> Captured:
    """Capture one CUDA graph of all `calls`, in order, after one run of each outside the current stream."""
    torch = importlib.import_module("torch")
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for call in calls:
            call()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return Captured(graph.replay, calls)


def current_stream() -> int:
    """Return the address of PyTorch's stream."""
    return int(importlib.import_module("torch").cuda.current_stream().cuda_stream)
