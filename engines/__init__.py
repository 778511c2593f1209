"""Engine bundles: what is on disk, opening it, and running its graphs."""

from __future__ import annotations

from redraft import names
from redraft.engines.base import Engine
from redraft.engines.bundle import Bundle, BundleWriter, open_bundle
from redraft.engines.device import Device
from redraft.errors import UsageError

__all__ = ["DEVICES", "Bundle", "BundleWriter", "open_bundle", "open_device", "open_engine"]


def open_engine(bundle: Bundle, graph: str = names.VERIFIER, threads: int | None = None) -> Engine:
    """Load a graph of the bundle on the bundle's own backend. Raises BundleError."""
    from redraft.engines import onnxruntime_backend

    return onnxruntime_backend.open_engine(bundle, graph, threads)


DEVICES = ("cpu", "cuda")


def open_device(bundle: Bundle, name: str, threads: int | None = None) -> Device:
    """The device `name` with the bundle's graphs as programs over its buffers: TensorRT's where it has engines.

    Raises UsageError for another name, BundleError and BackendError where what runs them is not here.
    """
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}", f"choose one of {', '.join(DEVICES)}")
    if name == "cuda" and bundle.manifest.backend == "tensorrt":
        from redraft.engines import tensorrt_device

        return tensorrt_device.open_tensorrt_device(bundle)
    from redraft.engines import onnxruntime_device

    return onnxruntime_device.open_onnxruntime_device(bundle, name, threads)
