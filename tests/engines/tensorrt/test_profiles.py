"""Profiles: every dynamic input has a range in each, in order; trees outside all of them are refused."""

from __future__ import annotations

import pytest

from redraft import names, signatures
from redraft.engines import check_max_num_seqs, check_tree
from redraft.engines.tensorrt.profiles import CallLimits, drafter_symbols, profiles_of
from redraft.engines.tensorrt_records import EngineRecord, Range, TensorRtRecord
from redraft.errors import UsageError
from redraft.methods import decoder
from redraft.methods.lyanna import LyannaShape, draft_inputs, resample_inputs
from redraft.names import TensorSpec
from redraft.signatures import VerifierShape
from tests.engines.bundles import manifest_of
from tests.engines.drafters import LYANNA_DRAFT, LYANNA_RESAMPLE, symbols_of
from tests.engines.graphs import Decoder

SHAPE = VerifierShape(2, 2, 16, 32, 61, 64)
LYANNA = LyannaShape(32, 61, 2, 16, 3, 4, 12, 7, "fp16", 61, 8)
LIMITS = CallLimits(batch=4, tree=16, prefill=32, max_model_len=64, usual=9)
SIGNATURES = {
    names.VERIFIER: signatures.verifier_inputs(SHAPE),
    LYANNA_DRAFT: draft_inputs(LYANNA),
    LYANNA_RESAMPLE: resample_inputs(LYANNA),
    **{graph: signatures.step_signatures(SHAPE, gathers=True)[graph][0] for graph in (
        names.STEP_PREPARE_TREE, names.STEP_ACCEPT, names.STEP_ACCEPT_SAMPLED, names.STEP_COMPACT_KV,
        names.STEP_GATHER_FEATURES, names.STEP_STORE_TREES,
    )},
}  # fmt: skip
ONE = CallLimits(1, 16, prefill=1, max_model_len=64)


def test_the_verifier_has_a_profile_for_prefill_one_token_and_trees() -> None:
    prefill, token, tree = profiles_of(
        symbols_of(names.VERIFIER, LIMITS), SIGNATURES[names.VERIFIER], LIMITS, kv_len_is_shape=False
    )
    assert [profile.name for profile in (prefill, token, tree)] == ["prefill", "token", "tree"]
    assert prefill.inputs[names.TOKEN_IDS] == Range((1, 1), (1, 32), (1, 32))
    assert token.inputs[names.TOKEN_IDS] == Range((1, 1), (1, 1), (4, 1))
    assert tree.inputs[names.TREE_MASK] == Range((1, 2, 2), (1, 13, 13), (4, 16, 16))
    assert prefill.inputs[names.OUTPUT_ROWS].max == (1, 1)
    assert tree.inputs[names.key_cache(1)] == Range((1, 2, 2, 16), (1, 2, 64, 16), (4, 2, 64, 16))


def test_trees_are_tuned_and_taken_as_wide_as_they_are_padded() -> None:
    """Nine nodes are padded to thirteen, so the engine is tuned for thirteen; seventeen are padded to 32."""
    assert (LIMITS.tuned, LIMITS.widest) == (13, 16)
    assert CallLimits(1, 17, 32, 64).widest == 32
    assert CallLimits(1, 65, 32, 128).widest == 96  # wider than the widest: in steps of 32
    assert CallLimits(1, 33, 32, 40).widest == 40  # the buffers have no more rows
    assert CallLimits(1, 8, 32, 64, usual=9).tuned == 8


def test_a_drafters_calls_have_two_widths() -> None:
    (resampling,) = profiles_of(symbols_of(LYANNA_RESAMPLE, LIMITS), SIGNATURES[LYANNA_RESAMPLE], LIMITS, False)
    assert resampling.inputs[names.TOKENS] == Range((1,), (1,), (4,))
    prompt, step = profiles_of(symbols_of(LYANNA_DRAFT, LIMITS), SIGNATURES[LYANNA_DRAFT], LIMITS, kv_len_is_shape=True)
    assert prompt.inputs[names.TOKENS] == Range((1, 64), (1, 64), (4, 64))
    assert step.inputs[names.TOKENS] == Range((1, 16), (1, 16), (4, 16))
    assert step.inputs[names.KV_LEN] == Range((16,), (32,), (192,))


def test_accepted_rows_are_kept_of_trees_only() -> None:
    (found,) = profiles_of(
        symbols_of(names.STEP_COMPACT_KV, LIMITS), SIGNATURES[names.STEP_COMPACT_KV], LIMITS, kv_len_is_shape=True
    )
    assert found.inputs[names.PATH] == Range((1, 2), (1, 13), (4, 16))
    rows_are_fixed = Range((1, 2, 64, 16), (1, 2, 64, 16), (4, 2, 64, 16))
    assert found.inputs[names.value_cache(1)] == rows_are_fixed  # as TensorRT's own KV update wants them


def test_a_tree_that_a_drafter_left_has_sizes_of_its_own() -> None:
    """A graph over S nodes in the store; a call verifies T of them."""
    inputs = (TensorSpec(names.TREE_PARENTS, "int64", ("B", "S")), TensorSpec(names.POSITIONS, "int64", ("B", "T")))
    one, tree = profiles_of(symbols_of(names.STEP_PREPARE_TREE, LIMITS), inputs, LIMITS, kv_len_is_shape=False)
    assert one.inputs[names.TREE_PARENTS] == tree.inputs[names.TREE_PARENTS] == Range((1, 1), (1, 13), (4, 16))
    assert one.inputs[names.POSITIONS].max == (4, 1)


def test_profiles_that_would_be_the_same_are_one() -> None:
    """The prompts are computed token by token."""
    inputs = SIGNATURES[names.VERIFIER]
    found = profiles_of(symbols_of(names.VERIFIER, ONE), inputs, ONE, kv_len_is_shape=False)
    assert [profile.name for profile in found] == ["prefill", "tree"]


def test_calls_larger_than_the_profiles_are_refused_with_a_hint() -> None:
    profiles = profiles_of(
        symbols_of(names.VERIFIER, LIMITS), SIGNATURES[names.VERIFIER], LIMITS, kv_len_is_shape=False
    )
    record = TensorRtRecord("10.13.3", "GPU", "9.0", "plugin", engines={names.VERIFIER: EngineRecord("", "", profiles)})
    batch, tree = manifest_of(Decoder(), tensorrt=record).largest_call or (0, 0)
    assert (batch, tree) == (4, 16)
    assert manifest_of(Decoder()).largest_call is None
    check_tree(tree, 16)
    with pytest.raises(UsageError, match=r"a tree of 17 nodes.*than the 16.*--budget nodes to 15.*--tree-nodes 17"):
        check_tree(tree, 17)
    check_max_num_seqs(batch, 4)
    with pytest.raises(UsageError, match=r"5 sequences at once.*than the 4.*slots to 4.*--batch 5"):
        check_max_num_seqs(batch, 5)


@pytest.mark.parametrize("max_model_len", [16, 40, 64, 4096])
def test_every_profile_has_ordered_ranges_and_kv_buffers_that_hold_the_rows_of_its_call(max_model_len: int) -> None:
    """At the smallest, the tuned and the largest size: a drafter's calls have 16 or 64 rows at any `max_model_len`."""
    limits = CallLimits(batch=2, tree=16, prefill=128, max_model_len=max_model_len)
    prefill = profiles_of(symbols_of(names.VERIFIER, limits), SIGNATURES[names.VERIFIER], limits, False)[0]
    chunk = min(128, max_model_len)  # no option lowers the chunk, so a short context must not be refused for it
    assert prefill.inputs[names.TOKEN_IDS] == Range((1, 1), (1, chunk), (1, chunk))
    for graph, inputs in SIGNATURES.items():
        symbols = symbols_of(graph, limits)
        for sizes in symbols.values():
            rows = next((sizes[symbol] for symbol in ("M", "T") if symbol in sizes), None)
            if rows and "C" in sizes:
                assert all(c >= m for c, m in zip(sizes["C"], rows, strict=True)), graph
        for profile in profiles_of(symbols, inputs, limits, kv_len_is_shape=True):
            shapes = {spec.name: spec.shape for spec in inputs}
            dynamic = {name for name, shape in shapes.items() if any(isinstance(dim, str) for dim in shape)}
            assert set(profile.inputs) - {names.KV_LEN} == dynamic
            for name, found in profile.inputs.items():
                sizes = list(zip(shapes[name], found.min, found.opt, found.max, strict=True))
                assert all(1 <= least <= tuned <= most for _, least, tuned, most in sizes), (graph, name)
                if name != names.KV_LEN:
                    assert all(dim == most for dim, _, _, most in sizes if isinstance(dim, int)), (graph, name)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        UsageError,
        match="tree of 65 tokens does not fit in the context of 64; raise --max-model-len, or lower --tree-nodes to 64",
    ):
        CallLimits(batch=1, tree=65, prefill=32, max_model_len=64)
    with pytest.raises(UsageError, match="at least one sequence"):
        CallLimits(batch=0, tree=16, prefill=32, max_model_len=64)


def test_slots_begin_at_addresses_that_tensorrt_takes() -> None:
    """With a context that is no multiple of 16 and rows of 16 bytes, the next slot would begin between two places."""
    limits = CallLimits(batch=2, tree=4, prefill=8, max_model_len=33)
    symbols = symbols_of(names.VERIFIER, limits)
    tree = profiles_of(symbols, SIGNATURES[names.VERIFIER], limits, kv_len_is_shape=False)[-1]
    assert tree.inputs[names.key_cache(0)].max == (2, 2, 48, 16)
    assert [names.kv_rows(tokens) for tokens in (1, 16, 33)] == [16, 16, 48]


@pytest.mark.parametrize("max_model_len", [16, 4096])
def test_a_decoder_that_drafts_has_profiles_for_prompts_for_steps_and_for_each_further_token(
    max_model_len: int,
) -> None:
    limits = CallLimits(batch=2, tree=16, prefill=128, max_model_len=max_model_len)
    symbols = drafter_symbols(decoder.METHOD.graphs[names.DRAFT], decoder.METHOD.spare_rows, limits)
    inputs = decoder.draft_inputs(decoder.DecoderShape(3, 32, 61, 2, 16, 24, 4, 33, 61))
    found = profiles_of(symbols, inputs, limits, kv_len_is_shape=True)
    assert [profile.inputs[names.TOKEN_IDS].max for profile in found] == [(2, 64), (2, 16), (2, 1)]
    assert [profile.inputs[names.OUTPUT_ROWS].max for profile in found] == [(2, 8), (2, 8), (2, 1)]
    for profile, sizes in zip(found, symbols.values(), strict=True):
        assert all(rows >= new for rows, new in zip(sizes["C"], sizes["T"], strict=True))
        for ranges in profile.inputs.values():
            assert all(a <= b <= c for a, b, c in zip(ranges.min, ranges.opt, ranges.max, strict=True))
