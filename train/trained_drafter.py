"""A trained drafter as a torch module: of a run's last checkpoint, or of a published folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from redraft.errors import CheckpointError, TrainingError
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity
from redraft.export.drafters.layer import DrafterConfig
from redraft.records import from_plain
from redraft.train.batches import Batch
from redraft.train.checkpoint import load_checkpoint
from redraft.train.objectives import find_training
from redraft.train.run_facts import RUN, RunFacts
from redraft.train.training import Training
from redraft.train.verifier_model import VerifierModel

_PREFIX = "drafter."
_OWN = frozenset({"draft_vocab_size", "draft_logit_scale", "hidden_states"})
"""Fields in which a drafter may differ from the one that it begins with."""


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
            facts = run_facts(folder)
            module = trained_drafter(folder, facts, load_checkpoint(folder))
            return cls(folder, find_training(facts.method), _config(folder, facts), module, facts.verifier)
        checkpoint = DrafterCheckpoint.open(folder)
        training = find_training(checkpoint.method)
        config = checkpoint.configure(training.config)
        module = training.drafter(config)
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
        own = _OWN | self.training.measures.keys()  # a run has no measurement before its first step
        for name in (name for name in found if name in wanted and name not in own):
            if found[name] != wanted[name]:
                key, own_value, value = _first_difference(name, found[name], wanted[name])
                raise CheckpointError(
                    f"{self.path} cannot begin this run: it has {key} = {_short(own_value)}, the recipe's drafter has "
                    f"{key} = {_short(value)}",
                    "give a --start of the recipe's form, or change the recipe",
                )
        found_states, states = (getattr(one, "hidden_states", ()) for one in (self.config, config))
        if found_states and found_states != states:
            raise CheckpointError(
                f"{self.path} reads hidden states {', '.join(found_states)}, expected {', '.join(states) or 'none'}",
                "give a --start of the recipe's form, or change the recipe",
            )

    def begin(self, drafter: nn.Module, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
        """Copy its weights. Those that it lacks keep their values. It is a `redraft.train.training.Start`."""
        drafter.load_state_dict(self.module.state_dict(), strict=False)


def run_facts(run: Path) -> RunFacts:
    """Return the facts of a run. Raises TrainingError if the folder has none."""
    facts = RunFacts.read(run)
    if facts is None:
        raise TrainingError(
            f"{run} is not a drafter's run: it has no {RUN}", "give a folder that `redraft train` wrote"
        )
    return facts


def trained_drafter(run: Path, facts: RunFacts, state: Mapping[str, Any]) -> nn.Module:
    """Return the drafter of a run's checkpoint."""
    module = find_training(facts.method).drafter(_config(run, facts))
    module.load_state_dict({name.removeprefix(_PREFIX): t for name, t in state["objective"].items()})
    return module


def _config(run: Path, facts: RunFacts) -> DrafterConfig:
    config: DrafterConfig = from_plain(find_training(facts.method).config, facts.config, str(run / RUN))
    return config


def _first_difference(key: str, found: Any, wanted: Any) -> tuple[str, Any, Any]:
    """Return the first key below `key` whose values differ, and both values; None for a missing one."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        inner = next(name for name in (*wanted, *found) if found.get(name) != wanted.get(name))
        return _first_difference(f"{key}.{inner}", found.get(inner), wanted.get(inner))
    return key, found, wanted


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
