"""In every lowered graph, other rows of a call never change a bit of a sequence's logits and KV rows."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest

from redraft import names
from redraft.engines import host_device
from redraft.engines.bundle import Bundle
from redraft.engines.host_device import BLOCK_ROWS, HostDevice
from redraft.runtime.steps.exactness import measure_exactness
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.tree import chain, exact_part
from redraft.types import DraftTree
from tests.engines.graphs import Decoder

from .test_graphs import DECODERS, LARGE, lowered

LONG = Decoder(max_positions=400, head_dim=64)
"""Whose heads add up 256 keys at a time."""
SHARED = [(8, 1, 64), (9, 3, 64), (16, 8, 128), (4, 1, 256), (4, 4, 64)]
"""Query heads, key heads and head sizes, for which threads share products differently."""


def open_form(
    decoder: Decoder, bundle: Bundle, form: str, max_num_seqs: int = 1, threads: int = 2, rows: int | None = None
) -> Verifier:
    """The verifier over one of the bundle's graphs."""
    device = HostDevice(bundle, threads, step_graphs=False, verifier_graph=form)
    return Verifier(device, decoder.shape, rows or decoder.max_positions, max_num_seqs, decoder.hidden_states)


def open_verifier(decoder: Decoder, bundle: Bundle, form: str, max_num_seqs: int) -> Verifier:
    """The verifier over one of the bundle's graphs, with trees."""
    verifier = open_form(decoder, bundle, form, max_num_seqs)
    verifier.take_branches()
    return verifier


@pytest.fixture(scope="module", params=[*DECODERS.values(), *LARGE.values()], ids=[*DECODERS, *LARGE])
def case(request, tmp_path_factory):
    """A decoder and its bundle."""
    return request.param, lowered(request.param, tmp_path_factory.mktemp("case"))


def test_rows_trees_slots_and_batches_change_no_bit(case, operators_library):
    decoder, bundle = case
    for form, max_num_seqs in ((names.VERIFIER_BATCH, 4), (names.VERIFIER_SINGLE, 1), (names.VERIFIER_OPERATORS, 4)):
        if form in bundle.manifest.graphs:
            found = measure_exactness(open_verifier(decoder, bundle, form, max_num_seqs))
            assert found.holds, (form, found.differences)
            assert found.compared > 1000


def test_the_graph_for_one_sequence_is_that_for_batches(case):
    decoder, bundle = case
    if names.VERIFIER_SINGLE not in bundle.manifest.graphs:
        pytest.skip("has no graph for one sequence")
    text = np.random.default_rng(1).integers(0, decoder.vocabulary, 40)
    verifiers = [open_form(decoder, bundle, form, rows=64) for form in (names.VERIFIER_BATCH, names.VERIFIER_SINGLE)]
    for start, end in ((0, 30), (30, 31), (31, 37), (37, 40)):
        one, other = (verifier.logits([chain(text[start:end])], [start])[0] for verifier in verifiers)
        assert one.tobytes() == other.tobytes()
    one, other = (verifier.steps.kv[:, :, :, :40].tobytes() for verifier in verifiers)
    assert one == other


@pytest.mark.parametrize("form", [names.VERIFIER, names.VERIFIER_FAST])
def test_graphs_that_round_otherwise_are_found_out(form, tmp_path):
    """The check above can fail: it fails on the portable graph and on the faster one."""
    bundle = lowered(Decoder(), tmp_path)
    found = measure_exactness(open_verifier(Decoder(), bundle, form, 3 if form == names.VERIFIER else 1))
    assert {"one row in a call", "a tree's branch"} <= set(found.differences)
    assert not found.holds


@pytest.fixture(scope="module")
def long_bundle(tmp_path_factory):
    return lowered(LONG, tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("form", [names.VERIFIER_BATCH, names.VERIFIER_SINGLE, names.VERIFIER_OPERATORS])
def test_the_number_of_committed_rows_and_the_chunks_of_a_prompt_change_no_bit(long_bundle, form, operators_library):
    """Over multiples of the rows that products sum at a time."""
    verifier = open_verifier(LONG, long_bundle, form, 1)
    text = np.random.default_rng(2).integers(0, LONG.vocabulary, 390)
    (whole,) = verifier.logits([chain(text)], [0])
    kept = verifier.steps.kv[:, :, :, :390].copy()
    for past in (1, 126, 127, 128, 129, 255, 256, 257, 370):
        verifier.steps.kv[:] = 7
        for start in range(0, past, 48):
            (rows,) = verifier.logits([chain(text[start : min(start + 48, past)])], [start])
            assert rows.tobytes() == whole[start : min(start + 48, past)].tobytes(), past
        for rows in (1, 2, 7, 16):
            (found,) = verifier.logits([chain(text[past : past + rows])], [past])
            assert found.tobytes() == whole[past : past + rows].tobytes(), (past, rows)
        assert verifier.steps.kv[:, :, :, :past].tobytes() == kept[:, :, :, :past].tobytes(), past


def branched(text: np.ndarray, others: np.ndarray) -> tuple[DraftTree, list[int]]:
    """A tree of three branches, with the text as the last one: its nodes, and the nodes of the text."""
    parents = np.array([-1, 0, 1, 0, 3, 0, 5, 6, 7], dtype=np.int64)
    path = [0, 5, 6, 7, 8]
    tokens = others[: len(parents)].copy()
    tokens[path] = text[: len(path)]
    return DraftTree(tokens, parents, -np.arange(9, dtype=np.float32)), path


def test_a_tree_has_the_bits_of_a_chain_unless_it_crosses_a_block(long_bundle):
    """If it would, only the part that does not is verified, by `exact_part` as in the cycle."""
    verifier = open_verifier(LONG, long_bundle, names.VERIFIER_SINGLE, 1)
    text, others = np.random.default_rng(3).integers(0, LONG.vocabulary, (2, 390))
    (whole,) = verifier.logits([chain(text)], [0])
    for past in (254, 128, 127, 120, 119, 1):  # the text's rows before it stay
        tree, path = branched(text[past:], others)
        part = exact_part(tree, past, verifier.branches, verifier.block_rows)
        assert (len(part) == len(tree)) == (past % BLOCK_ROWS <= BLOCK_ROWS - len(tree))
        (found,) = verifier.logits([part], [past])
        seen = [node for node in path if node < len(part)]
        assert found[seen].tobytes() == whole[past : past + len(seen)].tobytes(), past


@pytest.mark.parametrize("form", [names.VERIFIER_BATCH, names.VERIFIER_OPERATORS])
def test_one_slot_of_eight_with_others_of_other_lengths(long_bundle, form, operators_library):
    verifier = open_verifier(LONG, long_bundle, form, 8)
    text, *others = np.random.default_rng(4).integers(0, LONG.vocabulary, (8, 60))
    (whole,) = verifier.logits([chain(text)], [0])
    for slot in (0, 3, 7):
        texts = [*others[:slot], text, *others[slot:]]
        pasts = [30 if other is text else 3 + 5 * number for number, other in enumerate(texts)]
        verifier.logits([chain(other[:40]) for other in texts], [0] * 8)
        trees = [chain(other[past : past + 1 + n]) for n, (other, past) in enumerate(zip(texts, pasts, strict=True))]
        for tree, nodes in (
            (chain(text[30:31]), [0]),
            (chain(text[30:36]), list(range(6))),
            branched(text[30:], others[0]),
        ):
            trees[slot] = tree
            found = verifier.logits(trees, pasts)[slot]
            assert found[nodes].tobytes() == whole[30 : 30 + len(nodes)].tobytes(), slot


@pytest.mark.parametrize("most_copied", [0, 1 << 30])
def test_a_tree_that_branches_needs_its_engine(tmp_path, monkeypatch, most_copied):
    """It is opened besides that for chains, or in its place if the weights are large."""
    monkeypatch.setattr(host_device, "MOST_COPIED_BYTES", most_copied)
    bundle = lowered(Decoder(), tmp_path)
    verifier = open_form(Decoder(), bundle, names.VERIFIER_SINGLE, rows=64)
    text = np.arange(20) % 61
    expected = verifier.logits([chain(text)], [0])[0]
    first = weakref.ref(verifier.steps._engine)
    assert not verifier.branches
    tree, _ = branched(*np.random.default_rng(5).integers(0, 61, (2, 20)))
    part = exact_part(tree, 0, verifier.branches, verifier.block_rows)
    assert part.parents.tolist() == [-1, 0, 1]
    verifier.take_branches()
    assert verifier.branches
    assert exact_part(tree, 0, verifier.branches, verifier.block_rows) is tree
    assert (first() is None) == (most_copied == 0)
    assert verifier.logits([chain(text)], [0])[0].tobytes() == expected.tobytes()


def test_a_bundle_without_lowered_graphs_runs_the_portable_one(tmp_path):
    bundle = lowered(Decoder(), tmp_path)
    only = Bundle(tmp_path, replace(bundle.manifest, graphs={names.VERIFIER: bundle.graph(names.VERIFIER)}))
    assert {only.host_graph(single, exact) for single in (True, False) for exact in (True, False)} == {names.VERIFIER}
    assert [bundle.host_graph(True), bundle.host_graph(True, exact=False), bundle.host_graph(False, exact=False)] == [
        names.VERIFIER_SINGLE, names.VERIFIER_FAST, names.VERIFIER_BATCH,
    ]  # fmt: skip
    assert [bundle.host_graph(True, operators=True), only.host_graph(True, operators=True)] == [
        names.VERIFIER_OPERATORS, names.VERIFIER,
    ]  # fmt: skip


@pytest.mark.parametrize("form", [names.VERIFIER_BATCH, names.VERIFIER_OPERATORS])
@pytest.mark.parametrize("heads", SHARED, ids=str)
def test_threads_that_share_a_product_change_no_bit(heads, form, tmp_path, operators_library):
    """Over one block of keys and several, one row and many, alone and in a batch."""
    q_heads, kv_heads, head_dim = heads
    decoder = Decoder(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, layers=1, max_positions=700)
    bundle = lowered(decoder, tmp_path)
    text = np.random.default_rng(6).integers(0, decoder.vocabulary, 660)
    alone, *shared = (open_form(decoder, bundle, form, slots, threads) for threads, slots in ((1, 1), (4, 3), (16, 3)))
    done = 0
    for kv_len in (70, 130, 300, 600):
        for verifier in (alone, *shared):
            for start in range(done, kv_len, 64):
                verifier.logits([chain(text[start : min(start + 64, kv_len)])], [start])
        done = kv_len
        (expected,) = alone.logits([chain(text[kv_len : kv_len + 40])], [kv_len])
        for verifier in shared:
            for rows in (1, 2, 4, 16, 40):
                (found,) = verifier.logits([chain(text[kv_len : kv_len + rows])], [kv_len])
                assert found.tobytes() == expected[:rows].tobytes(), (kv_len, rows)
            for slot in (1, 2):
                verifier.move(0, slot, kv_len)
            batch = verifier.logits([chain(text[kv_len : kv_len + 3])] * 3, [kv_len] * 3)
            assert batch[2].tobytes() == expected[:3].tobytes()
