"""Bundles of a random Llama and random drafters, with so few tokens that wide trees are sometimes correct.

Also the prompts, requests and budgets of the tests that use them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from redraft.assembly.bundle import build_bundle
from redraft.assembly.models import Model
from redraft.assembly.options import parse_precisions
from redraft.config import BuildConfig, DrafterBuild
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.runtime import Budget, Runtime, SamplingParams
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.drafters.lyanna import LyannaDrafter
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.noise import NO_NOISE, DraftNoise
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.steps.verifier import PREFILL_CHUNK, Verifier
from redraft.runtime.trees.offers import Speculation
from redraft.types import OfferKind
from tests.cli.conftest import write_tokenizer
from tests.engines.drafters import lyanna_build
from tests.export.drafters.tiny import CONFIG, write_drafter, write_verifier

from .drafts import Scripted

VOCABULARY, CONTEXT, STEPS, WIDTH = 13, 96, 4, 3
SCALE = 1.25
"""The drafter's draft logit scale."""
DRAFT_VOCABULARY = 8
"""Tokens of the drafters `trained` and `pruned`."""
FULL = Budget(nodes=30, depth=STEPS, width=9)
PARAMS = SamplingParams(max_tokens=40)


def prompts(count: int, seed: int, longest: int = 80) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


PROMPTS = [*prompts(6, seed=1), [5] * 80, [3, 4] * 35]
ALL = [*PROMPTS, [3, 4, 5, 6, 7] * 12 + [8], [9, 3] * 40, [4] * 66]
"""Some are longer than one call of the drafter."""


def request(prompt: list[int], noise: DraftNoise = NO_NOISE) -> Request:
    return Request(list(prompt), len(prompt), CONTEXT, frozenset(), Greedy(), noise=noise)


def lyanna_of(runtime: Runtime, name: str = "lyanna") -> LyannaDrafter:
    drafter = runtime._speculation.drafter(name)
    assert isinstance(drafter, LyannaDrafter)
    return drafter


def admitted(
    runtime: Runtime, requests: list[Request], scripts: dict[int, list[OfferKind]] | None = None, name: str = "lyanna"
) -> tuple[DecodeLoop, list[Request]]:
    """Return a loop and its running requests, whose prompts are computed. Without scripts, all steps are plain."""
    controller = Scripted(FULL, scripts or {id(seq): [] for seq in requests})
    loop = DecodeLoop(runtime.verifier, Speculation(lyanna_of(runtime, name), controller))
    for seq in requests:
        admit(loop, seq)
    return loop, loop.scheduler.slots.running


def admit(loop: DecodeLoop, seq: Request) -> None:
    """Compute the prompt of a request, and let it run."""
    loop.add(seq)
    slots = loop.scheduler.slots
    slots.admit(loop.scheduler._waiting.pop())
    fill(loop.verifier, seq, seq.speculation.drafter)
    assert slots.join(seq)


def fill(verifier: Verifier, seq: Request, drafter: Drafter | None = None) -> None:
    """Compute all rows of a request but the root's in its slot."""
    while rows := min(seq.missing_rows, PREFILL_CHUNK):
        verifier.compute(seq, seq.num_computed_tokens, rows)
        if drafter is not None:
            drafter.prefilled(seq, seq.slot, seq.num_computed_tokens, rows)
        seq.num_computed_tokens += rows


def write_lyanna_bundle(folder: Path, precision: str = "fp32") -> Path:
    """Build `folder`/engines from a checkpoint and a drafter in fp32, so that every verified step counts.

    precision: as the command line takes it.
    """
    checkpoint = _verifier(folder)
    drafter = write_drafter(folder / "drafter", checkpoint, _CONFIG)
    return _build(folder, checkpoint, lyanna_build(str(drafter), precision="fp32", width=WIDTH), precision=precision)


def write_several(folder: Path) -> Path:
    """Build `folder`/engines with several drafters: MTP, and Lyanna `trained` on few tokens or `pruned` to few."""
    checkpoint = _verifier(folder)
    few = write_drafter(folder / "trained", checkpoint, replace(_CONFIG, draft_vocab_size=DRAFT_VOCABULARY))
    whole = write_drafter(folder / "pruned", checkpoint, _CONFIG)
    lowrank = {"precision": "fp32", "width": WIDTH, "token_info": "lowrank"}
    return _build(
        folder,
        checkpoint,
        DrafterBuild("mtp", "random", "mtp", {"precision": "fp32", "steps": 3}),
        DrafterBuild("trained", str(few), "lyanna", lowrank),
        DrafterBuild("pruned", str(whole), "lyanna", {**lowrank, "draft_vocabulary": DRAFT_VOCABULARY}),
    )


_CONFIG = replace(CONFIG, vocab_size=VOCABULARY, steps=STEPS, draft_logit_scale=SCALE, logit_scale=1.0)


def _verifier(folder: Path) -> Checkpoint:
    checkpoint = write_verifier(folder / "verifier", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    write_tokenizer(folder / "verifier")
    return Checkpoint.open(checkpoint.path)


def _build(folder: Path, checkpoint: Checkpoint, *drafters: DrafterBuild, precision: str = "fp32") -> Path:
    model = Model("little", str(checkpoint.path), checkpoint.path)
    (option,) = parse_precisions(precision)
    config = BuildConfig(precision=option.precision, kv=option.kv, drafters=drafters)
    build_bundle(model, config, folder / "engines", {}, False, lambda message: None)
    return folder / "engines"
