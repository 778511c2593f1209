"""The training loop: batch, loss, update; the rest is resuming, reporting and stopping in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redraft.errors import TrainingError
from redraft.train.batches import BatchPlan
from redraft.train.checkpoint import load_checkpoint, save_checkpoint
from redraft.train.config import VerifierRecipe, recipe_from_dict
from redraft.train.objective import Objective
from redraft.train.optim import Optimizers


@dataclass(frozen=True)
class StepReport:
    """One finished step: losses in nats a token, speed over this step."""

    step: int
    steps: int
    lr_factor: float
    metrics: dict[str, float]
    tokens: int
    seconds: float


def optimizers_for(objective: Objective, recipe: VerifierRecipe) -> Optimizers:
    """The optimisers of a recipe over an objective's parameters."""
    return Optimizers(
        objective.named_parameters(),
        matrix_lr=recipe.matrix_lr,
        embedding_lr=recipe.embedding_lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        grad_clip=recipe.grad_clip,
    )


def train(
    objective: Objective,
    plan: BatchPlan,
    recipe: VerifierRecipe,
    out: Path,
    *,
    identity: str,
    resume: bool = False,
    checkpoint_every: int = 100,
    report: Callable[[StepReport], None] = lambda _: None,
) -> int:
    """Run from the first step, or from `out`'s checkpoint, to `recipe.steps`; returns the steps run here.

    `identity` names the data; a checkpoint of other data or another recipe (its length aside) is refused with
    TrainingError. A loss that is not finite raises TrainingError and leaves the last checkpoint as it is.
    """
    if resume:
        first, optimizers = _resume(objective, recipe, out, identity)
    else:
        objective.prepare(0)
        first, optimizers = 0, optimizers_for(objective, recipe)

    for step in range(first, recipe.steps):
        started = time.perf_counter()
        if objective.prepare(step):
            optimizers = optimizers_for(objective, recipe)
        length = recipe.row_length(step)
        loss, metrics = objective.loss(plan.batch(step, recipe.batch_tokens // length, length))
        if not torch.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss.item()} at step {step}",
                f"the last good checkpoint is in {out}; resume with a lower learning rate",
            )
        torch.autograd.backward(loss)
        optimizers.step(recipe.lr_factor(step))
        done = step + 1
        seconds = time.perf_counter() - started
        report(StepReport(done, recipe.steps, recipe.lr_factor(step), metrics, recipe.batch_tokens, seconds))
        if done % checkpoint_every == 0 and done < recipe.steps:
            save_checkpoint(out, _state(objective, optimizers, recipe, identity, done))
    save_checkpoint(out, _state(objective, optimizers, recipe, identity, recipe.steps))
    return recipe.steps - first


def _state(
    objective: Objective, optimizers: Optimizers, recipe: VerifierRecipe, identity: str, step: int
) -> dict[str, Any]:
    return {
        "step": step,
        "identity": identity,
        "recipe": recipe.to_dict(),
        "objective": objective.state_dict(),
        "optimizers": optimizers.state_dict(),
        "rng": torch.get_rng_state(),
    }


def _resume(objective: Objective, recipe: VerifierRecipe, out: Path, identity: str) -> tuple[int, Optimizers]:
    state = load_checkpoint(out)
    if state["identity"] != identity:
        raise TrainingError(f"the checkpoint in {out} was trained on other data", "give the same --data as before")
    step = int(state["step"])
    before = recipe_from_dict(state["recipe"], str(out))
    _check_same_course(before, recipe, step, out)
    objective.prepare(step - 1)  # the shape that was saved
    objective.load_state_dict(state["objective"])
    optimizers = optimizers_for(objective, recipe)
    optimizers.load_state_dict(state["optimizers"])
    torch.set_rng_state(state["rng"])
    return step, optimizers


def _check_same_course(before: VerifierRecipe, now: VerifierRecipe, step: int, out: Path) -> None:
    """Refuse a recipe under which the first `step` steps would have gone otherwise."""
    old, new = before.to_dict(), now.to_dict()
    changed = sorted(key for key in new if new[key] != old[key])
    if not set(changed) <= {"steps", "grow_step"}:
        key = next(key for key in changed if key not in {"steps", "grow_step"})
        raise TrainingError(
            f"the checkpoint in {out} has another recipe: {key} was {old[key]!r}, it is {new[key]!r}",
            "resume with the recipe that started it",
        )
    if changed and any(_course(before, s) != _course(now, s) for s in range(step)):
        raise TrainingError(
            f"the checkpoint in {out} is at step {step}, too late for another {' and '.join(changed)}",
            "they can change only before the decay and the growth begin",
        )


def _course(recipe: VerifierRecipe, step: int) -> tuple[float, int, int]:
    return recipe.lr_factor(step), recipe.row_length(step), recipe.layers(step)
