"""Engine bundles: their files, opening them, and running their graphs."""

from __future__ import annotations

from redraft import names
from redraft.engines.bundle import Bundle, BundleWriter, open_bundle
from redraft.engines.calls import Calls
from redraft.engines.device import Device
from redraft.engines.host_device import HostDevice
from redraft.errors import UsageError

__all__ = [
    "DEVICES",
    "Bundle",
    "BundleWriter",
    "check_max_num_seqs",
    "check_tree",
    "open_bundle",
    "open_calls",
    "open_device",
    "open_host",
]

DEVICES = ("cpu", "cuda")


def open_calls(bundle: Bundle, graph: str = names.VERIFIER, threads: int | None = None) -> Calls:
    """Load a graph of the bundle on the host, for calls over arrays. Raises BundleError."""
    from redraft.engines.onnxruntime_device import load_program

    return Calls(load_program(bundle, graph, threads))


def open_host(bundle: Bundle, threads: int | None = None, max_num_seqs: int = 1, exact: bool = True) -> HostDevice:
    """Return the host as a device, which computes a step's work between engine calls itself."""
    return HostDevice(bundle, threads, step_graphs=False, max_num_seqs=max_num_seqs, exact=exact)


def open_device(bundle: Bundle, name: str, threads: int | None = None) -> Device:
    """Return the device `name`, which runs whole steps: TensorRT's if the bundle has engines, otherwise ONNX Runtime's.

    `cpu` runs the graphs of a GPU on the host, for tests and comparisons.
    Raises UsageError for another name, and BundleError or BackendError if a library is missing.
    """
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}", f"choose one of {', '.join(DEVICES)}")
    if name == "cpu":
        return HostDevice(bundle, threads)
    if bundle.manifest.backend != "onnxruntime":
        from redraft.engines import tensorrt_device

        return tensorrt_device.open_tensorrt_device(bundle)
    from redraft.engines import onnxruntime_device

    return onnxruntime_device.open_onnxruntime_cuda(bundle, threads)


def check_tree(largest: int, nodes: int) -> None:
    """Raise UsageError if a tree of `nodes`, root included, is larger than the `largest` of the engines."""
    if nodes > largest:
        raise UsageError(
            f"a tree of {nodes} nodes, its root included, is larger than the {largest} that the engine's profile takes",
            f"lower --budget nodes to {largest - 1}, or build again with --tree-nodes {nodes}",
        )


def check_max_num_seqs(largest: int, max_num_seqs: int) -> None:
    """Raise UsageError for more sequences at once than the engines take."""
    if max_num_seqs > largest:
        raise UsageError(
            f"{max_num_seqs} sequences at once are more than the {largest} that the engine's profiles take",
            f"lower the slots to {largest}, or build again with --batch {max_num_seqs}",
        )
