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
from redraft.runtime.verifier import Verifier
from redraft.types import Budget
from tests.export.drafters.tiny import last_chain
from tests.export.drafters.token_tree import Tree, build_subtree

from .devices import opener
from .fakes import fix_costs
from .lyanna_bundle import SCALE, VOCABULARY, WIDTH, write_lyanna_bundle
from .test_lyanna import FULL, PARAMS, PROMPTS, admitted, lyanna_of, request

Open = Callable[..., Runtime]
SIZE = 8


@pytest.fixture(scope="module", params=["trained", "pruned"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that was trained on eight of thirteen tokens, or is built for the eight most frequent."""
    trained = {"draft_vocab_size": SIZE} if request.param == "trained" else {"draft_vocabulary": SIZE}
    return write_lyanna_bundle(tmp_path_factory.mktemp(request.param), token_info="lowrank", **trained)


@pytest.fixture(params=["host", "cpu", "tensorrt"])
def opened(request: pytest.FixtureRequest, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the bundle on the host or on a device, without measuring."""
    fix_costs(monkeypatch)
    monkeypatch.setattr(Verifier, "warm", lambda self: None)
    return opener(request.param, bundle, tmp_path, monkeypatch)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("budget", [None, FULL, Budget(5, 2, 2)], ids=str)
def test_texts_are_plain_decodings_own(opened: Open, max_num_seqs: int, budget: Budget | None) -> None:
    with opened(max_num_seqs) as runtime:
        plain = [text.token_ids for text in runtime.generate(PROMPTS, PARAMS, "none")]
        found = runtime.generate(PROMPTS, PARAMS, SpeculationParams("lyanna", budget=budget))
    assert [text.token_ids for text in found] == plain
    if budget is not None:  # without a budget, costs measured on this machine decide whether to draft
        assert sum(text.metrics.num_accepted_draft_tokens for text in found) > 0


class TorchDrafter:
    """The trained drafter and its verifier as torch modules."""

    def __init__(self, bundle: Path, vocabulary: np.ndarray) -> None:
        checkpoint = DrafterCheckpoint.open(bundle.parent / "drafter")
        self.module = LyannaDrafter(checkpoint.configure(LyannaConfig)).eval()
        data = checkpoint.load(self.module)
        ids = np.arange(VOCABULARY) if data.draft_vocabulary is None else data.draft_vocabulary.numpy()
        self.vocabulary, self.columns = vocabulary, np.searchsorted(ids, vocabulary)
        assert np.array_equal(ids[self.columns], vocabulary)
        self.verifier = AutoModelForCausalLM.from_pretrained(str(bundle.parent / "verifier"), dtype=torch.float32)
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


def test_drafted_tokens_are_torchs(opened: Open, bundle: Path) -> None:
    """Last tokens are inside and outside of the draft vocabulary."""
    vocabulary = open_bundle(bundle, verify=False).tables("lyanna")[names.DRAFT_VOCABULARY]
    assert len(vocabulary) == SIZE
    expected = TorchDrafter(bundle, vocabulary)
    outside = np.delete(np.arange(VOCABULARY), vocabulary).tolist()
    with opened() as runtime:
        drafter = lyanna_of(runtime)
        for place, prompt in enumerate(PROMPTS):
            seq = request(prompt)
            admitted(runtime, [seq])
            seq.tokens[-1] = (seq.tokens[-1], int(vocabulary[1]), outside[-1])[place % 3]
            (tree,) = drafter.draft([seq], [FULL])
            whole = expected.tree(seq.tokens).top_nodes(drafter.shape.nodes)
            assert tree.tokens.tolist() == whole.tokens
            assert tree.parents.tolist() == whole.parents
            np.testing.assert_allclose(tree.log_probs, whole.log_probs, atol=1e-3)
            assert set(whole.tokens[1:]) <= set(vocabulary.tolist())
