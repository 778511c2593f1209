"""Tiny drafters' graphs, each exported once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .tiny import CONFIG, Exported, Verifier, export, make_verifier


@pytest.fixture(scope="session")
def little_verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    return make_verifier(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="session")
def whole(little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The whole vocabulary, a table in fp16, three steps, a tree cut from eleven nodes to nine."""
    return export(tmp_path_factory.mktemp("whole"), little_verifier)


@pytest.fixture(scope="session")
def pruned(little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Built for its twenty most frequent tokens, a table in fp8, four wider steps, without first token and scales."""
    config = replace(CONFIG, steps=4, first_token=False, draft_logit_scale=1.0, logit_scale=1.0, head_dim=8)
    options = dict(token_info="fp8", draft_vocabulary=20, width=3, nodes=100)
    return export(tmp_path_factory.mktemp("pruned"), little_verifier, config, **options)


@pytest.fixture(scope="session")
def trained(little_verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Trained with a draft vocabulary of 23 tokens and a projected chain, resampled trees as large as possible."""
    config = replace(CONFIG, draft_vocab_size=23, chain_projection=True)
    return export(tmp_path_factory.mktemp("trained"), little_verifier, config, resample_nodes=100)
