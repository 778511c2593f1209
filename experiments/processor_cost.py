"""What sampling, logits processors and constraints cost, in plain decoding and with drafts of a fixed size.

    python -m experiments.processor_cost --engines DIR --prompts FILE … --chat --methods lyanna

Every prompt is decoded with every setting, plainly and by every method, in turn. A step's own time is all but the
verifier's calls: the drafter with its noise, processors, sampling, and the rest of the runtime.

- own_ms: own time of a step.   share: of all its time.
- extra: the own time beyond a greedy step's of the same method, over all the step's time. `beyond_plain` is this less
  the same share of plain decoding.
- speed: over plain decoding with the same setting, with its interval (`speedup`).

The JSON schema is measured on prompts of its own, which ask for a record; its `extra` is beyond a greedy step of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redraft.bench.command import budget, bundle_parser, run
from redraft.bench.compare import Settings, first_turn, timing
from redraft.bench.environment import environment
from redraft.bench.prompts import BenchPrompt, load_prompts
from redraft.bench.statistics import speedup
from redraft.methods import NONE
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams

GREEDY = "greedy"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    GREEDY: {},
    "penalties, greedy": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "a bias and 5 log probabilities, greedy": {"logit_bias": {5: 1.0}, "logprobs": 5},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "temperature 1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "temperature 1, top-p 0.9, penalties": {
        "temperature": 1.0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
    },
    "temperature 1, rejection": {"temperature": 1.0, "acceptance": "rejection"},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "skills": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "skills", "address"],
    "additionalProperties": False,
}
RECORD_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    GREEDY: {},
    "JSON schema, greedy": {"json_schema": SCHEMA},
    "JSON schema, temperature 1": {"json_schema": SCHEMA, "temperature": 1.0},
}
RECORDS = ("a doctor in Lyon", "a carpenter from Oslo", "a retired teacher", "a chess champion", "a pilot from Peru")


def measure(
    runtime: Runtime, prompts: Sequence[Sequence[int]], settings: Mapping[str, Mapping[str, Any]],
    ways: Mapping[str, SpeculationParams], tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of every setting by way of decoding."""
    found: dict[tuple[str, str], list[Generation]] = {}
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
        for setting, values in settings.items():
            params = SamplingParams(max_tokens=tokens, seed=number, **values)
            for way, how in ways.items():
                (one,) = runtime.generate([prompt], params, how)
                if number:
                    found.setdefault((setting, way), []).append(one)
    figures: dict[str, Any] = {}
    for setting in settings:
        rows = {way: _row(found[setting, way], found[GREEDY, way]) for way in ways}
        for way, row in rows.items():
            if way != NONE:
                row["beyond_plain"] = row["extra"] - rows[NONE]["extra"]
                pairs = [
                    (timing(plain), timing(one))
                    for plain, one in zip(found[setting, NONE], found[setting, way], strict=True)
                    if min(len(plain.token_ids), len(one.token_ids)) > 8
                ]
                row["speed"] = speedup([plain for plain, _ in pairs], [one for _, one in pairs]).to_json()
        figures[setting] = rows
    return figures


def _row(generations: Sequence[Generation], greedy: Sequence[Generation]) -> dict[str, Any]:
    own, whole = _per_step(generations)
    return {
        "own_ms": own,
        "share": own / whole,
        "extra": (own - _per_step(greedy)[0]) / whole,
        "tau": sum(len(one.token_ids) for one in generations) / sum(one.metrics.num_steps for one in generations),
    }


def _per_step(generations: Sequence[Generation]) -> tuple[float, float]:
    """Return the milliseconds of a step without the verifier's calls, and with them."""
    steps = sum(one.metrics.num_steps for one in generations)
    whole = sum(sum(one.metrics.stage_ms.values()) for one in generations) / steps
    return whole - sum(one.metrics.stage_ms["verify"] for one in generations) / steps, whole


def main() -> dict[str, Any]:
    """Measure all settings."""
    parser = bundle_parser(__doc__, max_new_tokens=96, limit=4)
    parser.add_argument("--methods", required=True, help="separated by commas")
    parser.add_argument("--budget", type=budget, default=Budget(6, 3, 2), help="of every tree")
    parser.add_argument("--chat", action="store_true", help="wrap prompts in the chat template")
    options = parser.parse_args()
    with Runtime.open(options.engines) as runtime:
        settings = Settings(SamplingParams(), chat=options.chat)
        prompts = [first_turn(runtime, one, settings) for one in load_prompts(options.prompts, options.limit)]
        records = [
            first_turn(runtime, BenchPrompt(who, "record", f"Describe {who} as a JSON record."), settings)
            for who in RECORDS
        ]
        names = (NONE, *options.methods.split(","))
        fixed = {name: SpeculationParams(name, budget=None if name == NONE else options.budget) for name in names}
        free = {name: SpeculationParams(name) for name in names}
        return {
            "environment": environment(),
            "budget": repr(options.budget),
            "prompts": len(prompts),
            "sampling": measure(runtime, prompts, SETTINGS, fixed, options.max_new_tokens),
            "constraints": measure(runtime, records, RECORD_SETTINGS, free, options.max_new_tokens),
        }


if __name__ == "__main__":
    run(main)
