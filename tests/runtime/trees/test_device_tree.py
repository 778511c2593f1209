"""Copies to the host: one accept_output a step, and a tree from a device only if the host reads it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from redraft import names
from redraft.engines import open_bundle
from redraft.engines.cuda import Cuda
from redraft.engines.cuda_device import CudaBuffer
from redraft.engines.device import Buffer
from redraft.engines.host_device import HostBuffer, HostDevice
from redraft.errors import UsageError
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.requests.batch import Batch
from redraft.runtime.steps import graph_steps
from redraft.runtime.steps.graph_steps import GraphSteps
from redraft.runtime.steps.verifier import Verifier, blank
from redraft.runtime.trees.device_tree import DeviceDrafts, DeviceTree, calls_of
from redraft.runtime.trees.tree import prune, root_only
from redraft.types import Budget
from tests.runtime.devices import cpu_device, open_over, tensorrt_device
from tests.runtime.lyanna_bundle import FULL, PARAMS, VOCABULARY, prompts
from tests.standins.cuda import FakeCuda

pytestmark = pytest.mark.usefixtures("unmeasured")
SHORT = prompts(4, seed=3, longest=12)


@pytest.fixture(params=["cpu", "tensorrt"])
def runtime(request: pytest.FixtureRequest, lyanna_bundle: Path, tmp_path: Path) -> Iterator[Runtime]:
    bundle = open_bundle(lyanna_bundle, verify=False)
    device = cpu_device(bundle) if request.param == "cpu" else tensorrt_device(bundle, tmp_path).device
    with open_over(device, lyanna_bundle) as opened:
        yield opened


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of all copies to the host, except those of host_outputs."""
    shapes: list[tuple[int, ...]] = []
    for kind in (HostBuffer, CudaBuffer):
        read = kind.read

        def counted(self: Buffer, read=read) -> np.ndarray:
            shapes.append(self.shape)
            return read(self)

        monkeypatch.setattr(kind, "read", counted)
    return shapes


def calls_of_steps(runtime: Runtime, patch: pytest.MonkeyPatch, method: str, budget: Budget | None) -> list[list[str]]:
    """Return the CUDA functions that each step of a generation called."""
    calls: list[str] = []
    steps: list[list[str]] = []
    call, draft, commit = Cuda.call, DecodeLoop.draft, DecodeLoop.commit

    def called(self: Cuda, function: str, *arguments: object) -> object:
        calls.append(function)
        return call(self, function, *arguments)

    def drafted(self: DecodeLoop, batch: Batch) -> None:
        calls.clear()
        draft(self, batch)

    def committed(self: DecodeLoop, batch: Batch) -> None:
        commit(self, batch)
        steps.append(list(calls))

    patch.setattr(Cuda, "call", called)
    patch.setattr(DecodeLoop, "draft", drafted)
    patch.setattr(DecodeLoop, "commit", committed)
    found = runtime.generate(SHORT, PARAMS, SpeculationParams(method, budget=budget))
    assert (sum(generation.metrics.num_draft_tokens for generation in found) > 0) == (method != "none")
    return steps


@pytest.mark.parametrize(
    ("max_num_seqs", "method", "budget"),
    [
        (2, "none", None),
        (1, "ngram", None),
        (2, "ngram", Budget(6, 4, 2)),
        (1, "lyanna", None),
        (2, "lyanna", None),
        (2, "lyanna", FULL),
    ],
    ids=str,
)
def test_a_step_is_a_few_calls_of_cuda(
    lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, method: str,
    budget: Budget | None,
) -> None:  # fmt: skip
    """Each step is one graph and each call of the drafter another. The host waits once, and reads their times.

    This holds from the first request's first step, since `warm` names the method. If one sequence is resampled while
    another is drafted, the unused steps of the first one's chain are saved and restored.
    """
    device = tensorrt_device(open_bundle(lyanna_bundle, verify=False), tmp_path).device
    with open_over(device, lyanna_bundle, max_num_seqs) as runtime:
        runtime.warm(method)
        steps = calls_of_steps(runtime, monkeypatch, method, budget)
    assert len(steps) > 5
    seen = set()
    for calls in steps:
        drafts, copies = calls.count("cudaGraphLaunch") - 1, calls.count("cudaMemcpyAsync")
        seen.add((drafts, copies))
        assert calls.count("cudaStreamSynchronize") == 1
        timed = calls.count("cudaEventElapsedTime")
        assert timed in (0, 1 + drafts) if drafts else not timed
        assert len(calls) == 2 + drafts + copies + timed, calls
    alone = {(0, 0), (1, 0)} if method.endswith("lyanna") else {(0, 0)}
    mixed = {(1, 2), (2, 0), (2, 2)} if method.endswith("lyanna") and max_num_seqs > 1 else set()
    assert seen <= alone | mixed
    assert not mixed or budget is None or (2, 2) in seen


def test_a_closed_runtime_frees_all_its_memory(lyanna_bundle: Path, tmp_path: Path) -> None:
    """Memory is freed at once, without Python's cycle collector, which commands never run."""
    cuda = FakeCuda()
    fakes = tensorrt_device(open_bundle(lyanna_bundle, verify=False), tmp_path, cuda=cuda)
    gc.collect()
    gc.disable()
    try:
        runtime = open_over(fakes.device, lyanna_bundle, 2)
        runtime.generate(SHORT, PARAMS, "ngram+lyanna")
        runtime.generate(SHORT, PARAMS, "ngram")
        assert cuda.held() > 100_000
        assert min(cuda.living[kind] for kind in ("stream", "event", "executable graph")) > 0
        runtime.close()
        assert cuda.held() == 0
        fakes.device = None  # type: ignore[assignment]
        fakes.tensorrt.logger = None
        assert cuda.held("pinned") == 0
        assert set(cuda.living.values()) == {0}
    finally:
        gc.enable()


def test_the_least_recently_used_shapes_are_dropped(
    lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is freed once no pending work needs it, and the text does not change."""
    monkeypatch.setattr(Verifier, "warm", lambda self: None)
    cuda = FakeCuda()
    texts, held, under_way = [], [], []
    for most in (128, 2):
        monkeypatch.setattr(graph_steps, "MOST_STEPS", most)
        device = tensorrt_device(open_bundle(lyanna_bundle, verify=False), tmp_path, cuda=cuda).device
        with open_over(device, lyanna_bundle) as runtime:
            texts.append([g.token_ids for g in runtime.generate(SHORT, PARAMS, "ngram")])
            steps = runtime.verifier.steps
            assert isinstance(steps, GraphSteps)
            kept = list(steps._trees._values)
            held.append(len(kept))
            if most == 2:
                steps.tree([blank(kept[0][1])] * kept[0][0], [0] * kept[0][0])
                weakref.finalize(steps._trees._values[kept[1]], lambda: under_way.append(len(cuda.queued)))
                cuda.put(lambda: None)
                steps.tree([blank(64)], [0])
                assert under_way == [0]
                assert list(steps._trees._values) == [kept[0], (1, 64)]
    assert held[0] > held[1] == 2
    assert texts[0] == texts[1]


def test_logits_are_read_only_for_margins(runtime: Runtime, reads: list[tuple[int, ...]]) -> None:
    runtime.generate(SHORT, PARAMS, SpeculationParams("lyanna", budget=FULL))
    assert all(shape[-1] != VOCABULARY for shape in reads)
    runtime.generate(SHORT, PARAMS, SpeculationParams("lyanna", budget=FULL), record_logit_margins=True)
    assert any(shape[-1] == VOCABULARY for shape in reads)


def drafts_of(device: HostDevice) -> DeviceDrafts:
    """Return trees of three and four nodes."""
    tokens, parents = (device.empty("int64", 2, 4) for _ in range(2))
    tokens.write(np.arange(8).reshape(2, 4))
    parents.write(np.array([[-1, 0, 0, 1], [-1, 0, 1, 2]]))
    return DeviceDrafts(tokens, parents, device.empty("float32", 2, 4), [3, 4], device.chain([]), "draft")


def test_fields_are_copied_once_on_first_use(lyanna_bundle: Path, reads: list[tuple[int, ...]]) -> None:
    """The likeliest nodes are cut off without a copy, and so is the list of calls that made a batch's trees."""
    device = cpu_device(open_bundle(lyanna_bundle, verify=False))
    drafts, others = drafts_of(device), drafts_of(device)
    first, second = drafts.tree(0, 5), drafts.tree(1, 5)
    assert (len(first), len(second)) == (3, 4)
    cut = prune(second, 2)
    assert isinstance(cut, DeviceTree)
    assert (len(cut), len(prune(cut, 5))) == (3, 3)
    assert calls_of([first, second.first(1), root_only(5)]) == [drafts]
    assert calls_of([first, others.tree(1, 5)]) == [drafts, others]
    assert calls_of([root_only(5), root_only(6)]) == []
    assert not reads
    assert second.tokens.tolist() == [4, 5, 6, 7]
    assert cut.tokens.tolist() == [4, 5, 6]
    assert first.tokens.tolist() == [0, 1, 2]
    assert reads == [(2, 4)]
    assert first.parents.tolist() == [-1, 0, 0]
    assert (first.log_probs.dtype, len(first.log_probs)) == (np.float32, 3)
    assert len(reads) == 3
    assert not hasattr(first, "__dict__")


def test_a_tree_deeper_than_the_layout_is_refused(runtime: Runtime) -> None:
    """The layout's doubling limits the depth: positions of deeper nodes would be wrong without an error."""
    params = SamplingParams(max_tokens=80)
    with pytest.raises(UsageError, match=f"depth .* at most {names.MOST_DEPTH} can"):
        runtime.generate(
            [[5] * 15], params, SpeculationParams("lyanna", budget=Budget(70, 70, 1)), synthetic_acceptance=(0.9,) * 70
        )
