"""A drafter's training from a verifier and documents to a finished run folder.

run.json             method, configuration, verifier and data digests (RunFacts)
data.json            for every kind: documents, tokens of every stream, names of the held-out documents
texts/               token streams and rows that the verifier wrote
token_counts.npy     int64 [V], over all streams
progress.jsonl       step, losses, held-out acceptance and draft logit scale, a line each measurement
checkpoint.pt        the loop's checkpoint
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from redraft.errors import TrainingError, UsageError
from redraft.export.drafters.checkpoint import Identity
from redraft.export.drafters.layer import LayerConfig
from redraft.records import from_plain
from redraft.train.batches import BatchPlan
from redraft.train.data import Corpus
from redraft.train.drafter_config import DrafterRecipe, stream_name
from redraft.train.drafter_log import DrafterLog
from redraft.train.loop import train
from redraft.train.method import DrafterObjective, Method
from redraft.train.objectives import find_method
from redraft.train.progress import ProgressReport
from redraft.train.run import DATA, data_digest, facts_of, load_corpora, refuse_run
from redraft.train.text_store import SELF, Array, TextStore, token_counts
from redraft.train.verifier_model import VerifierModel, check_device, open_verifier

RUN = "run.json"
TEXTS = "texts"
COUNTS = "token_counts.npy"
PROGRESS = "progress.jsonl"


@dataclass(frozen=True)
class RunFacts:
    """The verifier, data and settings that a run belongs to.

    config: the drafter's configuration.   data: digest of the documents.   texts: settings of the written texts.
    """

    method: str
    config: dict[str, Any]
    verifier: Identity
    data: str
    texts: dict[str, Any]

    @classmethod
    def read(cls, run: Path) -> RunFacts | None:
        """Return the facts in a run folder, or None if it has none."""
        try:
            return from_plain(cls, json.loads((run / RUN).read_text(encoding="utf-8")), RUN)
        except FileNotFoundError:
            return None
        except (ValueError, UsageError) as error:
            raise TrainingError(f"{run / RUN} is damaged ({error})", "give another --out") from None

    def write(self, run: Path) -> None:
        """Write the facts as a whole file or not at all."""
        unfinished = run / f"{RUN}.tmp"
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(run / RUN)

    def digest(self) -> str:
        """Names verifier and data in the run's checkpoints."""
        return hashlib.sha256(json.dumps([asdict(self.verifier), self.data]).encode()).hexdigest()

    def check_same(self, run: Path) -> None:
        """Raise TrainingError if the run folder has another verifier or texts of another recipe."""
        before = RunFacts.read(run)
        if before is None:
            raise TrainingError(f"{run} has no drafter's run to resume", "start without --resume")
        if before.verifier != self.verifier:
            raise TrainingError(
                f"the run in {run} has another verifier: expected {_short(before.verifier)}, found "
                f"{_short(self.verifier)}",
                "give the same --verifier as before",
            )
        for name, value in self.texts.items():
            if before.texts.get(name) != value:
                raise TrainingError(
                    f"the run in {run} has another recipe: {name} was {before.texts.get(name)!r}, it is {value!r}",
                    "resume with the recipe that started it",
                )


def train_drafter(
    method_name: str,
    verifier: Path,
    sources: Mapping[str, str],
    out: Path,
    recipe: DrafterRecipe,
    *,
    device: str = "cpu",
    compile_graph: bool = False,
    resume: bool = False,
    checkpoint_every: int = 100,
    report: ProgressReport | None = None,
) -> int:
    """Train, or continue training, in the run folder `out`. Returns the number of steps run now.

    Texts are written first. A run that was interrupted at its start uses its texts again. Raises UsageError, DataError,
    CheckpointError, UnsupportedModelError or TrainingError, each naming the problem.
    """
    check_device(device)
    if not resume:
        refuse_run(out)
    method = find_method(method_name)
    report = report or ProgressReport(Console(quiet=True))
    recipe = _with_weights(recipe, sources)
    corpora = load_corpora(sources, recipe) if sources else {}
    found = open_verifier(verifier, device)
    config = method.configure(recipe, found)
    facts = RunFacts(method_name, asdict(config), found.identity, data_digest(corpora), _texts(recipe))
    _begin(out, facts, resume)
    objective = _objective(method, config, recipe, found, compile_graph)
    objective.to(device)
    store = TextStore(out / TEXTS, found, recipe, corpora, report.writing)
    streams, held_out = store.streams(objective.lookahead), store.held_out()
    _note_data(out, corpora, streams, recipe, found.vocab_size)
    recipe = recipe.for_data(sum(map(len, streams.values())))
    plan = BatchPlan(streams, recipe.stream_weights(), recipe.seed, objective.lookahead)
    log = DrafterLog(out / PROGRESS, objective, held_out, recipe, report)
    ran = train(
        objective, plan, recipe, out, identity=facts.digest(), resume=resume, checkpoint_every=checkpoint_every,
        report=log,
    )  # fmt: skip
    log.finish(recipe.steps)
    return ran


def _with_weights(recipe: DrafterRecipe, sources: Mapping[str, str]) -> DrafterRecipe:
    """Return the recipe with a weight for every kind, if it has none."""
    if not recipe.weights:
        return replace(recipe, weights=dict.fromkeys(sorted(sources) or [SELF], 1.0))
    if not sources and set(recipe.weights) != {SELF}:
        raise UsageError(
            f"no --data, and the recipe has weights for {sorted(recipe.weights)}",
            "give one --data KIND=SOURCE for each",
        )
    return recipe


def _texts(recipe: DrafterRecipe) -> dict[str, Any]:
    values = recipe.to_dict()
    plain = {name: values[name] for name in ("self_text", "seed", "held_out_every")} | {"kinds": sorted(recipe.weights)}
    found: dict[str, Any] = json.loads(json.dumps(plain))
    return found


def _begin(out: Path, facts: RunFacts, resume: bool) -> None:
    """Make the folder this run's. Drops the texts of another run that wrote no checkpoint."""
    if resume:
        facts.check_same(out)
    elif RunFacts.read(out) != facts:
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(out / TEXTS, ignore_errors=True)
        facts.write(out)


def _check_positions(recipe: DrafterRecipe, lookahead: int, verifier: VerifierModel) -> None:
    limit = getattr(verifier.config, "max_position_embeddings", None)
    text = recipe.self_text.prompt_tokens + recipe.self_text.new_tokens
    rows = max(recipe.seq_len, recipe.decay_seq_len) + lookahead
    if limit and max(text, rows) > limit:
        raise UsageError(
            f"rows of {rows} tokens (with {lookahead} to predict) and texts of {text} must fit the verifier's "
            f"{limit} positions",
            "lower seq_len, or self_text.prompt_tokens and new_tokens",
        )


def _objective(
    method: Method, config: LayerConfig, recipe: DrafterRecipe, verifier: VerifierModel, compile_graph: bool
) -> DrafterObjective:
    """Return the method's loss with a fresh drafter, initialised by the recipe's seed or from the verifier."""
    torch.manual_seed(recipe.seed)
    objective = method.objective(verifier.model, config, recipe, compile_graph)
    _check_positions(recipe, objective.lookahead, verifier)
    if recipe.drafter.init == "mtp":
        method.warm_start(objective.drafter, verifier)
    return objective


def _note_data(
    out: Path, corpora: Mapping[str, Corpus], streams: Mapping[str, Array], recipe: DrafterRecipe, vocab_size: int
) -> None:
    """Write data.json and the token counts."""
    facts: dict[str, Any] = {}
    for kind in recipe.weights:
        tokens = {
            source: len(streams[stream_name(kind, source)])
            for source in recipe.self_text.shares()
        }  # fmt: skip
        documents = facts_of(corpora[kind], tokens.get("text", 0)) if kind in corpora else {}
        facts[kind] = {**documents, "tokens": tokens}
    (out / DATA).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    np.save(out / COUNTS, token_counts(streams, vocab_size))


def _short(identity: Identity) -> str:
    return f"weights {' '.join(d[:12] for d in identity.weights)} tokenizer {identity.tokenizer[:12]}"
