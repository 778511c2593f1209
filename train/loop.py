"""The training loop: batch, loss, update. It also resumes, reports and stops in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redraft.errors import TrainingError
from redraft.train.batches import Plan
from redraft.train.checkpoint import NAME as CHECKPOINT
from redraft.train.checkpoint import load_checkpoint, save_checkpoint
from redraft.train.config import Recipe
from redraft.train.objective import Objective
from redraft.train.optim import Optimizers, optimizers_for


@dataclass(frozen=True)
class StepReport:
    """One finished step: losses in nats a token, speed over this step."""

    step: int
    steps: int
    lr_factor: float
    metrics: dict[str, float]
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Spent:
    """Tokens and seconds of all steps of a run so far, which its checkpoint has as `spent`."""

    tokens: int = 0
    seconds: float = 0.0


def train(
    objective: Objective,
    plan: Plan,
    recipe: Recipe,
    out: Path,
    *,
    identity: str,
    resume: bool = False,
    checkpoint_every: int = 100,
    report: Callable[[StepReport], None] = lambda _: None,
) -> int:
    """Run from the first step, or from `out`'s checkpoint, to `recipe.steps`. Returns the number of steps run here.

    `identity` names the data. Raises TrainingError for a checkpoint of other data or of another recipe. `recipe.steps`
    may change until the decay begins; with a decay_share of 1, it begins at the first step. A loss without a gradient
    changes nothing. Raises TrainingError if a loss or a gradient is not finite; the last checkpoint stays.
    """
    spent = Spent()
    if resume:
        first, optimizers, spent = _resume(objective, recipe, out, identity)
    else:
        objective.prepare(0)
        first, optimizers = 0, optimizers_for(objective.named_parameters(), recipe, objective.modules())

    for step in range(first, recipe.steps):
        batch = plan.batch(step, recipe)  # not timed: it may compute states that other runs read
        started = time.perf_counter()
        if objective.prepare(step):
            optimizers = optimizers_for(objective.named_parameters(), recipe, objective.modules())
        loss, metrics = objective.loss(batch)
        _check_finite("loss", loss.detach(), step, out)
        if loss.requires_grad:  # else no token of the batch counts
            torch.autograd.backward(loss)
            gradients = [p.grad for _, p in objective.named_parameters() if p.grad is not None]
            _check_finite("gradient's norm", nn.utils.get_total_norm(gradients), step, out)
            optimizers.step(recipe.lr_factor(step))
        done = step + 1
        seconds = time.perf_counter() - started
        spent = Spent(spent.tokens + batch.size, spent.seconds + seconds)
        if done == recipe.steps:  # before the report, which may measure and fail
            save_checkpoint(out, _state(objective, optimizers, recipe, identity, done, spent))
        metrics = {"loss": float(loss.detach()), **metrics}
        report(StepReport(done, recipe.steps, recipe.lr_factor(step), metrics, batch.size, seconds))
        if done % checkpoint_every == 0 and done < recipe.steps:
            save_checkpoint(out, _state(objective, optimizers, recipe, identity, done, spent))
    return recipe.steps - first


def _check_finite(name: str, value: torch.Tensor, step: int, out: Path) -> None:
    if torch.isfinite(value):
        return
    kept = f"the last good checkpoint is in {out}" if (out / CHECKPOINT).exists() else "there is no checkpoint yet"
    begin = "resume" if (out / CHECKPOINT).exists() else "start again"
    raise TrainingError(f"the {name} is {value.item()} at step {step}", f"{kept}; {begin} with a lower learning rate")


def _state(
    objective: Objective, optimizers: Optimizers, recipe: Recipe, identity: str, step: int, spent: Spent
) -> dict[str, Any]:
    return {
        "step": step,
        "spent": asdict(spent),
        "identity": identity,
        "recipe": recipe.to_dict(),
        "objective": objective.state_dict(),
        "optimizers": optimizers.state_dict(),
        "rng": torch.get_rng_state(),
    }


def _resume(objective: Objective, recipe: Recipe, out: Path, identity: str) -> tuple[int, Optimizers, Spent]:
    state = load_checkpoint(out)
    if state["identity"] != identity:
        raise TrainingError(f"the checkpoint in {out} was trained on other data", "give the same texts as before")
    step = int(state["step"])
    before = type(recipe).from_dict(state["recipe"], str(out))
    _check_same_course(before, recipe, step, out)
    objective.prepare(step - 1)  # the saved shape
    objective.load_state_dict(state["objective"])
    optimizers = optimizers_for(objective.named_parameters(), recipe, objective.modules())
    optimizers.load_state_dict(state["optimizers"])
    torch.set_rng_state(state["rng"])
    return step, optimizers, Spent(**state["spent"])


def _check_same_course(before: Recipe, now: Recipe, step: int, out: Path) -> None:
    """Refuse a recipe that would have changed the first `step` steps."""
    old, new = before.to_dict(), now.to_dict()
    changed = sorted(key for key in new if new[key] != old[key])
    fixed = [key for key in changed if key not in now.adjustable]
    if fixed:
        key = fixed[0]
        raise TrainingError(
            f"the checkpoint in {out} has another recipe: {key} was {old[key]!r}, it is {new[key]!r}",
            "resume with the recipe that started it",
        )
    if changed and any(before.course(s) != now.course(s) for s in range(step)):
        raise TrainingError(
            f"the checkpoint in {out} is at step {step}, too late for another {' and '.join(changed)}",
            "it would have changed the earlier steps",
        )
