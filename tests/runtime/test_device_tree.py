"""What crosses to the host: one verdict a step. Trees that a device made are read only where somebody asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from redraft import names
from redraft.engines import open_bundle
from redraft.engines.device import Buffer
from redraft.engines.onnxruntime_device import OnnxRuntimeBuffer, OnnxRuntimeDevice
from redraft.engines.tensorrt_device import CudaBuffer
from redraft.errors import UsageError
from redraft.runtime import Runtime, SamplingParams, api
from redraft.runtime.cycle import Cycle
from redraft.runtime.device_tree import DeviceTree, DeviceTrees, same_trees
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only
from redraft.types import Budget, Costs

from .devices import cpu_device, open_over, tensorrt_device
from .fakes import CURVE
from .lyanna_bundle import VOCABULARY
from .test_lyanna import FULL, PARAMS, prompts

SHORT = prompts(4, seed=3, longest=12)


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "cached_curve", lambda verifier, identity: CURVE)
    monkeypatch.setattr(api, "cached_costs", lambda verifier, drafter, identity: Costs())
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


@pytest.fixture(params=["cpu", "tensorrt"])
def runtime(request: pytest.FixtureRequest, lyanna_bundle: Path, tmp_path: Path) -> Iterator[Runtime]:
    bundle = open_bundle(lyanna_bundle, verify=False)
    device = cpu_device(bundle) if request.param == "cpu" else tensorrt_device(bundle, tmp_path).device
    with open_over(device, lyanna_bundle) as opened:
        yield opened


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of all that was copied to the host."""
    shapes: list[tuple[int, ...]] = []
    for kind in (OnnxRuntimeBuffer, CudaBuffer):
        read = kind.read

        def counted(self: Buffer, read=read) -> np.ndarray:
            shapes.append(self.shape)
            return read(self)

        monkeypatch.setattr(kind, "read", counted)
    return shapes


@pytest.mark.parametrize(("method", "budget"), [("none", None), ("ngram", Budget(6, 4, 2)), ("lyanna", FULL)])
def test_a_step_copies_one_verdict_to_the_host(
    runtime: Runtime, reads: list[tuple[int, ...]], method: str, budget: Budget | None
) -> None:
    """Integers of a tree, never logits, features or KV."""
    runtime.generate(SHORT[:1], PARAMS, method, budget)
    steps: list[list[tuple[int, ...]]] = []
    step = Cycle.step

    def observed(self: Cycle, batch: list[Sequence]) -> None:
        reads.clear()
        step(self, batch)
        steps.append(list(reads))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cycle, "step", observed)
        found = runtime.generate(SHORT, PARAMS, method, budget)
    assert len(steps) > 5
    for copied in steps:
        ((_, width),) = copied
        assert width <= 1 + 2 * (FULL.nodes + 1)
    drafted = sum(generation.metrics.num_draft_tokens for generation in found)
    assert (drafted > 0) == (method != "none")


def test_logits_are_read_only_for_gaps(runtime: Runtime, reads: list[tuple[int, ...]]) -> None:
    runtime.generate(SHORT, PARAMS, "lyanna", FULL)
    assert all(shape[-1] != VOCABULARY for shape in reads)
    runtime.generate(SHORT, PARAMS, "lyanna", FULL, record_gaps=True)
    assert any(shape[-1] == VOCABULARY for shape in reads)


def trees_of(device: OnnxRuntimeDevice) -> DeviceTrees:
    tokens, parents = (device.empty("int64", 2, 4) for _ in range(2))
    tokens.write(np.arange(8).reshape(2, 4))
    parents.write(np.array([[-1, 0, 0, 1], [-1, 0, 1, 2]]))
    return DeviceTrees(tokens, parents, device.empty("float32", 2, 4))


def test_fields_are_copied_when_they_are_asked_for_and_once(lyanna_bundle: Path, reads: list[tuple[int, ...]]) -> None:
    made = trees_of(cpu_device(open_bundle(lyanna_bundle, verify=False)))
    first, second = made.tree(0, 3), made.tree(1, 4)
    assert (len(first), len(second), made.width) == (3, 4, 4)
    assert not reads
    assert second.tokens.tolist() == [4, 5, 6, 7]
    assert first.tokens.tolist() == [0, 1, 2]
    assert reads == [(2, 4)]
    assert first.parents.tolist() == [-1, 0, 0]
    assert (first.log_probs.dtype, len(first.log_probs)) == (np.float32, 3)
    assert len(reads) == 3
    with pytest.raises(AttributeError, match="colour"):
        first.colour  # noqa: B018


def test_trees_of_one_call_are_known_as_such(lyanna_bundle: Path, reads: list[tuple[int, ...]]) -> None:
    device = cpu_device(open_bundle(lyanna_bundle, verify=False))
    made, others = trees_of(device), trees_of(device)
    whole = [made.tree(0, 4), made.tree(1, 3)]
    assert same_trees(whole) is made
    assert same_trees(whole[:1]) is None
    assert same_trees([whole[1], whole[0]]) is None
    assert same_trees([whole[0], others.tree(1, 3)]) is None
    assert same_trees([whole[0], root_only(5)]) is None
    assert same_trees([root_only(5), whole[1]]) is None
    assert isinstance(whole[0], DeviceTree)
    assert not reads


def test_a_tree_deeper_than_the_layout_is_refused(runtime: Runtime) -> None:
    """Doubling reaches so far and no further: positions of deeper nodes would be wrong in silence."""
    params = SamplingParams(max_tokens=80)
    with pytest.raises(UsageError, match=f"depth .* at most {names.MOST_DEPTH} can"):
        runtime.generate([[5] * 15], params, "lyanna", Budget(70, 70, 1), synthetic_acceptance=(0.9,) * 70)
