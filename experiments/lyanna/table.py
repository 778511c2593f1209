"""Draft vocabularies and forms of token information: bytes, time of a draft and a resampling, and loss against fp32.

`redraft build` makes a bundle for each form. Losses are measured in torch, on text that the verifier writes. The
drafter's hidden states are the same for all; token information and draft vocabulary come from the bundle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from experiments.lyanna.objectives import TableObjective
from experiments.lyanna.parts import KV_LEN, PENDING_COUNT_ROWS, VERIFIED, WARM_UP, times
from experiments.lyanna.text import note
from redraft.bench.environment import environment
from redraft.engines import Bundle, open_bundle
from redraft.errors import UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.methods.lyanna import METHOD, TokenInfo
from redraft.runtime import Runtime
from redraft.runtime.drafters.lyanna import LyannaDrafter
from redraft.train.acceptance import WIDTH, acceptance_of, greedy_rows
from redraft.train.batches import Batch
from redraft.train.drafter_evaluate import open_drafter, read_prompts
from redraft.train.objectives.lyanna import LyannaObjective
from redraft.train.verifier_model import VerifierModel, open_verifier
from redraft.train.writer import continue_greedily

FORMS: tuple[TokenInfo, ...] = get_args(TokenInfo)
REDRAFT = "import sys; from redraft.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Form:
    """A form of the token information of a drafter that is built for its `drafted` most frequent tokens."""

    token_info: TokenInfo
    drafted: int

    def __str__(self) -> str:
        return f"{self.token_info}-{self.drafted}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build, time and compare every form over every draft vocabulary."""
    torch.set_num_threads(options.threads)
    verifier = open_verifier(options.verifier, "cpu")
    sizes = options.vocabularies or (verifier.vocab_size, max(1, verifier.vocab_size // 4))
    forms = [Form(name, size) for size in dict.fromkeys(min(s, verifier.vocab_size) for s in sizes) for name in FORMS]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        bundles = {form: build(form, options, folder) for form in forms}
        found: dict[Form, dict[str, Any]] = {form: {"bytes": table_bytes(bundle)} for form, bundle in bundles.items()}
        for form, values in draft_times(bundles, options.threads, options.turns).items():
            found[form] |= values
        exact, lost = losses(bundles, verifier, options)
        for form, values in lost.items():
            found[form] |= values
    return {
        "environment": environment(options.threads),
        "vocabulary": verifier.vocab_size,
        "fp32": {"bytes": 4 * verifier.vocab_size**2, **exact},
        "forms": [
            {"token_info": form.token_info, "draft_vocabulary": form.drafted, **values}
            for form, values in found.items()
        ],
    }


def build(form: Form, options: argparse.Namespace, folder: Path) -> Bundle:
    """Return the bundle of one form, built unless it is there. Raises UsageError with the build's own message."""
    note(f"building {form}")
    folder.mkdir(parents=True, exist_ok=True)
    recipe, out = folder / f"{form}.toml", folder / str(form)
    recipe.write_text(recipe_text(form, options), encoding="utf-8")
    command = ["build", str(recipe), "--out", str(out), "--eval-text", "none", "--json"]
    built = subprocess.run([sys.executable, "-c", REDRAFT, *command], capture_output=True, text=True)
    if built.returncode:
        reason = next(reversed(built.stderr.strip().splitlines()), "no reason given")
        raise UsageError(f"redraft cannot build {form}: {reason}")
    return open_bundle(out)


def recipe_text(form: Form, options: argparse.Namespace) -> str:
    """Return a build recipe; JSON's strings are TOML's."""
    verifier, drafter = (json.dumps(str(path.resolve())) for path in (options.verifier, options.drafter))
    return (
        f'source = {verifier}\n[build]\nhidden_states = ["last"]\n[build.drafters.{METHOD.id}]\n'
        f'source = {drafter}\nmethod = "{METHOD.id}"\nsteps = {options.chain}\n'
        f'nodes = {options.nodes}\ntoken_info = "{form.token_info}"\ndraft_vocabulary = {form.drafted}\n'
    )


def table_bytes(bundle: Bundle) -> int:
    """Return the bytes of the drafter's tables in the bundle."""
    return bundle.drafter(METHOD.id).record.table_bytes


def draft_times(bundles: Mapping[Form, Bundle], threads: int, turns: int) -> dict[Form, dict[str, Any]]:
    """Return milliseconds of a draft and of a resampling, forms taking turns, each after a verification."""
    note("timing")
    taken: dict[Form, list[tuple[float, float]]] = {form: [] for form in bundles}
    with ExitStack() as stack:
        verifiers = {
            form: stack.enter_context(Runtime.open(bundle.path, threads=threads)).verifier
            for form, bundle in bundles.items()
        }
        verifier = next(iter(verifiers.values()))
        drafters = {
            form: LyannaDrafter.create(verifiers[form], {}, bundle, METHOD.id) for form, bundle in bundles.items()
        }
        for turn in range(WARM_UP + turns):
            for form in list(drafters)[:: -1 if turn % 2 else 1]:
                verifier.measure_ms(1, VERIFIED[-1], KV_LEN)
                pair = drafters[form].measure_ms(PENDING_COUNT_ROWS, KV_LEN)
                if turn >= WARM_UP:
                    taken[form].append(pair)
    return {
        form: {
            name: times(values)
            for name, values in zip(("draft_ms", "resample_ms"), zip(*pairs, strict=True), strict=True)
        }
        for form, pairs in taken.items()
    }


def losses(
    bundles: Mapping[Form, Bundle], verifier: VerifierModel, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[Form, dict[str, Any]]]:
    """Return acceptance in fp32, and by form acceptance and the share of choices equal to the fp32 table's."""
    exact = open_drafter(DrafterCheckpoint.open(options.drafter), verifier)
    assert isinstance(exact, LyannaObjective)
    texts = written(verifier, read_prompts(options.prompts, options.limit), options.new_tokens, exact.lookahead)
    if not texts:
        raise UsageError("no prompt leaves a text to measure on", "give more prompts, or a higher --limit")
    lost = {}
    for form, bundle in bundles.items():
        note(f"choices of {form}")
        stored = TableObjective(exact, bundle.tables(METHOD.id))
        lost[form] = {**same_choices(exact, stored, texts), "acceptance": asdict(acceptance_of(stored, texts))}
    return {"acceptance": asdict(acceptance_of(exact, texts)), "texts": len(texts)}, lost


def written(
    verifier: VerifierModel, prompts: Mapping[str, Sequence[str]], new_tokens: int, lookahead: int
) -> list[Batch]:
    """Return the verifier's greedy texts after prompts, one a batch; drafts begin at a prompt's last token."""
    limit = getattr(verifier.config, "max_position_embeddings", None) or sys.maxsize
    ids = [found.ids for texts in prompts.values() for found in verifier.tokenizer.encode_batch(list(texts))]
    ids = [prompt for prompt in ids if prompt and len(prompt) + new_tokens <= limit]
    rows = continue_greedily(verifier.model, ids, new_tokens, verifier.ends)
    return [
        batch
        for prompt, row in zip(ids, rows, strict=True)
        if len(row) >= len(prompt) + lookahead
        for batch in greedy_rows(np.array([row]), len(prompt) - 1, lookahead)
    ]


@torch.inference_mode()
def same_choices(exact: LyannaObjective, stored: LyannaObjective, texts: Iterable[Batch]) -> dict[str, float]:
    """Return shares over all depths: equal likeliest tokens, and equal members of the WIDTH likeliest."""
    likeliest, members, count = 0, 0, 0
    for batch in texts:
        states = exact.states(batch)
        for pair in zip(exact.drafts(batch, states), stored.drafts(batch, states), strict=True):
            best, here = (
                one.vocabulary.tokens_of(logits.topk(WIDTH).indices)
                for one, logits in zip((exact, stored), pair, strict=True)
            )  # [1, S, WIDTH]
            likeliest += int((best[..., 0] == here[..., 0]).sum())
            members += int((best[..., None] == here[..., None, :]).any(-1).sum())
            count += best[..., 0].numel()
    return {"same_likeliest": likeliest / max(count, 1), "same_of_widest": members / max(WIDTH * count, 1)}


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return a line for each form, with acceptance as a mean over depths next to that of fp32."""
    exact = result["fp32"]["acceptance"]
    means = [float(np.mean(exact[rule])) for rule in ("top", "wide")]
    rows = [
        ["form", "H", "bytes", "draft ms", "least", "resample ms", "least", "same likeliest", f"same of {WIDTH}",
         "acceptance", "less fp32", f"within {WIDTH}", "less fp32"],
        ["fp32", str(result["vocabulary"]), str(result["fp32"]["bytes"]), *["-"] * 4, "100 %", "100 %",
         f"{100 * means[0]:.2f} %", "-", f"{100 * means[1]:.2f} %", "-"],
    ]  # fmt: skip
    for form in result["forms"]:
        spent = [f"{form[name][kind]:.4f}" for name in ("draft_ms", "resample_ms") for kind in ("median", "least")]
        same = [f"{100 * form[name]:.2f} %" for name in ("same_likeliest", "same_of_widest")]
        kept = [
            cell
            for rule, mean in zip(("top", "wide"), means, strict=True)
            for cell in _pair(float(np.mean(form["acceptance"][rule])), mean)
        ]
        rows.append([form["token_info"], str(form["draft_vocabulary"]), str(form["bytes"]), *spent, *same, *kept])
    depths, texts = len(exact["top"]), result["fp32"]["texts"]
    return {f"token information over {texts} texts; acceptance is the mean over {depths} steps": rows}


def _pair(share: float, against: float) -> list[str]:
    return [f"{100 * share:.2f} %", f"{100 * (share - against):+.2f}"]
