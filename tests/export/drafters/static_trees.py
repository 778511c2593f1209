"""Drafters of heads and their graphs, and the static tree of their candidates as Python walks it, node by node."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from redraft import names
from redraft.export.drafters import find_exporter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.writing import Target
from redraft.methods.static_tree import Node, StaticTreeBuild, best_tree
from redraft.noise_spec import DRAWN
from tests.noise import noise_rows

from .tiny import VOCABULARY, Verifier, token_data

ACCURACIES = ((0.6, 0.2, 0.1), (0.5, 0.25, 0.05), (0.4, 0.1, 0.1))
POSITION = 21
"""Of the noise of the first drafted token."""


@dataclass(frozen=True)
class Case:
    """How a drafter is trained and built. drafted: its tokens."""

    options: StaticTreeBuild
    drafted: int = VOCABULARY
    trained: int = 0


CASES = {
    "whole": Case(StaticTreeBuild(nodes=12)),
    "trained": Case(StaticTreeBuild(nodes=6, steps=2, width=2), 9, 9),
    "pruned chain": Case(StaticTreeBuild(width=1, draft_vocabulary=8), 8),
}


@dataclass(frozen=True)
class Exported:
    """A drafter's exported graph in its folder, the verifier's head for its tokens, and these tokens."""

    folder: Path
    shape: Any
    head: torch.Tensor
    vocabulary: np.ndarray


def write_heads(folder: Path, method: str, module: nn.Module, config: Any, verifier: Verifier) -> DrafterCheckpoint:
    """A drafter's folder."""
    data, identity = token_data(config), Identity.of(verifier.checkpoint)
    save_drafter(folder, method, config, identity, module, data.counts, {}, data.draft_vocabulary)
    return DrafterCheckpoint.open(folder)


def export_heads(method: str, module: nn.Module, config: Any, case: Case, verifier: Verifier, folder: Path) -> Exported:
    """Write a drafter and its graph `m`."""
    config = replace(config, draft_vocab_size=case.trained)
    opened = write_heads(folder / "drafter", method, module, config, verifier)
    shutil.copytree(verifier.folder, folder / "graphs")
    target = Target("m", verifier.export, folder / "graphs", replace(case.options, precision="fp32"))
    made = find_exporter(method).trained(target, opened, Identity.of(verifier.checkpoint))
    assert made.shape.draft_vocabulary == case.drafted
    vocabulary = np.arange(VOCABULARY)
    if case.drafted < VOCABULARY:
        (ref,) = made.tables
        vocabulary = np.fromfile(folder / "graphs" / ref.file, np.int64, ref.shape[0], offset=ref.offset)
    head = load_file(verifier.checkpoint.path / "model.safetensors")["lm_head.weight"]
    return Exported(folder / "graphs", made.shape, head[torch.from_numpy(vocabulary)], vocabulary)


CERTAIN = -(2.0**-20)
"""Largest log probability of a candidate."""


@dataclass(frozen=True)
class Sampling:
    """How one sequence samples: its logit scale and temperature, its seed, and whether candidates are drawn."""

    scale: float
    temperature: float = 0.0
    seed: int = 0
    drawn: bool = False

    @property
    def stream(self) -> int:
        return DRAWN if self.drawn else 0


def expected_tree(
    tree: Iterable[Node], vocabulary: np.ndarray, root: int, z: torch.Tensor, drawn: bool
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and joint log probabilities of the static tree over scaled, noisy logits [N, H].

    vocabulary: the token of each column.
    """
    log_probs, ranked = z.log_softmax(-1), z.argsort(-1, descending=True)
    nodes = {}
    for path in tree:
        parent = nodes[path[:-1]][1] if len(path) > 1 else 0.0
        column = int(ranked[len(path) - 1, path[-1]])
        added = min(float(log_probs[len(path) - 1, column]), CERTAIN)
        nodes[path] = int(vocabulary[column]), parent + added
    order = list(nodes) if drawn else sorted(nodes, key=lambda path: -nodes[path][1])
    places = {(): 0, **{path: place for place, path in enumerate(order, 1)}}
    return (
        [root, *(nodes[path][0] for path in order)],
        [-1, *(places[path[:-1]] for path in order)],
        [0.0, *(nodes[path][1] for path in order)],
    )


def check_tree(
    drafter: Exported, outputs: Mapping[str, np.ndarray], slot: int, root: int, logits: torch.Tensor, one: Sampling
) -> None:
    """The logits of a call's slot are these [N, H], and its tree has their candidates."""
    shape = drafter.shape
    np.testing.assert_allclose(outputs[names.CHAIN_LOGITS][slot], logits, atol=1e-4)
    noise = noise_rows(one.seed, POSITION, shape.steps, drafter.vocabulary, one.stream)
    z = (logits + np.float32(one.temperature) * torch.from_numpy(noise)) * one.scale
    tokens, parents, log_probs = expected_tree(shape.tree, drafter.vocabulary, root, z, one.drawn)
    assert outputs[names.TREE_TOKENS][slot].tolist() == tokens
    assert outputs[names.TREE_PARENTS][slot].tolist() == parents
    found = outputs[names.TREE_LOG_PROBS][slot].tolist()
    if one.drawn:  # what was drawn decides about no node
        products = best_tree([shares[: shape.width] for shares in ACCURACIES[: shape.steps]], len(shape.tree))
        assert all(first > second for first, second in pairwise(found))
        np.testing.assert_allclose(np.exp(found[1:]), list(products.values()), rtol=1e-4)
    else:
        np.testing.assert_allclose(found, log_probs, atol=1e-4)


GREEDY, NOISY, DRAWS = Sampling(1.3), Sampling(0.7, 1.4, seed=1), Sampling(1 / 0.8, 0.8, seed=5, drawn=True)
