"""The training loop: batch, loss, update. It also resumes, writes checkpoints, reports and stops in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from redraft.errors import TrainingError, UsageError
from redraft.files import whole_file
from redraft.train.batches import Batch, BatchSource
from redraft.train.config import Recipe
from redraft.train.optim import Optimizers, optimizers_for

CHECKPOINT = "checkpoint.pt"


class Objective(Protocol):
    """A loss with its modules: the only part of a method that the loop uses."""

    @property
    def lookahead(self) -> int:
        """Tokens that a row needs after its inputs."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters to train."""

    def modules(self) -> Iterator[nn.Module]:
        """The modules that compute with them."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return everything that a checkpoint must hold."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> object:
        """Load the result of `state_dict`."""

    def prepare(self, step: int, steps: int) -> bool:
        """Prepare the next step of so many. Returns True if the parameters are new and need new optimisers."""

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a scalar loss, and metrics in nats a token (a kind's name, `mtp` …) to report.

        The loss has no gradient if no token of the batch counts.
        """


@dataclass(frozen=True)
class StepReport:
    """One finished step: losses in nats a token, speed over this step."""

    step: int
    steps: int
    lr_factor: float
    metrics: dict[str, float]
    tokens: int
    seconds: float


def train(  # noqa: PLR0913 - the parts of a training run
    objective: Objective,
    plan: BatchSource,
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
    first, spent = 0, {"tokens": 0, "seconds": 0.0}  # of all steps of the run so far
    if resume:
        first, spent, optimizers = _resume(objective, recipe, out, identity)
    else:
        objective.prepare(0, recipe.steps)
        optimizers = optimizers_for(objective.named_parameters(), recipe, objective.modules())

    for step in range(first, recipe.steps):
        batch = plan.batch(step, recipe)  # not timed: it may compute states that other runs read
        started = time.perf_counter()
        if objective.prepare(step, recipe.steps):
            optimizers = optimizers_for(objective.named_parameters(), recipe, objective.modules())
        loss, metrics = _update(objective, optimizers, batch, recipe, step, out)
        done, seconds = step + 1, time.perf_counter() - started
        spent = {"tokens": spent["tokens"] + batch.size, "seconds": spent["seconds"] + seconds}
        state = {"step": done, "spent": spent, "identity": identity, "recipe": recipe.to_dict()}
        if done == recipe.steps:  # before the report, which may measure and fail
            _save(out, state, objective, optimizers)
        metrics = {"loss": loss, **metrics}
        report(StepReport(done, recipe.steps, recipe.lr_factor(step), metrics, batch.size, seconds))
        if done % checkpoint_every == 0 and done < recipe.steps:
            _save(out, state, objective, optimizers)
    return recipe.steps - first


def _update(
    objective: Objective, optimizers: Optimizers, batch: Batch, recipe: Recipe, step: int, out: Path
) -> tuple[float, dict[str, float]]:
    """Take one step. Returns the loss and its metrics."""
    loss, metrics = objective.loss(batch)
    _check_finite("loss", loss.detach(), step, out)
    if loss.requires_grad:  # else no token of the batch counts
        torch.autograd.backward(loss)
        gradients = [p.grad for _, p in objective.named_parameters() if p.grad is not None]
        _check_finite("gradient's norm", nn.utils.get_total_norm(gradients), step, out)
        optimizers.step(recipe.lr_factor(step))
    return float(loss.detach()), metrics


def _check_finite(name: str, value: torch.Tensor, step: int, out: Path) -> None:
    if torch.isfinite(value):
        return
    hint = "there is no checkpoint yet; start again"
    if (out / CHECKPOINT).exists():
        hint = f"the last good checkpoint is in {out}; resume"
    raise TrainingError(f"the {name} is {value.item()} at step {step}", f"{hint} with a lower learning rate")


def _save(out: Path, state: dict[str, Any], objective: Objective, optimizers: Optimizers) -> None:
    rest = {"objective": objective.state_dict(), "optimizers": optimizers.state_dict(), "rng": torch.get_rng_state()}
    save_checkpoint(out, {**state, **rest})


def _resume(objective: Objective, recipe: Recipe, out: Path, identity: str) -> tuple[int, dict[str, Any], Optimizers]:
    """Return the checkpoint's step, tokens and seconds, and its optimisers."""
    state = load_checkpoint(out)
    if state["identity"] != identity:
        raise TrainingError(f"the checkpoint in {out} was trained on other data", "give the same texts as before")
    step = int(state["step"])
    _check_same_course(type(recipe).from_dict(state["recipe"], str(out)), recipe, step, out)
    objective.prepare(step - 1, recipe.steps)  # the saved shape
    objective.load_state_dict(state["objective"])
    optimizers = optimizers_for(objective.named_parameters(), recipe, objective.modules())
    optimizers.load_state_dict(state["optimizers"])
    torch.set_rng_state(state["rng"])
    return step, state["spent"], optimizers


def _check_same_course(before: Recipe, now: Recipe, step: int, out: Path) -> None:
    """Refuse a recipe that would have changed the first `step` steps."""
    old, new = before.to_dict(), now.to_dict()
    changed = sorted(key for key in new if new[key] != old[key])
    if fixed := [key for key in changed if key not in now.adjustable]:
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


def refuse_run(out: Path) -> None:
    """Raise UsageError if a run's checkpoint would be overwritten."""
    if (out / CHECKPOINT).exists():
        raise UsageError(f"{out} already holds a run", "give --resume or another --out")


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint by `state` (tensors and plain values)."""
    with whole_file(folder / CHECKPOINT) as file:
        torch.save(state, file)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Read the folder's checkpoint, on the CPU. Raises TrainingError if it is missing or damaged."""
    path = folder / CHECKPOINT
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TrainingError(
            f"{folder} has no {path.name}: no step was saved", "start the run without --resume"
        ) from None
    except Exception as error:  # torch raises several types for damaged files  # noqa: BLE001
        raise TrainingError(f"{path} cannot be read: {error}", "start again without --resume") from None
    return state
