"""A drafter with a draft vocabulary in the runtime: drafts equal torch's, and texts equal plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from redraft import names
from redraft.engines import open_bundle
from redraft.export.drafters.checkpoint import DrafterCheckpoint
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter
from redraft.runtime import Runtime, SpeculationParams
from redraft.types import Budget
from tests.export.drafters.tiny import last_chain
from tests.export.drafters.token_tree import Tree, build_subtree
from tests.runtime.devices import opener
from tests.runtime.lyanna_bundle import (
    DRAFT_VOCABULARY,
    FULL,
    PARAMS,
    PROMPTS,
    SCALE,
    VOCABULARY,
    WIDTH,
    admitted,
    lyanna_of,
    request,
)

pytestmark = pytest.mark.usefixtures("unwarmed")
Open = Callable[..., Runtime]


@pytest.fixture(params=["host", "cpu", "tensorrt"])
def opened(request: pytest.FixtureRequest, several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the bundle on the host or on a device, without measuring."""
    return opener(request.param, several, tmp_path, monkeypatch)


def test_texts_are_plain_decodings_own(opened: Open, plain: list[list[int]]) -> None:
    for max_num_seqs, drafter, budget in (
        (1, "trained", FULL), (3, "trained", None), (3, "pruned", FULL), (3, "trained", Budget(5, 2, 2)),
    ):  # fmt: skip
        with opened(max_num_seqs) as runtime:
            found = runtime.generate(PROMPTS, PARAMS, SpeculationParams(drafter, budget=budget))
        assert [list(text.token_ids) for text in found] == plain[: len(PROMPTS)]
        if budget is not None:  # otherwise costs decide whether to draft
            assert sum(text.metrics.num_accepted_draft_tokens for text in found) > 0


class TorchDrafter:
    """The trained drafter and its verifier as torch modules."""

    def __init__(self, folder: Path, drafter: str, vocabulary: np.ndarray) -> None:
        checkpoint = DrafterCheckpoint.open(folder / drafter)
        self.module = LyannaDrafter(checkpoint.configure(LyannaConfig)).eval()
        data = checkpoint.load(self.module)
        ids = np.arange(VOCABULARY) if data.draft_vocabulary is None else data.draft_vocabulary.numpy()
        self.vocabulary, self.columns = vocabulary, np.searchsorted(ids, vocabulary)
        assert np.array_equal(ids[self.columns], vocabulary)
        self.verifier = AutoModelForCausalLM.from_pretrained(str(folder / "verifier"), dtype=torch.float32)
        self.embed = self.verifier.get_input_embeddings()
        outside = np.delete(np.arange(VOCABULARY), vocabulary)
        rows = np.stack([self.information(token) for token in outside])
        self.others = np.average(rows, axis=0, weights=data.counts.numpy()[outside] + 1).astype(np.float32)

    @torch.inference_mode()
    def tree(self, text: list[int]) -> Tree:
        """Algorithm 1 after a text. Tokens outside of the vocabulary add the mean of their information."""
        tokens = torch.tensor(text)
        features = self.verifier.model(tokens[None, :-1]).last_hidden_state[0]
        states = last_chain(self.module, features, tokens, self.embed)
        logits = F.linear(states, self.verifier.lm_head.weight[torch.from_numpy(self.vocabulary)])

        def added(token: int) -> np.ndarray:
            return self.information(token) if token in self.vocabulary else self.others

        return build_subtree(logits.numpy(), text[-1], added, WIDTH, SCALE, self.vocabulary)

    @torch.inference_mode()
    def information(self, token: int) -> np.ndarray:
        """RMSNorm(W2 W1 E(token)) for the tokens of the vocabulary, [H]."""
        assert self.module.token_info is not None
        values: np.ndarray = self.module.token_info(self.embed(torch.tensor(token))).numpy()
        return values[self.columns]


@pytest.mark.parametrize("name", ["trained", "pruned"])
def test_drafted_tokens_are_torchs(opened: Open, several: Path, name: str) -> None:
    """Last tokens are inside and outside of the draft vocabulary.

    One drafter was trained on eight of thirteen tokens, the other is built for the eight most frequent.
    """
    vocabulary = open_bundle(several, verify=False).tables(name)[names.DRAFT_VOCABULARY]
    assert len(vocabulary) == DRAFT_VOCABULARY
    expected = TorchDrafter(several.parent, name, vocabulary)
    outside = np.delete(np.arange(VOCABULARY), vocabulary).tolist()
    with opened() as runtime:
        drafter = lyanna_of(runtime, name)
        for place, prompt in enumerate(PROMPTS):
            seq = request(prompt)
            admitted(runtime, [seq], name=name)
            seq.tokens[-1] = (seq.tokens[-1], int(vocabulary[1]), outside[-1])[place % 3]
            (tree,) = drafter.draft([seq], [FULL])
            whole = expected.tree(seq.tokens).top_nodes(drafter.shape.nodes)
            assert tree.tokens.tolist() == whole.tokens
            assert tree.parents.tolist() == whole.parents
            np.testing.assert_allclose(tree.log_probs, whole.log_probs, atol=1e-3)
            assert set(whole.tokens[1:]) <= set(vocabulary.tolist())
