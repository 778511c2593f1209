"""A stream that tells its steps: where each token came from, and which drafts were verified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from redraft.runtime.generation import Origin, node_origins, origins, recorded
from redraft.runtime.requests.batch import RequestStep
from redraft.runtime.server.explained import tree_of
from redraft.runtime.server.tokens import TokenTexts
from redraft.runtime.trees.offers import Offer, OfferKey, Plan, StepLimits
from redraft.runtime.trees.tree import make_tree
from redraft.types import Budget, DraftTree, OfferKind, Outcome
from tests.runtime.fakes import EOS, byte_text, script
from tests.runtime.server.serving import HERMES, USER, client_of, error_of, events, toy

TEXT = "<think>né €why</think>Yes, 水水 yes. Yes, 水水 yes. \U0001f680\U0001f680!"
PROMPT = len("user: hi\nassistant: ")
FIXED = {"num_speculative_tokens": 4, "controller": "fixed"}


def steps(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a stream that tells its steps, those without a step left out."""
    body = {"model": "toy", "messages": [USER], "max_tokens": 150, "stream": True, "redraft": {"steps": True}, **fields}
    chunks = events(client.post("/v1/chat/completions", json=body))
    return [choice for chunk in chunks for choice in chunk["choices"] if "redraft" in choice]


def told(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [token for choice in choices for token in choice["redraft"]["tokens"]]


@pytest.mark.parametrize(
    "fields", [{}, {"stop": ["水 yes. \U0001f680"]}, {"max_tokens": 67}], ids=["whole", "stop", "cut"]
)
def test_the_texts_of_tokens_are_the_answer_however_many_a_step_accepts(fields: dict[str, Any]) -> None:
    said = [*TEXT.encode(), EOS]
    with toy(script(said, PROMPT + len("<think></think>")), HERMES) as runtime:
        client = client_of(runtime)
        whole = {"model": "toy", "messages": [USER], "max_tokens": 150, **fields}
        message = client.post("/v1/chat/completions", json=whole).json()["choices"][0]["message"]
        found = []
        for method in (False, {"method": "ngram", **FIXED}, {"method": "suffix", **FIXED}):
            choices = steps(client, speculative_config=method, **fields)
            tokens = told(choices)
            assert "".join(one.get("content", "") for one in tokens) == message["content"]
            reasoning = "".join(one.get("reasoning_content", "") for one in tokens)
            assert reasoning == message["reasoning_content"] == "né €why"
            ids = [token for one in tokens for token in one["ids"]]
            assert ids == said[: len(ids)]
            assert all(len(one["ids"]) == len(one["sources"]) for one in tokens)
            assert len(choices) < len(ids) or method is False
            found.append([{**one, "sources": None} for one in tokens])
    assert found[0] == found[1] == found[2]
    together = next(one for one in found[0] if "水" in one.get("content", ""))
    # The second one may begin the stop string.
    assert bytes(together["ids"]).decode() == ("水水" if "stop" in fields else "水")


def test_sources_and_trees_agree_with_the_figures(client: TestClient) -> None:
    body = {"model": "toy", "messages": [USER], "max_tokens": 60, "stream": True, "redraft": {"steps": True}}
    chunks = events(client.post("/v1/chat/completions", json={**body, "speculative_config": FIXED}))
    choices = [choice for chunk in chunks for choice in chunk["choices"] if "redraft" in choice]
    figures, sources = chunks[-1]["redraft"], [source for one in told(choices) for source in one["sources"]]
    trees = [choice["redraft"]["tree"] for choice in choices if "tree" in choice["redraft"]]
    assert len(choices) == figures["steps"]
    assert len(sources) == 60
    assert sources.count("lookup") == figures["accepted"] > 0
    assert sources.count("bonus") > 0
    assert sum(len(tree["tokens"]) - 1 for tree in trees) == figures["drafted"]
    for choice in choices:
        tokens = [token for one in choice["redraft"]["tokens"] for token in one["ids"]]
        if tree := choice["redraft"].get("tree"):
            said = [*(tree["tokens"][node] for node in tree["path"]), tree["bonus"]["id"]]
            assert said[: len(tokens)] == tokens
            assert [tree["parents"][node] for node in tree["path"]] == [0, *tree["path"]][:-1]
            assert len({len(tree[name]) for name in ("tokens", "texts", "parents", "sources", "probs")}) == 1
            assert tree["drafters"] == []
        else:
            assert choice["redraft"]["tokens"][0]["sources"] == ["plain"]


def test_every_choice_tells_its_own_steps(client: TestClient) -> None:
    choices = steps(client, n=2, temperature=1.5, seed=3, max_tokens=20, ignore_eos=True)
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert sum(len(one["ids"]) for one in told(own)) == 20


def test_only_streams_that_ask_tell_steps(client: TestClient) -> None:
    body = {"model": "toy", "messages": [USER], "max_tokens": 3}
    for asked in (None, {}, {"steps": False}):
        chunks = events(client.post("/v1/chat/completions", json={**body, "stream": True, "redraft": asked}))
        assert not any("redraft" in choice for chunk in chunks for choice in chunk["choices"])
    answer = client.post("/v1/chat/completions", json={**body, "redraft": {"steps": True}})
    assert error_of(answer, 400)["param"] == "redraft.steps"
    answer = client.post("/v1/chat/completions", json={**body, "stream": True, "redraft": {"tokens": True}})
    assert error_of(answer, 400)["param"] == "redraft.tokens"


# --- origins of the nodes -------------------------------------------------------------------------------------------

FOUND = make_tree([9, 1, 2], [-1, 0, 1], [1.0, 0.5, 0.4])
AGAIN = make_tree([9, 1, 3], [-1, 0, 1], [1.0, 0.6, 0.3])
FRESH = make_tree([9, 1, 4, 3], [-1, 0, 1, 1], [1.0, 0.6, 0.3, 0.1])
WHOLE = make_tree([9, 1, 2, 3, 4], [-1, 0, 1, 1, 1], [1.0, 0.6, 0.4, 0.3, 0.3])


def step(kinds: list[OfferKind], found: DraftTree, tree: DraftTree, made: list[DraftTree]) -> RequestStep:
    offers = tuple(Offer(OfferKey("d", kind)) for kind in kinds)
    plan = Plan(StepLimits(Budget(9, 9, 9)), found, offers)
    done = RequestStep(request=None, plan=plan, made=list(zip(offers, made, strict=True)))  # type: ignore[arg-type]
    done.tree = tree
    done.outcome = Outcome([1, 3, -1, 5, -1][: len(tree)], (1, 3) if len(tree) > 3 else (1,), 5, (1, 3, 5))
    return done


def test_nodes_come_from_the_lookup_then_from_resampling_then_from_the_draft() -> None:
    union = step([OfferKind.RESAMPLE, OfferKind.FRESH], FOUND, WHOLE, [AGAIN, FRESH])
    assert node_origins(union) == [Origin.LOOKUP, Origin.LOOKUP, Origin.RESAMPLED, Origin.DRAFTER]
    assert origins(union) == [Origin.LOOKUP, Origin.RESAMPLED, Origin.VERIFIER]
    root = make_tree([9], [-1], [1.0])
    assert node_origins(step([OfferKind.RESAMPLE], root, AGAIN, [AGAIN])) == [Origin.RESAMPLED] * 2
    assert node_origins(step([OfferKind.FRESH], root, AGAIN, [AGAIN])) == [Origin.DRAFTER] * 2
    assert node_origins(step([], FOUND, FOUND, [])) == [Origin.LOOKUP] * 2


def test_a_tree_without_a_next_token_has_no_bonus(runtime: Runtime) -> None:
    done = step([OfferKind.FRESH], FOUND, WHOLE, [FRESH])
    texts = TokenTexts(byte_text())
    assert tree_of(recorded(done), texts)["bonus"] == {"id": 5, "text": "\x05"}
    assert tree_of(recorded(done), texts)["drafters"] == ["d"]
    done.outcome = Outcome([-1] * 5, (), -1, ())
    done.tree.log_probs[1] = np.inf  # a drafter's fault stays JSON
    assert tree_of(recorded(done), texts)["bonus"] is None
    assert tree_of(recorded(done), texts)["probs"][1] == 1.0
