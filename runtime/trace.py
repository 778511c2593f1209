"""What every step chose and what came of it, one JSON line a step, and the replay that checks such a file.

    {"request": 0, "prompt": [ids], "first": id}                              once, when a request begins
    {"request": 0, "position": 41, "source": "fresh", "tokens": […], "parents": […], "log_probs": […],
     "said": [the verifier's token after every node], "path": [accepted nodes], "committed": [ids]}      every step

Trees and answers are complete, so that acceptance can be computed again from the file alone.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Any

from redraft.errors import DataError
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import accepted_path
from redraft.types import DraftTree, Outcome, Source

Recorder = Callable[[Sequence, Source, DraftTree, Outcome], None]


def no_record(seq: Sequence, plan: Source, tree: DraftTree, outcome: Outcome) -> None:
    """Keeps nothing."""


class TraceWriter:
    """A recorder that writes to `file`; give it to a cycle as `record`."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._numbers: dict[int, int] = {}
        self._count = itertools.count()

    def __call__(self, seq: Sequence, plan: Source, tree: DraftTree, outcome: Outcome) -> None:
        """Write the step that is about to be committed."""
        if id(seq) not in self._numbers or len(seq.tokens) == seq.prompt_length + 1:
            self._numbers[id(seq)] = next(self._count)
            begun = {"prompt": seq.tokens[: seq.prompt_length], "first": seq.tokens[seq.prompt_length]}
            self._write({"request": self._numbers[id(seq)], **begun})
        self._write(
            {
                "request": self._numbers[id(seq)],
                "position": seq.past_len,
                "source": str(plan),
                "tokens": tree.tokens.tolist(),
                "parents": tree.parents.tolist(),
                "log_probs": [round(value, 5) for value in tree.log_probs.tolist()],
                "said": outcome.node_tokens.tolist(),
                "path": list(outcome.path),
                "committed": list(outcome.tokens),
            }
        )

    def _write(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")


@dataclass
class Replay:
    """What a trace says when it is played again.

    requests: prompt and committed tokens by request.   steps, nodes, accepted: counts by source.
    """

    requests: dict[int, list[int]] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)


def replay(lines: Iterable[str]) -> Replay:
    """Play a trace: every tree must begin where its request stands and be accepted as far as the trace says.

    Raises DataError naming the line that is no record or does not follow from those before it.
    """
    played = Replay()
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if "prompt" in values:
                played.requests[values["request"]] = [*map(int, values["prompt"]), int(values["first"])]
            else:
                _play(played, values)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"line {number} of the trace: {type(error).__name__}: {error}") from None
    return played


def _play(played: Replay, values: dict[str, Any]) -> None:
    tokens = played.requests[values["request"]]
    if values["position"] != len(tokens) - 1 or values["tokens"][0] != tokens[-1]:
        raise ValueError(f"the tree begins at {values['position']}, the request stands at {len(tokens) - 1}")
    path = accepted_path(values["tokens"], values["parents"], values["said"])
    last = path[-1] if path else 0
    committed = [*(values["tokens"][node] for node in path), values["said"][last]]
    if list(path) != values["path"] or committed != values["committed"]:
        raise ValueError(f"nodes {list(path)} are accepted, the trace says {values['path']}")
    tokens.extend(committed)
    source = str(Source(values["source"]))
    played.steps[source] += 1
    played.nodes[source] += len(values["tokens"]) - 1
    played.accepted[source] += len(path)
