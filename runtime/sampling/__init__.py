"""Sampling: from the verifier's logits to the tokens of a step.

A sampler chooses the target token after every node of a tree, and acceptance compares these with the tree's tokens.
Each request has its own sampler. Random numbers depend on the request's seed and the token's position, so that two
implementations can be compared token by token.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from redraft import names
from redraft.errors import BundleError, UsageError
from redraft.runtime.params import COUPLED, SamplingParams
from redraft.runtime.sampling.constraints import Constraint
from redraft.runtime.sampling.path_sampler import PathSampler
from redraft.runtime.sampling.processors import make_processors
from redraft.runtime.sampling.rejection import Rejection
from redraft.runtime.sampling.sampler import Greedy, Sampler


def make_sampler(
    params: SamplingParams, stop_tokens: Collection[int] = (), record_logit_margins: bool = False,
    constraint: Constraint | None = None,
) -> Sampler:  # fmt: skip
    """Return the sampler for a request that these tokens end, and whose text matches the compiled constraint."""
    processors = [*([constraint] if constraint else ()), *make_processors(params, stop_tokens)]
    if params.temperature and params.acceptance != COUPLED:
        return Rejection(params, processors, record_logit_margins)
    if params.temperature or processors or params.logprobs is not None:
        return PathSampler(params, processors, record_logit_margins)
    return Greedy(record_logit_margins)


def model_sampling(folder: Path, given: dict[str, Any]) -> SamplingParams:
    """Return the parameters that a bundle's model asks for, with `given` in place of its own.

    A model that does not ask to sample (`do_sample`) is decoded greedily unless `given` has a temperature, as
    transformers does. Values that the file lacks are those of `SamplingParams`, not transformers' top_k of 50.
    Raises UsageError if the bundle keeps no defaults or they are invalid, and BundleError if the file is damaged.
    """
    path = folder / names.GENERATION_CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            "this bundle keeps no sampling defaults of its model",
            "build it from a checkpoint with generation_config.json",
        ) from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read as JSON ({error})", "build the bundle again") from None
    sampled = values.pop(names.DO_SAMPLE, False)
    values["temperature"] = values.get("temperature", 1.0) if sampled else 0.0
    values = {name: value for name, value in values.items() if name not in given}
    try:
        SamplingParams(**values)
    except (TypeError, UsageError) as error:
        raise UsageError(f"the model's {path.name}: {error}", "give the parameters yourself") from None
    return SamplingParams(**{**values, **given})
