"""Each step's choice and outcome as one JSON line, and the replay that checks such a file.

    {"request": 0, "prompt": [ids], "table_ms": [of verifying n nodes]}      once, when a request begins
    {"request": 0, "position": 41, "source": "fresh", "tokens": […], "parents": […], "log_probs": […],
     "said": [the verifier's token after every node, -1 if the sampler did not reach it],
     "path": [accepted nodes], "committed": [ids],
     "choice": {"rate": …, "gains": {source: …}, "tried": false, "log_probs": […], "looked_up": [nodes]}}    every step
    {"table_ms": [0, …]}                                                  before a step, if the costs have changed
    {"together": {"rate": …, "packed": true, "shares": […], "least": 0}}  before a step of several requests

Trees are complete and so are the target tokens of accepted nodes, so the replay computes acceptance from the file
alone. The step in which a request fails has no line. The replay also checks choices that compared costs: a tree's
source, and the number of its nodes. `choice` is `redraft.types.Choice`. Its `log_probs` are those of all nodes that
could be verified, `looked_up` the tree's nodes that the lookup had. A tree that stayed on a device has `shares`
instead, by which it was cut. Its probabilities and shares are estimates, so the replay also compares the expected
tokens with those that were accepted. `probed` marks a tree that is larger than the number of nodes that seems to pay.
`pinned` has the pinned ones of the nodes that could be verified, and `least` the number of nodes that were verified at
any gain.

`table_ms[1 + k]` is the time of a call with k drafted nodes: of one request's tree, or of all trees of a batch. If the
verifier pads trees (`packed` is false), every tree has k. `together` is `redraft.types.Together`, by which all trees of
the batch were cut; the choices of its requests then have `"together": true`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import exp
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from redraft.errors import DataError
from redraft.runtime.controllers.sizes import TreeShares, best_first, most_nodes, ranked_shares
from redraft.runtime.trees.offers import Plan
from redraft.runtime.trees.tree import accepted_path, depths_of, shared_nodes
from redraft.types import Choice, OfferKind, Outcome, Together, Tree

if TYPE_CHECKING:
    from redraft.runtime.requests.request import Request


class TraceWriter:
    """Writes the steps of requests to `file`. Set it as their `record`.

    table_ms: the estimated verification costs at first.
    """

    def __init__(self, file: IO[str], table_ms: Sequence[float]) -> None:
        self._file = file
        self._table_ms = list(table_ms)
        self._together: Together | None = None
        self._numbers: dict[int, int] = {}
        self._count = itertools.count()

    def __call__(self, seq: Request, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        """Write the step, before it is committed."""
        if id(seq) not in self._numbers or len(seq.tokens) == seq.prompt_length:
            self._numbers[id(seq)] = next(self._count)
            begun = {"prompt": seq.tokens[: seq.prompt_length]}
            self._write({"request": self._numbers[id(seq)], **begun, "table_ms": self._table_ms})
        choice = None
        try:
            choice = seq.speculation.controller.explain(seq)
        except Exception as error:  # noqa: BLE001 - a controller may raise anything; no text depends on it
            seq.stop_drafting(error)
        if choice:
            self._write_costs(choice)
        self._write(
            {
                "request": self._numbers[id(seq)],
                "position": seq.num_computed_tokens,
                "source": str(plan.kind),
                "tokens": tree.tokens.tolist(),
                "parents": tree.parents.tolist(),
                "log_probs": [round(value, 5) for value in tree.log_probs.tolist()],
                "said": outcome.target_token_ids,
                "path": list(outcome.path),
                "committed": list(outcome.tokens),
                **({"choice": _choice(choice, tree)} if choice else {}),
            }
        )

    def _write_costs(self, choice: Choice) -> None:
        """Write the costs and the batch's estimates, if they are new."""
        if choice.table_ms and list(choice.table_ms) != self._table_ms:
            self._table_ms = list(choice.table_ms)
            self._write({"table_ms": self._table_ms})
        if choice.together is not None and choice.together is not self._together:
            self._together = choice.together
            self._write({"together": asdict(choice.together)})

    def _write(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")


def _choice(choice: Choice, tree: Tree) -> dict[str, Any]:
    return {
        "rate": choice.rate,
        "gains": choice.gains,
        "tried": choice.tried,
        **({"probed": True} if choice.probed else {}),
        **({"together": True} if choice.together else {}),
        **({"least": choice.least} if choice.least else {}),
        **({} if choice.whole.pinned is None else {"pinned": np.flatnonzero(choice.whole.pinned).tolist()}),
        "log_probs": choice.whole.log_probs.tolist(),
        **({"shares": choice.shares} if choice.shares is not None else {}),
        "looked_up": shared_nodes(tree, choice.found),
    }


@dataclass
class Replay:
    """The state of a trace's replay.

    requests: prompt and committed tokens by request.   table_ms: the latest estimated verification costs.
    together: the latest estimates of a batch.
    steps: number of steps by source of their tree.
    nodes, accepted: verified and accepted nodes by source. A node that the lookup had counts for it in every tree.
    tried:    trees by source and depth that reach the depth, with drafts accepted at every depth before.
    correct:  those of them whose draft was accepted at this depth too.
    expected: expected accepted nodes by source, over choices that compared costs: the sum of their shares.
    observed: the accepted nodes of the same choices.   weighed: number of these choices.
    """

    requests: dict[int, list[int]] = field(default_factory=dict)
    table_ms: list[float] = field(default_factory=list)
    together: Together | None = None
    steps: Counter[str] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    tried: Counter[tuple[str, int]] = field(default_factory=Counter)
    correct: Counter[tuple[str, int]] = field(default_factory=Counter)
    expected: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    observed: Counter[str] = field(default_factory=Counter)
    weighed: int = 0

    @property
    def expected_tokens(self) -> float:
        """Expected tokens a step, the verifier's own included, over choices that compared costs; 0 without any."""
        return 1 + sum(self.expected.values()) / self.weighed if self.weighed else 0.0

    @property
    def observed_tokens(self) -> float:
        """Tokens a step that the same steps committed."""
        return 1 + self.observed.total() / self.weighed if self.weighed else 0.0

    def conditional_acceptance(self, source: str) -> list[float]:
        """Return the shares of a source's drafts by depth that are accepted if they were at every depth before.

        Depth 1 comes first. As in Table 1 of the Lyanna paper, a depth counts if the tree reaches it.
        """
        depths = sorted(depth for name, depth in self.tried if name == source)
        return [self.correct[source, depth] / self.tried[source, depth] for depth in depths]


def replay(lines: Iterable[str]) -> Replay:
    """Replay a trace. Every tree must begin at its request's last token and be accepted as far as the trace has it.

    If its choice compared costs, the tree must have the source with the largest gain and no more nodes than pay.
    Raises DataError for a line that is no record or does not follow from the lines before it.
    """
    played = Replay()
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if "prompt" in values:
                _begin(played, values)
            elif "table_ms" in values:
                played.table_ms = [float(ms) for ms in values["table_ms"]]
            elif "together" in values:
                played.together = Together(**values["together"])
            else:
                _play(played, values)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"line {number} of the trace: {type(error).__name__}: {error}") from None
    return played


def _begin(played: Replay, values: dict[str, Any]) -> None:
    number = values["request"]
    if number in played.requests:
        raise ValueError(f"request {number} begins a second time")
    played.requests[number] = [*map(int, values["prompt"])]
    played.table_ms = [float(ms) for ms in values["table_ms"]]


def _play(played: Replay, values: dict[str, Any]) -> None:
    tokens = played.requests[values["request"]]
    if values["position"] != len(tokens) - 1 or values["tokens"][0] != tokens[-1]:
        raise ValueError(f"the tree begins at {values['position']}, expected {len(tokens) - 1}")
    path = accepted_path(values["tokens"], values["parents"], values["said"])
    last = path[-1] if path else 0
    committed = [*(values["tokens"][node] for node in path), values["said"][last]]
    if list(path) != values["path"] or committed != values["committed"]:
        raise ValueError(f"nodes {list(path)} are accepted, the trace has {values['path']}")
    tokens.extend(committed)
    source = str(OfferKind(values["source"]))
    looked_up: set[int] = set()
    if choice := values.get("choice"):
        _check_choice(choice, source, len(values["tokens"]) - 1, played)
        looked_up = set(choice["looked_up"])
    played.steps[source] += 1
    for depth in range(1, min(len(path) + 1, max(depths_of(values["parents"]))) + 1):
        played.tried[source, depth] += 1
        played.correct[source, depth] += len(path) >= depth
    shares = _shares(values)
    played.weighed += bool(shares)
    for node in range(1, len(values["tokens"])):
        owner = str(OfferKind.LOOKUP) if node in looked_up else source
        played.nodes[owner] += 1
        played.accepted[owner] += node in path
        if shares:
            played.expected[owner] += shares[node]
            played.observed[owner] += node in path


def _shares(values: dict[str, Any]) -> list[float]:
    """Return the estimated acceptance rate of each verified node, the root's being 1; empty without a choice.

    A tree on a device has its shares by rank. The log probabilities of another one are already the controller's own.
    """
    choice = values.get("choice")
    if choice is None:
        return []
    by_rank = choice.get("shares")
    return [exp(value) for value in values["log_probs"]] if by_rank is None else [1.0, *by_rank]


def _check_choice(choice: dict[str, Any], source: str, nodes: int, played: Replay) -> None:
    gains = choice["gains"]
    expected = OfferKind.FRESH if choice["tried"] else max(gains, key=gains.__getitem__)
    if source != expected:
        raise ValueError(f"the largest gain is that of {expected}, the trace has a tree from {source}")
    shares, least = choice.get("shares"), choice.get("least", 0)
    if shares is None:
        log_probs = np.array(choice["log_probs"], np.float32)
        pinned = np.isin(np.arange(len(log_probs)), choice["pinned"]) if "pinned" in choice else None
        shares = ranked_shares(log_probs, pinned)
    if "together" not in choice:
        most, _ = best_first(shares, choice["rate"], played.table_ms, least)
    elif played.together is None:
        raise ValueError("the estimates of its batch are missing")
    else:
        most = most_nodes(TreeShares(shares, least), played.together, played.table_ms)
    if nodes > most and not choice.get("probed"):
        raise ValueError(f"{most} nodes were worth verifying, the trace has {nodes}")
