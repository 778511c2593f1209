"""Several drafters of one verifier under one protocol: the same texts, order, start, vocabulary and number of tokens.

A comparison's folder has the texts, a run's folder for each drafter and seed, and results.json. An interrupted
comparison continues where it stopped; finished runs are not repeated.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from redraft.errors import TrainingError, UsageError
from redraft.export.drafters.checkpoint import Identity
from redraft.export.gguf.checkpoint import open_checkpoint
from redraft.files import write_json
from redraft.records import from_plain
from redraft.train.compare_results import Result, is_finished, result_of
from redraft.train.config import read_recipe
from redraft.train.data import data_digest, load_corpora
from redraft.train.document_text import with_weights
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.drafter_run import TEXTS, train_drafter
from redraft.train.loop import CHECKPOINT
from redraft.train.objectives import find_training
from redraft.train.progress import ProgressReport
from redraft.train.text_batches import WrittenText

FACTS, RESULTS = "compare.json", "results.json"


@dataclass(frozen=True)
class RunTable:
    """One drafter of a comparison.

    drafter:  settings of its recipe's table that are not the method's own.   lr: its rate, if not the recipe's.
    schedule: its recipe, if not the comparison's.   start: an earlier run whose weights it begins with.
    decoded_by: the method that decodes with its drafter, if it is another one.   build: options of its build.
    """

    method: str
    drafter: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.0
    schedule: str = ""
    start: str = ""
    decoded_by: str = ""
    build: str = ""


@dataclass(frozen=True)
class ReportTable:
    """A table of a comparison's report: its runs, of which the first is the one to compare with.

    curve: True if the runs differ in a number that grows by one, so that a picture shows them as a line.
    progress: True if a picture shows what each run reaches by training step.
    """

    runs: tuple[str, ...]
    curve: bool = False
    progress: bool = False


@dataclass(frozen=True)
class CompareRecipe:
    """A comparison.

    schedule: recipe of all runs.   steps: instead of the schedule's; 0 keeps them.   seeds: of every run.
    drafter:  settings of every run's table.   runs: by name.   tables: of a report, by title.
    rates:    learning rates to try for each run (`redraft.bench.family`).
    """

    runs: Mapping[str, RunTable]
    schedule: str = "features"
    steps: int = 0
    seeds: tuple[int, ...] = (0,)
    drafter: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, ReportTable] = field(default_factory=dict)
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for title, table in self.tables.items():
            if missing := [name for name in table.runs if name not in self.runs]:
                raise UsageError(f"the table {title!r} names a run that the comparison does not have: {missing[0]!r}")
        if not self.runs or not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError("a comparison needs runs, and seeds that are all different")
        if self.steps < 0:
            raise UsageError(f"steps must be 0 or more, not {self.steps}")
        if min((*self.rates, 1.0)) <= 0 or len(set(self.rates)) < len(self.rates):
            raise UsageError(f"rates must be positive and all different, not {list(self.rates)}")
        before = {""}
        for name, run in self.runs.items():
            if not name or "/" in name or name.startswith("."):
                raise UsageError(f"{name!r} cannot be the name of a run's folder")
            if run.start not in before:
                raise UsageError(
                    f"the run {name!r} cannot start from {run.start!r}", "name a run that the comparison has before it"
                )
            before.add(name)

    @classmethod
    def load(cls, name_or_path: str) -> Self:
        """Read a TOML recipe. Raises UsageError for an unknown key, method or setting."""
        values, source = read_recipe(name_or_path)
        found = from_plain(cls, values, source)
        for name in found.runs:
            found.recipe_of(name, found.seeds[0])
        return found

    def recipe_of(self, name: str, seed: int) -> DrafterRecipe:
        """Return the recipe of a run."""
        run = self.runs[name]
        schedule = run.schedule or self.schedule
        values, source = read_recipe(schedule)
        table = {**values.get("drafter", {}), **self.drafter, **run.drafter}
        recipe: DrafterRecipe = find_training(run.method).recipe.from_dict({**values, "drafter": table}, source)
        if recipe.method != run.method:
            raise UsageError(f"the schedule {schedule} is for {recipe.method}, not {run.method}")
        if run.lr and recipe.optimizer == "muon":
            raise UsageError(f"the run {name!r} has a rate, but its schedule's optimizer, muon, has rates of its own")
        return replace(recipe.with_options(self.steps or None, seed), lr=run.lr or recipe.lr)

    def at_every_rate(self) -> CompareRecipe:
        """Return the comparison of each run at each of the rates, on the first seed."""
        if started := [name for name, run in self.runs.items() if run.start]:
            raise UsageError(f"the run {started[0]!r} starts from another one, so it cannot have a rate of its own")
        runs = {_at(name, lr): replace(run, lr=lr) for name, run in self.runs.items() for lr in self.rates}
        return replace(self, runs=runs, seeds=self.seeds[:1], tables={})

    def at_best_rates(self, results: Sequence[Result]) -> CompareRecipe:
        """Return the comparison of each run at its best rate, by the tokens of chains in results of `at_every_rate`."""
        tokens = {result.name: result.mean_tokens for result in results if result.seed == self.seeds[0]}
        best = {name: max(self.rates, key=lambda lr: tokens[_at(name, lr)]) for name in self.runs}
        return replace(
            self,
            runs={_at(name, best[name]): replace(run, lr=best[name]) for name, run in self.runs.items()},
            tables={},
        )

    def texts_of(self, name: str) -> str:
        """Return the folder of the texts that the verifier writes for a run: one for all runs with equal settings."""
        first, *_ = self.runs
        settings = {run: self.recipe_of(run, self.seeds[0]).self_text for run in self.runs}
        writer = next(run for run in self.runs if settings[run] == settings[name])
        return TEXTS if writer == first else f"{TEXTS}.{writer}"


def _at(name: str, lr: float) -> str:
    return f"{name} at {lr:g}"


def train_all(  # noqa: PLR0913 - facts of a comparison
    recipe: CompareRecipe,
    verifier: Path,
    sources: Mapping[str, str],
    out: Path,
    *,
    texts: Path | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    checkpoint_every: int = 100,
    report: ProgressReport | None = None,
    begun: Callable[[str, int], None] = lambda name, seed: None,
) -> list[Result]:
    """Run every run of a comparison that is not finished. Returns their results; results.json has all of the folder.

    sources, texts: see `train_drafter`.   begun: called with a run's name and seed.
    Raises TrainingError if the folder has another comparison, and as `train_drafter`.
    """
    everything = _check_same(recipe, out, _facts(recipe, verifier, sources, texts))
    known: dict[tuple[str, int], Result] = {}
    results = []
    for seed in recipe.seeds:
        for name, run in recipe.runs.items():
            folder, own = _folder(out, name, seed), recipe.recipe_of(name, seed)
            if not is_finished(folder):
                begun(name, seed)
                train_drafter(
                    run.method, verifier, sources, folder, own, texts=texts, kept=out / recipe.texts_of(name),
                    start=_folder(out, run.start, seed) if run.start else None, device=device,
                    dtype=dtype, resume=(folder / CHECKPOINT).exists(), checkpoint_every=checkpoint_every,
                    report=report,
                )  # fmt: skip
            _note_results(out, everything, known)
            results.append(known[name, seed])
    return results


def _folder(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}.{seed}"


def _note_results(out: Path, methods: Mapping[str, str], known: dict[tuple[str, int], Result]) -> None:
    """Write the results of all finished runs of the folder: by seed, then in the order of `methods`.

    known: results that were read before, to which those of other runs are added.
    """
    for name, method in methods.items():
        for path in out.glob(f"{glob.escape(name)}.*"):
            seed = path.suffix[1:]
            if seed.isdecimal() and (name, int(seed)) not in known and is_finished(path):
                known[name, int(seed)] = result_of(name, int(seed), method, path)
    order = list(methods)
    results = sorted(known.values(), key=lambda one: (one.seed, order.index(one.name)))
    write_json(out / RESULTS, [one.to_dict() for one in results])


def _facts(recipe: CompareRecipe, verifier: Path, sources: Mapping[str, str], texts: Path | None) -> dict[str, Any]:
    """Return what a comparison is, by contents: digests of verifier and documents, and the recipe of every run."""
    recipes = {name: recipe.recipe_of(name, recipe.seeds[0]) for name in recipe.runs}
    schedule = next(iter(recipes.values()))
    if texts is not None:
        documents = WrittenText(texts, replace(schedule, answers="all"), ()).digest
    else:
        documents = data_digest(load_corpora(sources, with_weights(schedule, sources)) if sources else {})
    return {
        "verifier": verifier.name,
        "schedule": Path(recipe.schedule).name,
        "digests": {"verifier": asdict(Identity.of(open_checkpoint(verifier))), "documents": documents},
        "recipes": {
            name: {key: value for key, value in one.to_dict().items() if key != "seed"} for name, one in recipes.items()
        },
    }


def _check_same(recipe: CompareRecipe, out: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """Note the comparison in its folder. Returns the methods of all its runs by name.

    More runs and seeds may be added; the others must stay as they were.
    facts: of `_facts`.
    """
    path, now = out / FACTS, json.loads(json.dumps({**asdict(recipe), **facts}))
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        try:
            changed = [name for name in ("verifier", "documents") if before["digests"][name] != now["digests"][name]]
            same = {name: run for name, run in before["recipes"].items() if name in now["recipes"]}
            changed += [f"recipe of {name}" for name, run in same.items() if _filled(run) != now["recipes"][name]]
            for key in ("runs", "recipes"):
                now[key] = {**before[key], **now[key]}
        except (KeyError, TypeError, UsageError):
            raise TrainingError(f"{path} is damaged or of another version", "give another --out") from None
        if changed:
            raise TrainingError(f"{out} has a comparison that differs in its {changed[0]}", "give another --out")
        now["tables"] = now["tables"] or before.get("tables", {})
    write_json(path, now)
    return {name: run["method"] for name, run in now["runs"].items()}


def _filled(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's recipe with defaults for fields that it did not have when it was noted."""
    values = find_training(recipe["method"]).recipe.from_dict(recipe).to_dict()
    found: dict[str, Any] = json.loads(json.dumps({key: value for key, value in values.items() if key != "seed"}))
    return found


def chosen(recipe: CompareRecipe, names: Sequence[str], seeds: Sequence[int]) -> CompareRecipe:
    """Return the recipe with these runs, those that they start from, and seeds alone; none means all.

    Raises UsageError for an unknown run.
    """
    if unknown := [name for name in names if name not in recipe.runs]:
        raise UsageError(f"the comparison has no run {unknown[0]!r}", f"its runs are {'; '.join(recipe.runs)}")
    wanted = set(names or recipe.runs)
    for name, run in reversed(list(recipe.runs.items())):  # a run starts from an earlier one
        if name in wanted and run.start:
            wanted.add(run.start)
    runs = {name: run for name, run in recipe.runs.items() if name in wanted}
    return replace(recipe, runs=runs, seeds=tuple(seeds) or recipe.seeds, tables={} if names else recipe.tables)
