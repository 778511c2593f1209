"""The host's time of a step on a device: the runtime over stand-ins of CUDA and TensorRT with idle engines.

    python -m experiments.host_time --engines build/engines/tiny --prompts assets/tiny/prompts/*.jsonl \\
        [--methods none,ngram,ngram+ID] [--out host.json]

Needs no GPU. The runtime drives TensorRT's engines, with a step as one CUDA graph. The stand-ins are those of the
tests, and their time is left out. `Script` writes the tokens that a step accepts: the prompt's own text continues, and
drafted tokens are kept as if they were right. The controller weighs a 7B verifier's costs, so that it nearly always
drafts.

`us` of a step is its time without calls of CUDA: `median`, and the upper limit of nine steps in ten. `after_launch_us`
is its part between the draft's launch and the verification's; a GPU that still drafts does not wait for it. The time of
CUDA's own calls comes on top: `launches` a step.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from inspect import ismethod
from pathlib import Path
from typing import Any

import numpy as np
from tests.standins.cuda import FakeCuda
from tests.standins.tensorrt import FakeTensorRt, write_idle_engine

from redraft import names
from redraft.bench.command import Report, budget, bundle_parser, run
from redraft.bench.environment import environment
from redraft.bench.prompts import load_prompts
from redraft.engines import Bundle, open_bundle
from redraft.engines.cuda import Cuda
from redraft.engines.device import Array
from redraft.engines.tensorrt_device import TensorRtDevice
from redraft.errors import UsageError
from redraft.methods import NGRAM, NONE
from redraft.runtime import scheduler
from redraft.runtime.adaptive import Adaptive
from redraft.runtime.controller import FixedBudget
from redraft.runtime.cost import CostCurve, VerifyCosts
from redraft.runtime.cycle import Cycle
from redraft.runtime.drafters import Drafter, load_drafter, method_words, split_pair
from redraft.runtime.drafters.base import Pair
from redraft.runtime.offers import Speculation
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.tokenizer import Tokenizer
from redraft.runtime.verifier import Verifier, open_verifier
from redraft.types import NO_SPECULATION, Budget, Costs

CURVE = CostCurve.from_points({1: 4.0, 16: 4.2, 64: 5.0})
COSTS = Costs(fresh_ms=0.3, resample_ms=0.05)
WHOLE = Budget(12, 12, 12)
"""It limits only the nodes of a drafter's tree, so the tree stays on the device."""
MEMORY_BYTES = 1 << 37
PROMPT_TOKENS = 40
"""Tokens of each text that are the prompt; the verifier writes the rest."""
ACCEPTED = (0, 0, 1, 1, 2, 3)
"""Drafted tokens that a step keeps, each equally often, as far as its tree allows."""


class Script:
    """Stand-in for the verifier's tokens, one sequence at a time: a text, with a random number of tokens a step."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._text: Sequence[int] = (0,)
        self._at = 0

    def begin(self, text: Sequence[int], at: int) -> None:
        """Continue with the text's tokens from `at` on, and from its beginning after its last."""
        self._text, self._at = text, at

    def accept(self, accepted: Array) -> None:
        """Write the accepted tokens, int64[1 + 2 T] of a tree that was padded to T nodes.

        Such a tree has more nodes than the next smaller width.
        """
        width = (len(accepted) - 1) // 2
        narrower = names.TREE_WIDTHS[bisect_left(names.TREE_WIDTHS, width) - 1] if width > 1 else 0
        kept = min(self._random.choice(ACCEPTED), narrower)
        accepted[0] = 1 + kept
        for node in range(kept + 1):
            accepted[1 + node] = node
            accepted[1 + width + node] = self._text[(self._at + node) % len(self._text)]
        self._at += kept + 1


class TimedCuda(FakeCuda):
    """Adds up the seconds of all its calls in `spent`, for checks, copies and engines: they are not the host's."""

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self.spent = 0.0
        for name in dir(self):
            if name.startswith("cuda") and ismethod(call := getattr(self, name)):
                setattr(self, name, partial(self._timed, call))

    def _timed(self, call: Callable[..., Any], *given: Any) -> Any:
        began = time.perf_counter()
        answer = call(*given)
        self.spent += time.perf_counter() - began
        return answer


class TimedCycle(Cycle):
    """Keeps figures of each step: time without CUDA, time between the first and last launch, number of launches."""

    def __init__(self, cuda: TimedCuda, *parts: Any) -> None:
        super().__init__(*parts)
        self.steps: list[tuple[float, float, int]] = []
        self._cuda = cuda

    def step(self, batch: Sequence[Request]) -> None:
        """See `Cycle.step`."""
        cuda = self._cuda
        cuda.spent = 0.0
        cuda.launched.clear()
        began = time.perf_counter()
        super().step(batch)
        taken = time.perf_counter() - began - cuda.spent
        launched = cuda.launched
        self.steps.append((taken, launched[-1] - launched[0] if launched else 0.0, len(launched)))


def main() -> dict[str, Any]:
    """Take the measurements that the options ask for."""
    options = _arguments()
    return Report(options.out).fill(lambda report: measure_all(options, report))


def measure_all(options: argparse.Namespace, report: Report) -> None:
    """Report a section for each method, with a fixed budget and with sizes that the controller chooses."""
    bundle = open_bundle(options.engines, verify=False)
    report.put("bundle", bundle.manifest.name)
    report.put("environment", environment())
    with tempfile.TemporaryDirectory(prefix="redraft-") as folder:
        text = Tokenizer.load(bundle.path, bundle.manifest.bos_token_id, None)
        texts = [text.encode(prompt.text) for prompt in load_prompts(options.prompts, options.limit)]
        for method in options.methods.split(",") if options.methods else method_words(bundle.manifest.drafters):
            for name, size in {"fixed": options.budget, "adaptive": None}.items():
                if method != NONE or size:
                    key = method if method == NONE else f"{method} {name}"
                    report.put(key, measure(bundle, Path(folder), method, size, texts, options.max_new_tokens))


def measure(
    bundle: Bundle, folder: Path, method: str, size: Budget | None, texts: Sequence[list[int]], tokens: int
) -> dict[str, Any]:
    """Return the steps of a method over the texts, decoded twice; the second time counts.

    size: size of every tree; None is adaptive.
    """
    script = Script()
    device, cuda = idle_device(bundle, folder, script)
    manifest = bundle.manifest
    verifier = open_verifier(bundle, device)
    cycle = _cycle(cuda, verifier, bundle, method, size)
    gc.collect()
    gc.freeze()  # like the commands after they open a bundle
    for turn in range(2):
        if turn:
            cycle.steps.clear()
        for ids in texts:
            prompt = ids[:PROMPT_TOKENS]
            script.begin(ids, len(prompt))
            limit = min(len(prompt) + tokens, manifest.max_model_len)
            request = Request(list(prompt), len(prompt), limit, frozenset(), Greedy())
            for _ in scheduler.run(cycle, [request]):
                pass
    verifier.close()
    if not cycle.steps:
        raise UsageError("no step was run", "give prompts, and more new tokens")
    us = np.array([taken for taken, _, _ in cycle.steps]) * 1e6
    return {
        "steps": len(us),
        "us": {"median": float(np.median(us)), "ninth_tenth": float(np.quantile(us, 0.9))},
        "after_launch_us": float(np.median([between for _, between, _ in cycle.steps])) * 1e6,
        "launches": float(np.mean([launches for _, _, launches in cycle.steps])),
    }


def idle_device(bundle: Bundle, folder: Path, script: Script) -> tuple[TensorRtDevice, TimedCuda]:
    """Return a device with idle engines, one for every graph of the bundle. Writes to `folder`.

    Its memory begins with zeros: a tree that is read before anything was drafted is children of the root.
    """
    engines = {graph: write_idle_engine(folder / graph, bundle.graph(graph)) for graph in bundle.manifest.all_graphs}
    cuda = TimedCuda(MEMORY_BYTES, fill=0)
    return TensorRtDevice(bundle, engines, Cuda(cuda), FakeTensorRt(cuda, script.accept)), cuda


def _cycle(cuda: TimedCuda, verifier: Verifier, bundle: Bundle, method: str, size: Budget | None) -> TimedCycle:
    """Make a cycle like `Runtime`, but without measuring."""

    def drafter_of(name: str) -> Drafter:
        return load_drafter(name, verifier, {}, bundle)

    name, paired = split_pair(method)
    drafter = drafter_of(name)
    if paired and size is None:
        drafter = Pair(drafter_of(NGRAM), drafter)
    verifier.warm()
    if method == NONE:
        return TimedCycle(cuda, verifier, Speculation(drafter, FixedBudget(NO_SPECULATION), method))
    if size is not None:
        return TimedCycle(cuda, verifier, Speculation(drafter, FixedBudget(size), method))
    adaptive = Adaptive(VerifyCosts.of(CURVE))
    adaptive.expect(name, COSTS)
    return TimedCycle(cuda, verifier, Speculation(drafter, adaptive, method))


def _arguments() -> argparse.Namespace:
    parser = bundle_parser(__doc__, 60, 8)
    parser.add_argument("--methods", help="all that the bundle knows by default")
    parser.add_argument("--budget", type=budget, default=WHOLE, help="nodes=12,depth=12,width=12 by default")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
