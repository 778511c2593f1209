"""Drafters that are replaced while requests run: drafts change, texts do not, and a bad bundle changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from redraft.engines.manifest import load_manifest
from redraft.errors import BundleError, RedraftError, UsageError
from redraft.runtime import Budget, Generation, Runtime, SpeculationParams, Submission
from redraft.runtime.loop import speculation
from redraft.runtime.loop.scheduler import RequestOutput
from tests.runtime.fakes import make_runtime
from tests.runtime.lyanna_bundle import ALL, FULL, PARAMS
from tests.runtime.rebuilt import retrain, rewrite

pytestmark = pytest.mark.usefixtures("unmeasured")
ASKED = [ALL[-1], ALL[0]]
WIDE = SpeculationParams("lyanna", budget=FULL)
WAIT = 60


@pytest.fixture(scope="module")
def expected(plain: list[list[int]]) -> list[list[int]]:
    """The tokens after ASKED."""
    return [plain[ALL.index(prompt)] for prompt in ASKED]


@pytest.fixture
def engines(lyanna_bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(lyanna_bundle, tmp_path / "engines")


@pytest.fixture
def runtime(engines: Path) -> Iterator[Runtime]:
    with Runtime.open(engines, threads=1, verify=False) as opened:
        yield opened


def drafts(generation: Generation) -> tuple[object, ...]:
    """Return what a generation's drafts brought."""
    return tuple(generation.metrics.acceptance_histogram)


def tokens(generations: Sequence[Generation]) -> list[list[int]]:
    return [list(one.token_ids) for one in generations]


def decode(runtime: Runtime) -> list[Generation]:
    """Decode without rows of earlier requests."""
    runtime.forget_prefixes()
    return runtime.generate(ASKED, PARAMS, WIDE)


def test_requests_keep_their_drafter_and_new_ones_get_the_new_one(
    runtime: Runtime, engines: Path, expected: list[list[int]]
) -> None:
    before = decode(runtime)
    runtime.forget_prefixes()
    changed: list[tuple[str, ...]] = []
    still: list[bool] = []
    retrain(engines)

    def swap(output: RequestOutput) -> None:
        if not changed:
            changed.append(runtime.reload_drafters())
            still.append(output.request.speculation.drafter in runtime.verifier.steps.readers)

    running = runtime.submit(ASKED[0], PARAMS, WIDE, on_output=swap)
    old = running.request.speculation.drafter
    kept = running.result(WAIT)
    assert (changed, still) == ([("lyanna",)], [True])
    assert drafts(kept) == drafts(before[0])
    after = decode(runtime)
    assert [drafts(one) for one in after] != [drafts(one) for one in before]
    assert tokens(before) == tokens(after) == expected
    assert tokens([kept]) == expected[:1]
    assert old.closed
    assert old not in runtime.verifier.steps.readers
    assert len(runtime.verifier.steps.readers) == 1


def test_the_old_and_the_new_drafter_draft_in_one_batch(engines: Path, expected: list[list[int]]) -> None:
    drafters: set[int] = set()
    later: list[Submission] = []
    with Runtime.open(engines, threads=1, max_num_seqs=2, verify=False) as runtime:

        def swap(output: RequestOutput) -> None:
            if not later:
                retrain(engines)
                runtime.reload_drafters()
                later.append(runtime.submit(ASKED[1], PARAMS, WIDE, on_output=note))

        def note(output: RequestOutput) -> None:
            drafters.add(len({one.speculation.drafter for one in runtime._thread.loop.scheduler.slots.running}))

        first = runtime.submit(ASKED[0], PARAMS, WIDE, on_output=swap).result(WAIT)
        both = [first, later[0].result(WAIT)]
    assert tokens(both) == expected
    assert max(drafters) == 2


def damaged(bundle: Path) -> None:
    """Cut a file of the drafter."""
    file = next(bundle.glob("weights/lyanna.safetensors"))
    content = file.read_bytes()[:-4]
    file.unlink()
    file.write_bytes(content)


def other_verifier(bundle: Path) -> None:
    """Change a file of the verifier, consistently."""
    file = bundle / "verifier.batch.onnx"
    content = file.read_bytes() + b"\x00"
    file.unlink()
    file.write_bytes(content)
    rewrite(bundle)


def test_a_bad_bundle_leaves_the_drafters_in_place(
    runtime: Runtime, engines: Path, lyanna_bundle: Path, expected: list[list[int]]
) -> None:
    decode(runtime)
    drafter, device = runtime._speculation.drafter("lyanna"), runtime.verifier.device
    bundle, readers = device.bundle, [*runtime.verifier.steps.readers]
    assert runtime.reload_drafters() == ()
    for break_it, message in (
        (damaged, "expected .* bytes"),
        (other_verifier, "differs .* in more than drafters: verifier.batch.onnx"),
        (shutil.rmtree, "found nothing"),
    ):
        break_it(engines)
        with pytest.raises(BundleError, match=message):
            runtime.reload_drafters()
        shutil.rmtree(engines, ignore_errors=True)
        shutil.copytree(lyanna_bundle, engines)
    assert runtime._speculation.drafter("lyanna") is drafter
    assert (device.bundle, runtime.verifier.steps.readers) == (bundle, readers)
    texts = decode(runtime)
    assert tokens(texts) == expected
    assert all(one.metrics.num_draft_tokens for one in texts)


def test_drafters_come_and_go_and_one_that_does_not_open_leaves_all_in_place(
    several: Path, lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    """Of two changed drafters the second one fails."""
    engines, load = shutil.copytree(several, tmp_path / "engines"), speculation.load_drafter
    with Runtime.open(engines, threads=1, verify=False) as runtime:
        opened = [runtime._speculation.drafter(name) for name in ("trained", "pruned")]
        device, readers = runtime.verifier.device, [*runtime.verifier.steps.readers]
        bundle = device.bundle
        for name in ("trained", "pruned"):
            retrain(engines, name)

        def failing(name: str, *arguments: Any) -> Any:
            if name == "pruned":
                raise OSError("no such file")
            return load(name, *arguments)

        monkeypatch.setattr(speculation, "load_drafter", failing)
        with pytest.raises(RedraftError, match="the new drafters do not open: OSError: no such file"):
            runtime.reload_drafters()
        assert [runtime._speculation.drafter(name) for name in ("trained", "pruned")] == opened
        assert (device.bundle, runtime.verifier.steps.readers) == (bundle, readers)
        assert not runtime._speculation.replaced
        monkeypatch.setattr(speculation, "load_drafter", load)
        shutil.rmtree(engines)
        shutil.copytree(lyanna_bundle, engines)
        assert runtime.reload_drafters() == (*load_manifest(several).drafters, "lyanna")
        assert not runtime.verifier.steps.readers
        assert tokens(decode(runtime)) == expected
        with pytest.raises(UsageError, match="no drafter 'trained'"):
            runtime.generate(ASKED[:1], PARAMS, "trained")


def test_nothing_of_an_old_drafter_is_used_later(runtime: Runtime, engines: Path, expected: list[list[int]]) -> None:
    """A request that was made with it decodes plainly, prefixes keep their rows, and what it taught is forgotten."""
    adaptive = runtime._speculation._adaptive
    runtime.generate(ASKED[:1], PARAMS, SpeculationParams("lyanna", budget=Budget(8, 4, 2), controller="adaptive"))
    runtime.generate(ASKED[:1], PARAMS, "ngram")
    made = runtime.pieces(ASKED[0], PARAMS, WIDE)
    retrain(engines)
    runtime.reload_drafters()
    prefixes = runtime._thread.loop.scheduler.slots._prefixes.values()
    assert prefixes
    assert not [one for one in prefixes if any(part.closed for part in (*one.speculation.drafter.parts, *one.drafting))]
    methods = [key[0] for key, _ in adaptive._methods._records.items()]
    assert "ngram" in methods
    assert not [method for method in methods if "lyanna" in method]
    assert not [call for call, _ in adaptive._costs._calls.items() if call[0] == "lyanna"]
    (plainly,) = runtime.generate(ASKED[:1], PARAMS, "none")
    texts = [made.result(WAIT), plainly, *runtime.generate(ASKED[:1], PARAMS, WIDE)]
    assert tokens(texts) == [expected[0]] * 3
    assert [one.metrics.num_draft_tokens > 0 for one in texts] == [False, False, True]
    assert plainly.cached_tokens > 0
    assert not [one.drafting_error for one in texts if one.drafting_error]


def test_a_gpu_and_a_runtime_without_a_bundle_refuse(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.verifier.device, "step_graphs", True)
    with pytest.raises(UsageError, match="only drafters of a bundle on the host"):
        runtime.reload_drafters()
    with make_runtime() as toy, pytest.raises(UsageError, match="no bundle"):
        toy.reload_drafters()
