"""ONNX Runtime's GPU sessions on the fake CUDA, computed by its CPU provider when the stream runs them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from redraft import names
from redraft.engines import onnxruntime_device
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact
from redraft.engines.cuda import Cuda
from redraft.engines.onnxruntime_backend import Provider, load_session
from redraft.engines.onnxruntime_device import CPU, CUDA, NO_WAITING, OnnxRuntimeCuda
from tests.standins.cuda import FakeCuda


class QueuedSession:
    """A session on a GPU. host: inputs that it reads on the host.   assignment: its nodes by provider."""

    host: Sequence[str] = (names.KV_LEN,)
    assignment: Sequence[Any] = ()

    def __init__(self, session: ort.InferenceSession, cuda: FakeCuda) -> None:
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self.get_provider_graph_assignment_info = lambda: self.assignment
        self.bound: dict[str, tuple[str, int]] = {}
        self._session = session
        self._cuda = cuda
        self._sess = SimpleNamespace(run_with_iobinding=self._run)

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name="Cpu" if value.name in self.host else "Cuda") for value in self.get_inputs()]

    def io_binding(self) -> Any:
        """Return a binding whose values at the time of a run count, as kernels on a stream keep their arguments."""
        values: dict[str, tuple[str, Any]] = {}

        def bind(add: str) -> Any:
            def bound(name: str, device: str, number: int, kind: Any, shape: tuple[int, ...], address: int) -> None:
                where = {"cuda": "device", "cpu": "pinned"}[device]
                self._cuda.check(where, address, 1)
                self.bound[name] = device, address
                values[name] = add, (name, "cpu", number, kind, shape, address)

            return bound

        return SimpleNamespace(bind_input=bind("bind_input"), bind_output=bind("bind_output"), _iobinding=values)

    def _run(self, values: dict[str, tuple[str, Any]], options: ort.RunOptions) -> None:
        assert options.get_run_config_entry(NO_WAITING) == "1"
        assert self._cuda.captured is None, "a session whose sizes follow its inputs cannot be captured"
        binding = self._session.io_binding()
        for add, value in values.values():
            getattr(binding, add)(*value)
        self._cuda.put(lambda: self._session._sess.run_with_iobinding(binding._iobinding, None))


def onnxruntime_cuda(
    bundle: Bundle, patch: pytest.MonkeyPatch, cuda: FakeCuda | None = None, kernels: Compact | None = None
) -> OnnxRuntimeCuda:
    """A device over the fakes, while the patch lasts."""
    fake = cuda or FakeCuda()

    def load(bundle: Bundle, graph: str, threads: int | None, provider: Provider = (CPU, {}), **log: str) -> Any:
        name, options = provider
        session = load_session(bundle, graph, threads, (CPU, {}))
        if name == CPU:
            return session
        assert (name, options["user_compute_stream"]) == (CUDA, str(FakeCuda.STREAM))
        return QueuedSession(session, fake)

    patch.setattr(onnxruntime_device, "load_session", load)
    return OnnxRuntimeCuda(bundle, Cuda(fake, 1 << 12), kernels, 1)
