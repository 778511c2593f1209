"""Bytes that a call must move, worked out by hand, and the timing of real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save
from tests.engines.bundles import manifest_of, write_bundle
from tests.engines.drafters import LYANNA_DRAFT, LYANNA_RESAMPLE, lyanna_record
from tests.engines.graphs import Decoder
from tests.runtime.devices import Fakes, tensorrt_device
from tests.runtime.fakes import CURVE
from tests.runtime.lyanna_bundle import CONTEXT
from tests.standins.cuda import FakeCuda

from redraft import names
from redraft.bench import roofline
from redraft.bench.roofline import COPIES, LEAST_STREAMED_BYTES, DeviceStream, HostStream, Traffic, measure, traffic
from redraft.engines import Bundle, open_bundle
from redraft.engines.host_device import HostDevice
from redraft.engines.tensorrt.profiles import CallLimits, profiles_of, verifier_symbols
from redraft.engines.tensorrt_records import EngineRecord, TensorRtRecord
from redraft.errors import BackendError
from redraft.methods.lyanna import METHOD, LyannaShape
from redraft.runtime import api
from redraft.runtime.controllers.cost import VerifyCosts

DECODER = Decoder()
TOKENS, KV_LEN = 3, 40
KV_ROW = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size of a head, float32
LYANNA = LyannaShape(hidden=32, vocabulary=61, kv_heads=2, head_dim=16, steps=4, width=3, nodes=13, resample_nodes=7,
                     token_info="int8", draft_vocabulary=20, rank=5)  # fmt: skip


def test_a_verifiers_call(tmp_path: Path) -> None:
    """All weights, but only the tokens' rows of the embedding, unless the head is the same table."""
    write_bundle(tmp_path / "bundle", DECODER)
    bundle = open_bundle(tmp_path / "bundle")
    found = traffic(bundle, names.VERIFIER, TOKENS, KV_LEN)
    assert (found.kv_read, found.kv_written) == (KV_LEN * KV_ROW, TOKENS * KV_ROW)
    assert found.inputs == 8 * (TOKENS + TOKENS + 1 + 1 + TOKENS) + TOKENS * TOKENS
    assert found.outputs == 4 * TOKENS * (DECODER.vocabulary + DECODER.hidden)
    products = DECODER.hidden * (64 + 32 + 32 + 64 + 3 * DECODER.mlp) * DECODER.layers * 4
    assert products < found.weights < products + 2 * DECODER.vocabulary * DECODER.hidden * 4 + 5000
    assert found.total == found.weights + found.kv_read + found.kv_written + found.inputs + found.outputs


def write_graph(folder: Path, *uses: tuple[str, int]) -> Bundle:
    """A bundle with a graph of Lyanna's signature and one weight [7, 10] that these operators read."""
    weight = numpy_helper.from_array(np.zeros((7, 10), np.float32), "weight")
    nodes = [helper.make_node(op, ["x"] * place + ["weight"], [f"y{i}"]) for i, (op, place) in enumerate(uses)]
    outputs = [helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)]
    save(helper.make_model(helper.make_graph(nodes, "g", [], outputs, [weight])), folder / "graph.onnx")
    drafters = {METHOD.id: lyanna_record(LYANNA)}
    return Bundle(folder, manifest_of(DECODER, drafters=drafters))


def sampling_bytes(levels: int) -> int:
    """Bytes of logit scale, noise scale, keys of a tree's levels, and the mark of drawn candidates."""
    return 4 + 4 + levels * 2 * 8 + 8


def test_a_draft_reads_a_row_for_the_root_and_some_for_every_later_level(tmp_path: Path) -> None:
    """It also reads the row's number of the root, and the token of every other node."""
    found = traffic(write_graph(tmp_path, ("MatMul", 1)), LYANNA_DRAFT, 2, KV_LEN)
    token_info = (1 + 3 * 3) * (20 + 4) + 8
    cache_row = 2 * 2 * 16 * 4
    assert found == Traffic(
        weights=280 + token_info + 12 * 8,
        kv_read=KV_LEN * cache_row,
        kv_written=(2 + 3) * cache_row,
        inputs=2 * 32 * 4 + 8 * (2 + 2 + 1 + 1 + 1) + sampling_bytes(4),
        outputs=13 * (8 + 8 + 4) + 4 * 20 * 4,
    )


def test_a_resampling_has_a_level_fewer_and_no_kv(tmp_path: Path) -> None:
    found = traffic(write_graph(tmp_path, ("Identity", 0)), LYANNA_RESAMPLE, 1, KV_LEN)
    assert found.weights == 280 + (1 + 2 * 3) * (20 + 4) + 8 + 6 * 8
    assert (found.kv_read, found.kv_written) == (0, 0)
    assert found.inputs == 4 * 20 * 4 + 8 + 8 + sampling_bytes(3)


def test_a_table_is_read_by_rows_and_a_product_s_weight_once(tmp_path: Path) -> None:
    product, row, index = ("MatMul", 1), ("Gather", 0), ("Gather", 1)
    rest = (1 + 2 * 3) * (20 + 4) + 8 + 6 * 8
    for uses, size in (((product, product), 280), ((row,), 3 * 40), ((index,), 280), ((row, product), 3 * 40 + 280)):
        assert traffic(write_graph(tmp_path, *uses), LYANNA_RESAMPLE, 3, KV_LEN).weights - rest == size


def test_engines_are_timed_one_token_and_a_tree(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", DECODER)
    found = measure(tmp_path / "bundle", threads=1, nodes=4, kv_len=1000)
    assert [(engine.graph, engine.tokens) for engine in found.engines] == [("verifier", 1), ("verifier", 4)]
    assert found.kv_len == DECODER.max_positions - 4
    for engine in found.engines:
        assert engine.gigabytes_per_second == pytest.approx(engine.traffic.total / engine.ms / 1e6)
        assert engine.share_of_bandwidth == pytest.approx(engine.gigabytes_per_second / max(found.read, found.copy))
    header, one, tree = roofline.table(found)
    assert (header, one[:2], tree[:2]) == (roofline.HEADER, ("verifier", "1"), ("verifier", "4"))


def test_bandwidth_counts_both_directions_of_a_copy_and_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2e-3, 1e-3, 1e-3, 4e-3])
    monkeypatch.setattr("redraft.bench.roofline._seconds", lambda call: next(seconds))
    stream = HostStream(2, size=1 << 20)
    for _ in range(2):
        stream.run()
    assert (stream.read, stream.copy) == pytest.approx(((1 << 20) / 1e6, (2 << 20) / 1e6))


# --- on a device -----------------------------------------------------------------------------------------------------

ON_DEVICE = [("verifier", 1), ("verifier", 8), ("lyanna.draft", 2), ("lyanna.resample", 1)]


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls, and no cost curve, which a roofline does not need."""
    monkeypatch.setattr(roofline, "_BLOCKS", 2)
    monkeypatch.setattr(roofline, "_RUNS", 3)
    monkeypatch.setattr(api, "load_costs", lambda verifier, identity: VerifyCosts({1: CURVE}))


@pytest.fixture
def gpu(lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fakes]:
    """Opens the bundle over stand-ins with this much memory."""

    def install(total: int = 24 << 20) -> Fakes:
        fakes = tensorrt_device(open_bundle(lyanna_bundle, verify=False), tmp_path, cuda=FakeCuda(total))
        monkeypatch.setattr(api, "open_device", lambda bundle, name, threads: fakes.device)
        return fakes

    return install


def test_programs_of_a_device_are_timed_against_its_own_copy(lyanna_bundle: Path) -> None:
    found = measure(lyanna_bundle, threads=1, device="cpu")
    bundle = open_bundle(lyanna_bundle, verify=False)
    form = HostDevice(bundle, 1).form
    expected = [(form(graph) if graph.endswith(names.DRAFT) else graph, tokens) for graph, tokens in ON_DEVICE]
    assert [(engine.graph, engine.tokens) for engine in found.engines] == expected
    assert (found.device, found.threads, found.read, found.streamed_bytes) == ("cpu", 1, None, 256 << 20)
    kv_len = CONTEXT - 8
    assert found.kv_len == kv_len
    for engine in found.engines:
        assert engine.traffic == traffic(bundle, engine.graph, engine.tokens, kv_len)
        assert engine.share_of_bandwidth == pytest.approx(engine.traffic.total / engine.ms / 1e6 / found.copy)


def test_on_a_gpu_the_copy_is_as_large_as_its_memory_allows(lyanna_bundle: Path, gpu: Callable[..., Fakes]) -> None:
    """With 24 MiB of memory, engines keep half of the free part. The rest holds two ends of 4 MiB."""
    fakes = gpu()
    found = measure(lyanna_bundle, threads=1, device="cuda")
    assert [(engine.graph, engine.tokens) for engine in found.engines] == ON_DEVICE
    assert (found.device, found.threads, found.streamed_bytes) == ("cuda", None, 4 << 20)
    copies = [size for kind, size in fakes.cuda.copies if kind == "within" and size == 4 << 20]
    assert len(copies) == 2 * COPIES
    assert fakes.cuda.launches > 0
    assert found.copy > 0


def test_a_bundle_for_tensorrt_is_timed_on_its_gpu_with_smaller_trees(
    lyanna_bundle: Path, gpu: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a call come from the portable graphs, which such a bundle has too."""
    portable = open_bundle(lyanna_bundle, verify=False)
    limits = CallLimits(batch=1, tree=4, prefill=16, max_model_len=CONTEXT)
    graph = portable.manifest.graphs[names.VERIFIER]
    profiles = profiles_of(verifier_symbols(names.VERIFIER, limits), graph.inputs, limits, False)
    engines = {names.VERIFIER: EngineRecord("verifier.engine", graph.file, profiles)}
    record = TensorRtRecord("10.13.3", "GPU", "9.0", "plugin", engines=engines)
    bundle = Bundle(lyanna_bundle, replace(portable.manifest, backend="tensorrt", tensorrt=record, drafters={}))
    for module in (roofline, api):
        monkeypatch.setattr(module, "open_bundle", lambda path, verify=True: bundle)
    gpu()
    found = measure(lyanna_bundle)
    assert found.device == "cuda"
    assert [(engine.graph, engine.tokens) for engine in found.engines] == [("verifier", 1), ("verifier", 4)]
    assert found.engines[1].traffic == traffic(portable, names.VERIFIER, 4, CONTEXT - 8)


def test_a_devices_bandwidth_is_of_real_bytes_until_the_last_one_is_there(
    lyanna_bundle: Path, gpu: Callable[..., Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unwritten host memory is one repeated page, and a queued copy has not run yet."""
    device, size, waiting = gpu().device, 1 << 20, []
    seconds = iter([4e-3, 1e-3, 2e-3])

    def timed(call: Callable[[], object]) -> float:
        waiting.append(len(device.tensorrt.cuda.queued))
        call()
        waiting.append(len(device.tensorrt.cuda.queued))
        return next(seconds)

    monkeypatch.setattr(roofline, "_seconds", timed)
    stream = DeviceStream(device, size)
    for _ in range(3):
        stream.run()
    assert waiting == [0] * 6
    assert stream.copy == pytest.approx(COPIES * 2 * size / 1e-3 / 1e9)
    assert stream.read is None
    assert stream.target.read().all()


def test_a_device_without_memory_for_a_copy_is_refused(gpu: Callable[..., Fakes]) -> None:
    with pytest.raises(BackendError, match=r"of GPU memory needed \(both ends of a copy"):
        DeviceStream(gpu(LEAST_STREAMED_BYTES).device)
    assert DeviceStream(gpu(4 * LEAST_STREAMED_BYTES).device).size == LEAST_STREAMED_BYTES
