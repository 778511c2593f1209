"""Engines on ONNX Runtime: bound arrays, prepared calls, KV updated in place, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from redraft import names
from redraft.engines.bundle import Bundle, open_bundle
from redraft.engines.onnxruntime_backend import OnnxRuntimeEngine, open_engine
from redraft.errors import BundleError

from .bundles import write_bundle
from .graphs import Decoder

DECODER = Decoder()
CAPACITY = 24
CACHE_BYTES = DECODER.kv_heads * CAPACITY * DECODER.head_dim * 4
COPY_WARNING = f"copying past_cache to present_cache ({CACHE_BYTES} bytes)"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    out = tmp_path_factory.mktemp("engines") / "small"
    write_bundle(out, DECODER)
    return open_bundle(out)


def bound_engine(bundle: Bundle, slots: int = 1, log: str = "error") -> tuple[OnnxRuntimeEngine, dict[str, np.ndarray]]:
    engine = open_engine(bundle, threads=1, log=log)
    shape = bundle.manifest.shape
    caches = {
        spec.name: np.full((slots, shape.kv_heads, CAPACITY, shape.head_dim), 7.0, np.float32)
        for spec in engine.inputs
        if spec.name.startswith("kv.")
    }
    for name, buffer in caches.items():
        engine.bind(name, buffer)
    return engine, caches


def run_chain(engine, tokens, past, batch=1):
    """Logits of every row of a chain that follows `past` live rows."""
    count = len(tokens)
    call = engine.prepare(B=batch, T=count, R=count)
    call.inputs[names.TOKEN_IDS][:] = tokens
    call.inputs[names.POSITIONS][:] = np.arange(past, past + count)
    call.inputs[names.TREE_MASK][:] = np.tril(np.ones((count, count), bool))
    call.inputs[names.PAST_LEN][:] = past
    call.inputs[names.LIVE][:] = past + count
    call.inputs[names.OUTPUT_ROWS][:] = np.arange(count)
    call.run()
    return call.outputs[names.LOGITS].copy()


def test_steps_over_the_bound_cache_equal_one_prefill(bundle):
    tokens = [5, 9, 3, 40, 2, 17]
    whole = run_chain(bound_engine(bundle)[0], tokens, 0)
    engine, _ = bound_engine(bundle)
    steps = [run_chain(engine, tokens[:3], 0)] + [run_chain(engine, [t], 3 + i) for i, t in enumerate(tokens[3:])]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), whole, atol=1e-5)


def test_cache_is_written_in_place_and_nowhere_else(bundle, capfd):
    engine, caches = bound_engine(bundle, log="warning")
    run_chain(engine, [5, 9, 3], 4)
    for name, buffer in caches.items():
        changed = np.unique(np.nonzero(buffer != 7.0)[2])
        assert changed.tolist() == [4, 5, 6], name
    assert COPY_WARNING not in capfd.readouterr().err


def test_runtime_warns_of_a_cache_that_is_not_updated_in_place(bundle, capfd):
    """The check above can fail: without the aliasing, ONNX Runtime does say so."""
    engine = open_engine(bundle, threads=1, log="warning")
    copying = OnnxRuntimeEngine(
        engine._session, engine.inputs, tuple(replace(spec, in_place_of=None) for spec in engine.outputs)
    )
    call = copying.prepare(B=1, T=1, R=1, C=CAPACITY)
    call.inputs[names.LIVE][:] = 1
    call.inputs[names.TREE_MASK][:] = True
    call.run()
    assert COPY_WARNING in capfd.readouterr().err


def test_calls_are_kept_and_their_arrays_reused(bundle):
    engine, caches = bound_engine(bundle)
    call = engine.prepare(B=1, T=2, R=1)
    assert engine.prepare(R=1, T=2, B=1) is call
    assert call.outputs[names.LOGITS].shape == (1, 1, DECODER.vocabulary)
    assert set(call.inputs) == {names.TOKEN_IDS, names.POSITIONS, names.TREE_MASK, names.PAST_LEN, names.LIVE,
                                names.OUTPUT_ROWS}  # fmt: skip
    assert all(array.ctypes.data % 64 == 0 for array in (*call.inputs.values(), *call.outputs.values()))
    engine.bind(names.key_cache(0), caches[names.key_cache(0)].copy())
    assert engine.prepare(B=1, T=2, R=1) is not call


def test_a_smaller_batch_uses_the_first_slots(bundle):
    engine, caches = bound_engine(bundle, slots=3)
    alone = run_chain(bound_engine(bundle)[0], [5, 9], 0)
    both = run_chain(engine, [5, 9], 0, batch=2)
    np.testing.assert_allclose(both[1], alone[0], atol=1e-5)
    key = caches[names.key_cache(0)]
    assert (key[:2, :, 0] != 7.0).all()
    assert (key[2] == 7.0).all()


def test_wrong_buffers_and_sizes_are_refused_by_name(bundle):
    engine = open_engine(bundle, threads=1)
    with pytest.raises(ValueError, match=r"bind kv\.0\.key"):
        engine.prepare(B=1, T=1, R=1)
    good = np.zeros((1, DECODER.kv_heads, CAPACITY, DECODER.head_dim), np.float32)
    for name, buffer, message in (
        ("kv.9.key", good, "no input"),
        ("kv.0.key", good.astype(np.float64), "float32"),
        ("kv.0.key", good[..., ::2], "C-contiguous"),
        ("kv.0.key", good[..., :8].copy(), "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.bind(name, buffer)
    engine, _ = bound_engine(bundle)
    with pytest.raises(ValueError, match="B, R, T"):
        engine.prepare(B=1, T=1)
    with pytest.raises(ValueError, match="more than the 1"):
        engine.prepare(B=2, T=1, R=1)


def test_a_graph_that_is_not_what_the_manifest_says_is_refused(bundle):
    record = bundle.manifest.graphs[names.VERIFIER]

    def with_graph(**changes):
        return replace(bundle, manifest=replace(bundle.manifest, graphs={names.VERIFIER: replace(record, **changes)}))

    renamed = (replace(record.inputs[0], name="input_ids"), *record.inputs[1:])
    with pytest.raises(BundleError, match="expected tensor input_ids, found none"):
        open_engine(with_graph(inputs=renamed))
    retyped = (replace(record.outputs[0], dtype="float16"), *record.outputs[1:])
    with pytest.raises(BundleError, match="expected logits float16"):
        open_engine(with_graph(outputs=retyped))
    with pytest.raises(BundleError, match="does not load"):
        open_engine(with_graph(file="tokenizer.json"))
    with pytest.raises(BundleError, match=r"expected a graph 'verifier\.single', found verifier"):
        open_engine(bundle, names.VERIFIER_SINGLE)


def test_an_older_onnxruntime_is_refused(bundle):
    newer = replace(bundle, manifest=replace(bundle.manifest, backend_version="99.0.0"))
    with pytest.raises(BundleError, match=r"expected ONNX Runtime 99\.0\.0 or newer"):
        open_engine(newer)
