"""Text on a device equals the host's, token for token, for all drafters, batches, moves and full contexts.

Each case runs on ONNX Runtime's device and on TensorRT's fakes, which do their work only when the host waits.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redraft import signatures
from redraft.engines import BundleWriter, open_bundle
from redraft.engines.manifest import GraphRecord
from redraft.errors import DataError, UsageError
from redraft.export.graph.step_graphs import export_step_graphs
from redraft.plugins.library import Kernels
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.observe.trace import replay
from redraft.runtime.steps.bound_step import BoundPrefill, BoundTreeStep
from redraft.runtime.steps.measurements import measure_curve
from redraft.types import Budget
from tests.cli.conftest import write_tokenizer
from tests.engines.bundles import manifest_of
from tests.engines.fake_onnxruntime import onnxruntime_cuda
from tests.engines.graphs import Decoder, save_verifier
from tests.runtime.devices import cpu_device, open_over, opener, tensorrt_device
from tests.runtime.lyanna_bundle import ALL, CONTEXT, FULL, PARAMS, PROMPTS, STEPS, prompts
from tests.standins.cuda import FakeCuda, QueuedKernels

pytestmark = pytest.mark.usefixtures("unwarmed")
Open = Callable[..., Runtime]


@pytest.fixture(params=["cpu", "tensorrt", "onnxruntime on a GPU"])
def opened(
    request: pytest.FixtureRequest, lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """Return a function that opens the bundle on a device."""
    return opener(request.param, lyanna_bundle, tmp_path, monkeypatch)


@pytest.fixture
def host(lyanna_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(lyanna_bundle, threads=1, verify=False) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("max_num_seqs", "method", "budget", "options"),
    [
        (3, "none", None, {}),
        (1, "ngram", None, {}),
        (3, "ngram", Budget(6, 4, 2), {}),
        (1, "suffix+lyanna", None, {}),
        (3, "lookahead", Budget(9, 5, 4), {}),
        (3, "ngram+lyanna", None, {}),
        (3, "lyanna", FULL, {}),
        (1, "lyanna", FULL, {"resample": False}),
        (1, "lyanna", Budget(5, 2, 2), {}),
    ],
    ids=str,
)
def test_text_is_the_host_paths(
    opened: Open, plain: list[list[int]], max_num_seqs: int, method: str, budget: Budget | None,
    options: dict[str, object],
) -> None:  # fmt: skip
    """Prompts are longer than a draft call, texts reach the end of the context, and three slots move."""
    with opened(max_num_seqs, **options) as runtime:
        found = runtime.generate(ALL, PARAMS, SpeculationParams(method, budget=budget))
        again = runtime.generate(ALL[:2], PARAMS, SpeculationParams(method, budget=budget))
    assert [list(generation.token_ids) for generation in found] == plain
    assert [list(generation.token_ids) for generation in again] == plain[:2]
    assert max(len(prompt) + len(text) for prompt, text in zip(ALL, plain, strict=True)) == CONTEXT
    drafted = sum(generation.metrics.num_draft_tokens for generation in found)
    assert (drafted > 0) == (method != "none")


on_tensorrt = pytest.mark.parametrize("opened", ["tensorrt"], indirect=True)
"""For promises that do not depend on the device."""


@on_tensorrt
@pytest.mark.parametrize(("method", "largest"), [("ngram", 3), ("lyanna", FULL.nodes + 1)])
def test_no_tree_is_larger_than_the_engines_take(
    opened: Open, plain: list[list[int]], method: str, largest: int
) -> None:
    with opened() as runtime:
        runtime.verifier.largest_tree = largest
        asked, measure = [], runtime.verifier.measure_ms
        runtime.verifier.measure_ms = lambda b, nodes, kv_len: asked.append(nodes) or measure(b, nodes, kv_len) or 1.0
        assert measure_curve(runtime.verifier, seconds=0).largest <= largest
        assert max(asked) <= largest
        found = runtime.generate(ALL[:4], PARAMS, method)
        assert [list(generation.token_ids) for generation in found] == plain[:4]
        sizes = [len(generation.metrics.size_histogram) - 1 for generation in found]
        assert max(sizes) <= largest
        with pytest.raises(UsageError, match=f"larger than the {largest} that the engine's profile takes"):
            runtime.generate(ALL[:1], PARAMS, SpeculationParams(method, budget=Budget(largest, 4, 4)))


@on_tensorrt
def test_a_drafters_tree_that_is_too_large_for_every_engine_is_refused(opened: Open) -> None:
    with opened() as runtime:
        runtime.verifier.largest_tree = 2
        with pytest.raises(UsageError, match="larger than the 2 that the engine's profile takes"):
            runtime.generate(ALL[:1], PARAMS, "ngram+lyanna")


@on_tensorrt
def test_a_drafter_catches_up_after_other_methods(opened: Open, plain: list[list[int]]) -> None:
    """Other methods used the slots before, and left their values in the buffers."""
    with opened(2) as runtime:
        for method in ("ngram+lyanna", "ngram", "lyanna", "none", "ngram+lyanna"):
            found = runtime.generate(ALL[5:], PARAMS, SpeculationParams(method, budget=FULL))
            assert [list(generation.token_ids) for generation in found] == plain[5:]


def test_recorded_margins_are_the_host_paths(opened: Open, host: Runtime) -> None:
    expected = host.generate(PROMPTS[:3], PARAMS, "none", record_logit_margins=True)
    with opened(3) as runtime:
        how = SpeculationParams("lyanna", budget=FULL)
        found = runtime.generate(PROMPTS[:3], PARAMS, how, record_logit_margins=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logit_margins == pytest.approx(theirs.logit_margins, abs=1e-3)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the steps that copy logits from a device, which grows while they run."""
    found: list[str] = []
    for kind in (BoundTreeStep, BoundPrefill):
        monkeypatch.setattr(kind, "_host_logits", recorded(kind._host_logits, found, kind.__name__))
    return found


def recorded(function: Callable[..., Any], found: list[str], name: str) -> Callable[..., Any]:
    def call(self: object) -> Any:
        found.append(name)
        return function(self)

    return call


WARM = [SamplingParams(max_tokens=40, temperature=t, seed=seed) for seed, t in enumerate((1.0, 0.0, 0.6, 1.4) * 3)]
WARM = WARM[: len(ALL)]


@pytest.mark.parametrize(("max_num_seqs", "method"), [(3, "none"), (3, "lookahead"), (1, "ngram+lyanna")])
def test_sampled_text_is_the_host_paths_without_a_copy_of_logits(
    opened: Open, host: Runtime, plain: list[list[int]], copied: list[str], max_num_seqs: int, method: str
) -> None:
    """Greedy requests share the batch."""
    expected = [g.token_ids for g in host.generate(ALL, WARM, "none")]
    with opened(max_num_seqs) as runtime:
        found = runtime.generate(ALL, WARM, method)
    assert [g.token_ids for g in found] == expected
    assert sum(list(a) != b for a, b in zip(expected, plain, strict=True)) > len(ALL) / 3
    assert copied == []


def test_processors_beside_sampled_requests(opened: Open, host: Runtime, copied: list[str]) -> None:
    """One of three requests has a processor, so the batch's logits are copied, and the others' tokens do not change."""
    params = [
        params if number % 3 else replace(params, repetition_penalty=1.2) for number, params in enumerate(WARM[:6])
    ]
    expected = [g.token_ids for g in host.generate(ALL[:6], params, "none")]
    with opened(3) as runtime:
        device = runtime.verifier.device
        found = runtime.generate(ALL[:6], params, "ngram+lyanna")
    assert [g.token_ids for g in found] == expected
    assert (len(copied) > 0) == device.step_graphs


def test_forced_acceptance_is_the_host_paths(opened: Open, host: Runtime) -> None:
    params, budget, forced = SamplingParams(max_tokens=20, seed=3), Budget(6, 3, 2), (0.9, 0.7, 0.5)
    expected = host.generate(PROMPTS[:4], params, SpeculationParams("lyanna", budget=budget), forced)
    with opened(2) as runtime:
        found = runtime.generate(PROMPTS[:4], params, SpeculationParams("lyanna", budget=budget), forced)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert [g.metrics.acceptance_histogram for g in found] == [g.metrics.acceptance_histogram for g in expected]


@on_tensorrt
@pytest.mark.parametrize(("max_num_seqs", "method"), [(1, "lyanna"), (3, "ngram+lyanna")])
def test_a_trace_of_trees_on_the_device_replays(opened: Open, max_num_seqs: int, method: str) -> None:
    """Tree sizes follow from each rank's statistics, and in a batch a fresh draft may be another sequence's.

    The replay finds a tree that is larger than its ranks justify.
    """
    file = io.StringIO()
    with opened(max_num_seqs) as runtime:
        found = runtime.generate(ALL, PARAMS, method, trace=file)
    lines = file.getvalue().splitlines()
    played = replay(lines)
    texts = sorted([*prompt, *text.token_ids] for prompt, text in zip(ALL, found, strict=True))
    assert (
        sorted(tokens[: len(text)] for tokens, text in zip(sorted(played.requests.values()), texts, strict=True))
        == texts
    )
    assert played.nodes["fresh"] > 0
    steps = [json.loads(line) for line in lines]
    number = next(i for i, step in enumerate(steps) if "shares" in step.get("choice", ()) and len(step["tokens"]) > 1)
    steps[number]["choice"]["shares"] = [0.0]
    message = "0 nodes were worth verifying" if max_num_seqs == 1 else "not among those of the batch"
    with pytest.raises(DataError, match=f"line {number + 1} .* {message}"):
        replay([json.dumps(step) for step in steps])


@on_tensorrt
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_window_is_the_host_paths(opened: Open, host: Runtime, temperature: float) -> None:
    """The device returns the target tokens after all nodes, so the same guesses are accepted in the same steps."""
    short = prompts(4, seed=7, longest=20)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=2)
    how = SpeculationParams("lookahead", budget=Budget(9, 5, 4))
    expected = host.generate(short, params, how)
    with opened() as runtime:
        found = runtime.generate(short, params, how)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert [g.metrics.acceptance_histogram for g in found] == [g.metrics.acceptance_histogram for g in expected]
    assert sum(g.metrics.num_accepted_draft_tokens for g in found) > 0


def test_acceptance_is_the_host_paths(opened: Open, host: Runtime) -> None:
    """Trees and numbers of steps are equal too. The test avoids the context's end, since the host cuts trees there."""
    short, how = prompts(6, seed=7, longest=20), SpeculationParams("lyanna", budget=FULL)
    expected = host.generate(short, PARAMS, how)
    for max_num_seqs in (1, 3):
        with opened(max_num_seqs) as runtime:
            found = runtime.generate(short, PARAMS, how)
        assert [g.token_ids for g in found] == [g.token_ids for g in expected]
        assert [g.metrics.num_steps for g in found] == [g.metrics.num_steps for g in expected]
        assert [g.metrics.num_spec_steps for g in found] == [g.metrics.num_spec_steps for g in expected]
        assert sum(g.metrics.num_accepted_draft_tokens for g in found) > STEPS


@pytest.fixture(scope="module")
def wide_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a decoder whose heads are as wide as our kernels need them."""
    decoder = Decoder(head_dim=64, vocabulary=13, max_positions=CONTEXT)
    out = tmp_path_factory.mktemp("wide") / "wide"
    of_graphs = signatures.step_signatures(decoder.shape, gathers=False)
    with BundleWriter(out, "wide") as writer:
        save_verifier(decoder, writer.staging)
        write_tokenizer(writer.staging)
        files = export_step_graphs(decoder.shape, writer.staging, gathers=False)
        graphs = {name: GraphRecord(file, *of_graphs[name]) for name, file in files.items()}
        writer.commit(manifest_of(decoder, graphs={**manifest_of(decoder).graphs, **graphs}))
    return out


def test_text_with_rows_kept_by_our_kernel_is_the_host_paths(
    wide_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    """N-gram trees are accepted in part and off their first branch. On fakes the launch is part of a CUDA graph."""
    bundle, budget = open_bundle(wide_bundle, verify=False), Budget(8, 4, 3)
    with Runtime.open(wide_bundle, threads=1, verify=False) as host:
        expected = [g.token_ids for g in host.generate(ALL, PARAMS, "none")]
    cuda = FakeCuda()
    queued = QueuedKernels(kernels, cuda)
    gpu = tensorrt_device(bundle, tmp_path, kernels=queued, cuda=cuda)
    fakes = FakeCuda()
    launched = QueuedKernels(kernels, fakes)
    other = onnxruntime_cuda(bundle, monkeypatch, fakes, launched)
    for device in (cpu_device(bundle, kernels), gpu.device, other):
        with open_over(device, wide_bundle, 3) as runtime:
            found = runtime.generate(ALL, PARAMS, SpeculationParams("ngram", budget=budget))
        assert [g.token_ids for g in found] == expected
        assert sum(g.metrics.num_accepted_draft_tokens for g in found) > 0
    assert min(queued.launched, launched.launched) > 0
    assert cuda.launches > queued.launched
