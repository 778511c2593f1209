"""The facts of a drafter's run, and a trained drafter as a torch module: of a run's last checkpoint or published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from redraft.errors import CheckpointError, TrainingError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.layer import DrafterConfig
from redraft.files import write_json
from redraft.records import from_plain
from redraft.train.batches import Batch
from redraft.train.loop import load_checkpoint
from redraft.train.objectives import find_training
from redraft.train.training import Training
from redraft.train.verifier_model import VerifierModel

RUN = "run.json"
_PREFIX = "drafter."
_OWN = frozenset({"draft_vocab_size", "hidden_states"})
"""Fields in which a drafter may differ from the one that it begins with."""
_STEERING = frozenset({"steering", "steering_norm"})
"""Such fields if one of the two has no steering."""


@dataclass(frozen=True)
class RunFacts:
    """The verifier, data and settings that a run belongs to. Its folder keeps them as run.json.

    config: the drafter's configuration.   data: digest of the documents.   texts: settings of the written texts.
    start:  digest of the drafter that it began with; empty if it began by its recipe.
    """

    method: str
    config: dict[str, Any]
    verifier: Identity
    data: str
    texts: dict[str, Any]
    start: str = ""

    @classmethod
    def read(cls, run: Path) -> RunFacts | None:
        """Return the facts in a run folder, or None if it has none."""
        try:
            return from_plain(cls, json.loads((run / RUN).read_text(encoding="utf-8")), RUN)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, UsageError) as error:
            raise TrainingError(f"{run / RUN} is damaged ({error})", "give another --out") from None

    @classmethod
    def of(cls, run: Path) -> RunFacts:
        """Return the facts of a run. Raises TrainingError if the folder has none."""
        if (facts := cls.read(run)) is None:
            raise TrainingError(
                f"{run} is not a drafter's run: it has no {RUN}", "give a folder that `redraft train` wrote"
            )
        return facts

    def write(self, run: Path) -> None:
        """Write the facts as a whole file or not at all."""
        write_json(run / RUN, asdict(self))

    def digest(self) -> str:
        """Names verifier and data in the run's checkpoints."""
        return hashlib.sha256(json.dumps([asdict(self.verifier), self.data]).encode()).hexdigest()

    def check_same(self, run: Path) -> None:
        """Raise TrainingError if the run folder has another verifier or texts of another recipe."""
        if (before := RunFacts.read(run)) is None:
            raise TrainingError(f"{run} has no drafter's run to resume", "start without --resume")
        if changed := next(self._changes(before), None):
            raise TrainingError(f"the run in {run} {changed[0]}", changed[1])

    def _changes(self, before: RunFacts) -> Iterator[tuple[str, str]]:
        """Yield each difference from the run that is resumed, with a hint."""
        if before.verifier != self.verifier:
            verifiers = f"expected {_digests(before.verifier)}, found {_digests(self.verifier)}"
            yield f"has another verifier: {verifiers}", "give the same --verifier as before"
        if self.start and self.start != before.start:
            yield "began with another drafter", "give the same --start as before, or none"
        if before.data != self.data:
            yield "was trained on other data", "give the same --data or --texts as before"
        for name, value in self.texts.items():
            if (was := before.texts.get(name)) != value:
                problem = f"has another recipe: {name} was {was!r}, it is {value!r}"
                yield problem, "resume with the recipe that started it"

    def module(self, run: Path, state: Mapping[str, Any]) -> nn.Module:
        """Return the drafter of a checkpoint of the run."""
        module = find_training(self.method).loss.module(self.configuration(run))
        module.load_state_dict({name.removeprefix(_PREFIX): t for name, t in state["objective"].items()})
        return module

    def configuration(self, run: Path, **measured: Any) -> DrafterConfig:
        """Return the drafter's configuration with these values of measured fields."""
        kind = find_training(self.method).config
        config: DrafterConfig = from_plain(kind, {**self.config, **measured}, str(run / RUN))
        return config


@dataclass(frozen=True)
class TrainedDrafter:
    """A drafter with its weights, and the verifier that it was trained for."""

    path: Path
    training: Training
    config: DrafterConfig
    module: nn.Module
    verifier: Identity

    @classmethod
    def open(cls, folder: Path) -> TrainedDrafter:
        """Return the drafter of a run or of a published folder. Raises CheckpointError or TrainingError."""
        if (folder / RUN).exists():
            facts = RunFacts.of(folder)
            module = facts.module(folder, load_checkpoint(folder))
            return cls(folder, find_training(facts.method), facts.configuration(folder), module, facts.verifier)
        checkpoint = DrafterCheckpoint.open(folder)
        training = find_training(checkpoint.method)
        config = checkpoint.configure(training.config)
        module = training.loss.module(config)
        checkpoint.load(module)
        return cls(folder, training, config, module, checkpoint.verifier)

    def digest(self) -> str:
        """Return the SHA-256 of its weights in fp32, in the order of their names."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.module.state_dict().items()):
            sha.update(name.encode())
            sha.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
        return sha.hexdigest()

    def check_begins(self, config: DrafterConfig, verifier: VerifierModel) -> None:
        """Raise CheckpointError if a drafter of this configuration for this verifier cannot begin with it."""
        if self.verifier != verifier.identity:
            raise CheckpointError(
                f"{self.path} was trained for another verifier", "give a --start that was trained for this --verifier"
            )
        if self.config.__class__ is not config.__class__:
            raise CheckpointError(
                f"{self.path} is a drafter of another method than the recipe's", "give a --start of the same method"
            )
        wanted, found = asdict(config), asdict(self.config)
        found_states, states = (getattr(one, "hidden_states", ()) for one in (self.config, config))
        own = _OWN | self.training.measures.keys()  # a run has no measurement before its first step
        own = own if found_states and states else own | _STEERING
        own = own if found.get("qkv_bias") else own | {"qkv_bias"}  # biases that are added are zero
        hint = "give a --start of the recipe's form, or change the recipe"
        for name in (name for name in found if name in wanted and name not in own):
            if found[name] != wanted[name]:
                key, own_value, value = _first_difference(name, found[name], wanted[name])
                raise CheckpointError(
                    f"{self.path} cannot begin this run: it has {key} = {_short(own_value)}, the recipe's drafter has "
                    f"{key} = {_short(value)}",
                    hint,
                )
        if found_states and found_states != states:
            raise CheckpointError(
                f"{self.path} reads hidden states {', '.join(found_states)}, expected {', '.join(states) or 'none'}",
                hint,
            )

    def begin(self, drafter: nn.Module, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
        """Copy its weights. Those that it lacks keep their values. It is a `redraft.train.training.Start`.

        So does a head of its own for a draft vocabulary, which may have other tokens than this drafter's.
        """
        weights = self.module.state_dict()
        if self.config.draft_vocab_size or drafter.config.draft_vocab_size:  # type: ignore[union-attr]
            weights.pop("head.weight", None)
        drafter.load_state_dict(weights, strict=False)


def _first_difference(key: str, found: Any, wanted: Any) -> tuple[str, Any, Any]:
    """Return the first key below `key` whose values differ, and both values; None for a missing one."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        inner = next(name for name in (*wanted, *found) if found.get(name) != wanted.get(name))
        return _first_difference(f"{key}.{inner}", found.get(inner), wanted.get(inner))
    return key, found, wanted


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _digests(identity: Identity) -> str:
    return f"weights {' '.join(d[:12] for d in identity.weights)} tokenizer {identity.tokenizer[:12]}"
